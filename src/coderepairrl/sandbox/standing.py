"""Workspaces that need no opening: none at all, or one as an agent left it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from coderepairrl.errors import SandboxFault
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.types import ExecResult, Task


@asynccontextmanager
async def workspace(backend: SandboxBackend, task: Task) -> AsyncIterator[Sandbox]:
    """Open a fresh sandbox for `task`, or `Nothing` for a task without a workspace."""
    if not task.workspace:
        yield Nothing()
        return
    async with backend.open(task) as box:
        yield box


class Nothing(Sandbox):
    """The sandbox of a task without a workspace: every action fails and changes nothing."""

    workdir = "/"

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        """Return exit code 127."""
        return ExecResult(127, b"this task has no workspace: answer it\n")

    async def read(self, path: str) -> bytes:
        """Raise FileNotFoundError."""
        raise FileNotFoundError(2, "this task has no workspace", path)

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Raise PermissionError."""
        raise PermissionError(13, "this task has no workspace", path)

    async def reach(self, address: str) -> str:
        """Raise `SandboxFault`: agents that run in a sandbox cannot do such tasks."""
        raise SandboxFault(
            "the task has no workspace, and its agent runs in one",
            fix="answer such tasks with an agent on the host: direct, for example (docs/guides/tasks.md)",
        )

    async def diff(self) -> bytes:
        """Return an empty diff."""
        return b""


class Standing(SandboxBackend):
    """A backend for one open sandbox, `box`, which stays open. `backend` opens fresh ones."""

    def __init__(self, backend: SandboxBackend, box: Sandbox) -> None:
        self.name, self.backend = backend.name, backend
        self._box = box

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """Yield the one sandbox, for any `task`."""
        yield self._box
