"""Inference engines behind one protocol (`coderepairrl.protocols.Engine`).

`make` starts one by name. An engine of your own is a class named by import path, ``package.module:Class``, with an
async classmethod ``start(model, *, log_dir, **options)`` that returns it ready to serve, and it sits the same exam
(`certify/engine.py`). Class methods ``check``, ``accepts`` and ``require``, each optional, say before a run is
begun what `start` would refuse (`check`, `check_model`, `require`), and ``versions`` what it would run.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from coderepairrl import registry
from coderepairrl.engines.scripted import ScriptedEngine
from coderepairrl.engines.tiny import TinyEngine
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import Engine

__all__ = ["SHIPPED", "ScriptedEngine", "TinyEngine", "check", "check_model", "make", "receives", "require", "versions"]

SHIPPED = {
    "tiny": "coderepairrl.engines.tiny:TinyEngine",
    "vllm": "coderepairrl.engines.vllm:VllmEngine",
    "scripted": "coderepairrl.engines.scripted:ScriptedEngine",
}
"""The engines that ship, by name."""


async def make(name: str, model: Path, /, *, log_dir: Path, **options: Any) -> Engine:
    """Start the engine `name` on the weights in the folder `model`; its log goes to `log_dir`.

    Raises:
        ConfigError: unknown name or option (the nearest one is suggested), or a model it cannot serve.
        EngineFault: it did not start.
    """
    engine: Engine = await check(name, options)(model, log_dir=log_dir, **options)
    return engine


def check(name: str, options: Mapping[str, Any]) -> Callable[..., Awaitable[Engine]]:
    """What starts the engine `name`, without starting it.

    Raises `ConfigError` for an unknown name or option, one that is missing, and values that cannot be on any machine,
    where its class says so beforehand (``check(options)``).
    """
    engine = registry.resolve("engine", name, SHIPPED)
    start: Callable[..., Awaitable[Engine]] | None = getattr(engine, "start", None)
    if not callable(start):
        raise ConfigError(
            f"engine {name!r} has no classmethod start(model, *, log_dir, ...)", fix="protocols.py says what it needs"
        )
    registry.check_options("engine", name, start, options)
    try:
        inspect.signature(start).bind(Path(), log_dir=Path(), **options)
    except TypeError as error:
        raise ConfigError(f"engine {name!r}: {error}", fix="name it in engine.options") from None
    if (own := getattr(engine, "check", None)) is not None:
        own(options)
    registry.check_types("engine", name, start, options)
    return start


def check_model(name: str, model: Path, options: Mapping[str, Any]) -> None:
    """Refuse a model that the engine `name` cannot serve with `options`, where its class says so beforehand
    (``accepts(model, options)``).

    Raises `ConfigError`.
    """
    if (accepts := getattr(registry.resolve("engine", name, SHIPPED), "accepts", None)) is not None:
        accepts(model, options)


def require(name: str, options: Mapping[str, Any]) -> None:
    """Raise `PrerequisiteError`, with what helps, if the class of the engine `name` knows that this machine lacks what
    it needs (``require(options)``)."""
    if (own := getattr(registry.resolve("engine", name, SHIPPED), "require", None)) is not None:
        own(options)


def versions(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Versions of the packages by which the class of the engine `name` would sample, where it has any of its own and
    says them beforehand (``versions(options)``). Raises `PrerequisiteError`, as `require`."""
    own = getattr(registry.resolve("engine", name, SHIPPED), "versions", None)
    return dict(own(options)) if own is not None else {}


def receives(name: str) -> bool:
    """Whether the engine `name` also takes full weights without a file (`coderepairrl.sync.streamed.Receiving`)."""
    return hasattr(registry.resolve("engine", name, SHIPPED), "receivers")
