"""Workspaces that are not opened: none at all, and one that stands as an agent left it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from coderepairrl.errors import SandboxFault
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.types import ExecResult, Task


@asynccontextmanager
async def workspace(backend: SandboxBackend, task: Task) -> AsyncIterator[Sandbox]:
    """A fresh sandbox for `task`, or `Nothing` for one without a workspace: nothing is started for a question."""
    if not task.workspace:
        yield Nothing()
        return
    async with backend.open(task) as box:
        yield box


class Nothing(Sandbox):
    """The workspace of a task that has none: whatever an agent tries in it fails, and changes nothing."""

    workdir = "/"

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        """No command runs: exit code 127."""
        return ExecResult(127, b"this task has no workspace: answer it\n")

    async def read(self, path: str) -> bytes:
        """There is no file: raises FileNotFoundError."""
        raise FileNotFoundError(2, "this task has no workspace", path)

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Nothing can be written: raises PermissionError."""
        raise PermissionError(13, "this task has no workspace", path)

    async def reach(self, address: str) -> str:
        """Raises `SandboxFault`: a program that runs in the sandbox cannot work on such a task."""
        raise SandboxFault(
            "the task has no workspace, and its agent runs in one",
            fix="answer such tasks with an agent on the host: direct, for example (docs/guides/tasks.md)",
        )

    async def diff(self) -> bytes:
        """Nothing has changed."""
        return b""


class Standing(SandboxBackend):
    """A backend of one open sandbox, `box`, as it stands; it stays open. `backend` opens fresh ones."""

    def __init__(self, backend: SandboxBackend, box: Sandbox) -> None:
        self.name, self.backend = backend.name, backend
        self._box = box

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """The one sandbox there is, for any `task`."""
        yield self._box
