"""Scene of the exam's questions."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from coderepairrl.checks.sandbox import inside
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.types import Task


class Failed(Exception):
    """Failed expectation."""


class Scene(NamedTuple):
    """Backend, task, and surroundings on the host."""

    backend: SandboxBackend
    task: Task
    folder: Path
    """Host folder with a secret and a Unix socket."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        """Open a fresh sandbox."""
        async with self.backend.open(self.task) as sandbox:
            yield sandbox


Question = Callable[[Scene], Awaitable[str]]


def expect(condition: bool, otherwise: str) -> None:
    """Raise `Failed` with `otherwise` unless `condition` holds."""
    if not condition:
        raise Failed(otherwise)


@functools.cache
def program(name: str, *arguments: str) -> tuple[str, ...]:
    """Command line of a function in `inside`."""
    return ("python3", "-c", Path(inside.__file__).read_text(encoding="utf-8"), name, *arguments)


async def printed(box: Sandbox, name: str, *arguments: str, timeout: float = 30.0) -> str:
    """Output of a function in `inside`, with errors."""
    result = await box.exec(program(name, *arguments), timeout=timeout)
    return result.output.decode(errors="replace").strip()
