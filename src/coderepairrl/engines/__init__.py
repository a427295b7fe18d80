"""Inference engines behind one protocol (`coderepairrl.protocols.Engine`).

`make` starts one by name. An engine of your own is a class named by import path, ``package.module:Class``, with an
async classmethod ``start(model, *, log_dir, **options)`` that returns it ready to serve, and it sits the same exam
(`coderepairrl.engines.exam`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from coderepairrl import registry
from coderepairrl.engines.scripted import ScriptedEngine
from coderepairrl.engines.tiny import TinyEngine
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import Engine

__all__ = ["SHIPPED", "ScriptedEngine", "TinyEngine", "check", "check_model", "make"]

SHIPPED = {
    "tiny": "coderepairrl.engines.tiny:TinyEngine",
    "vllm": "coderepairrl.engines.vllm:VllmEngine",
    "scripted": "coderepairrl.engines.scripted:ScriptedEngine",
}
"""The engines that ship, by name."""


async def make(name: str, model: Path, *, log_dir: Path, **options: Any) -> Engine:
    """Start the engine `name` on the weights in the folder `model`; its log goes to `log_dir`.

    Raises:
        ConfigError: unknown name or option (the nearest one is suggested), or a model it cannot serve.
        EngineFault: it did not start.
    """
    engine: Engine = await check(name, options)(model, log_dir=log_dir, **options)
    return engine


def check(name: str, options: Mapping[str, Any]) -> Callable[..., Awaitable[Engine]]:
    """What starts the engine `name`, without starting it. Raises `ConfigError` for an unknown name or option."""
    start: Callable[..., Awaitable[Engine]] | None = getattr(registry.resolve("engine", name, SHIPPED), "start", None)
    if not callable(start):
        raise ConfigError(
            f"engine {name!r} has no classmethod start(model, *, log_dir, ...)", fix="protocols.py says what it needs"
        )
    registry.check_options("engine", name, start, options)
    return start


def check_model(name: str, model: Path) -> None:
    """Refuse a model that the engine `name` cannot serve, where its class says so beforehand (``accepts``).

    Raises `ConfigError`.
    """
    accepts: Callable[[Path], None] | None = getattr(registry.resolve("engine", name, SHIPPED), "accepts", None)
    if accepts is not None:
        accepts(model)
