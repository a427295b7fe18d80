"""Backends that turn bugs of a user's class into faults that name it, or reuse an open sandbox."""

from __future__ import annotations

import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from coderepairrl.errors import CodeRepairError, SandboxFault
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.types import ExecResult, Task

T = TypeVar("T")


@contextmanager
def guard(name: str, *allowed: type[Exception]) -> Iterator[None]:
    """Turn errors of the call `name`, except `allowed` ones and `CodeRepairError`, into `SandboxFault`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (CodeRepairError, *allowed)):
            raise
        message = "".join(traceback.format_exception_only(error)).strip()  # safe even if the error's own text fails
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise SandboxFault(
            f"the sandbox {name} raised {message} ({place.filename}, line {place.lineno})",
            fix="repair the class; `crrl check sandbox module:Class` tests what it must do",
        ) from error


def _guard_method(name: str) -> Callable[..., Any]:
    # a method that calls the inner backend's
    def call(self: GuardedBackend, *arguments: Any) -> Any:
        with guard(f"{self._path}.{name}"):
            return getattr(self._inner, name)(*arguments)

    return call


class GuardedBackend(SandboxBackend):
    """Wraps backend `inner` of class `path` (``module:Class``)."""

    check_image = _guard_method("check_image")
    show = _guard_method("show")
    require = _guard_method("require")
    info = _guard_method("info")
    close = _guard_method("close")

    def __init__(self, inner: SandboxBackend, path: str) -> None:
        self.name = inner.name
        self._inner = inner
        self._path = path

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """Open a guarded sandbox of `inner`."""
        with guard(f"{self._path}.open"):
            context = self._inner.open(task)
            box = await context.__aenter__()
        try:
            yield _GuardedSandbox(box, self._path)
        except BaseException:
            # the error of the `async with` body: `inner` may raise it again, which is no bug of its class
            raised = sys.exc_info()
            with guard(f"{self._path}.open", *((type(raised[1]),) if isinstance(raised[1], Exception) else ())):
                is_suppressed = await context.__aexit__(*raised)
            if not is_suppressed:
                raise
        else:
            with guard(f"{self._path}.open"):
                await context.__aexit__(None, None, None)


class _GuardedSandbox(Sandbox):
    def __init__(self, inner: Sandbox, path: str) -> None:
        self._inner = inner
        self._path = path
        with guard(f"{path}.workdir"):
            self.workdir = inner.workdir

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        with guard(f"{self._path}.exec"):
            return self._check_answer_type("exec", await self._inner.exec(argv, **options), ExecResult)

    async def read(self, path: str) -> bytes:
        with guard(f"{self._path}.read", OSError):  # agents can cause these
            return self._check_answer_type("read", await self._inner.read(path), bytes)

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        with guard(f"{self._path}.write", OSError):
            await self._inner.write(path, data, follow=follow)

    async def reach(self, address: str) -> str:
        with guard(f"{self._path}.reach"):
            return self._check_answer_type("reach", await self._inner.reach(address), str)

    async def diff(self) -> bytes:
        with guard(f"{self._path}.diff"):
            return self._check_answer_type("diff", await self._inner.diff(), bytes)

    def _check_answer_type(self, method: str, answer: object, kind: type[T]) -> T:
        if not isinstance(answer, kind):
            raise SandboxFault(f"the sandbox {self._path}.{method} returned {answer!r:.200}, not {kind.__name__}")
        return answer


@asynccontextmanager
async def open_workspace(backend: SandboxBackend, task: Task) -> AsyncIterator[Sandbox]:
    """Open a fresh sandbox for `task`, or `NoSandbox` for a task without a workspace."""
    if not task.workspace:
        yield NoSandbox()
        return
    async with backend.open(task) as box:
        yield box


class NoSandbox(Sandbox):
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


class OpenSandboxBackend(SandboxBackend):
    """A backend for one open sandbox, `box`, which stays open. `backend` opens fresh ones."""

    def __init__(self, backend: SandboxBackend, box: Sandbox) -> None:
        self.name, self.backend = backend.name, backend
        self._box = box

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """Yield the one sandbox, for any `task`."""
        yield self._box
