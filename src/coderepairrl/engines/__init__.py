"""Inference engines: `make_engine` an `EngineSpec` by name or import path, then `start` its `Engine`.

Engines from ``package.module:Class`` must pass the same exam (`coderepairrl.checks.engine`).
"""

from __future__ import annotations

from typing import Any

from coderepairrl import registry
from coderepairrl.engines.scripted import ScriptedEngine
from coderepairrl.engines.tiny import TinyEngine
from coderepairrl.protocols import EngineSpec

__all__ = ["SHIPPED", "ScriptedEngine", "TinyEngine", "make_engine"]

SHIPPED = {
    "tiny": "coderepairrl.engines.tiny:Tiny",
    "vllm": "coderepairrl.engines.vllm:Vllm",
    "scripted": "coderepairrl.engines.scripted:Scripted",
}
"""The engines that ship, by name."""


def make_engine(name: str, /, **options: Any) -> EngineSpec:
    """Build the spec of engine `name`.

    Raises `ConfigError` for an unknown name or option (naming the nearest), a missing option, and invalid values.

    >>> make_engine("tiny", slots=4).name
    'tiny'
    """
    spec: EngineSpec = registry.make_part("engine", name, SHIPPED, EngineSpec, options)
    return spec
