"""A sandbox class of the user's own, whose bugs are faults that name it and end neither the run nor its record."""

from __future__ import annotations

import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, cast

from coderepairrl.errors import CodeRepairError, SandboxFault
from coderepairrl.protocols import Sandbox, SandboxBackend, SandboxInfo
from coderepairrl.types import ExecResult, Task

_RETURNS: dict[str, type] = {"exec": ExecResult, "read": bytes, "write": type(None), "reach": str, "diff": bytes}
_OF_FILES = ("read", "write")
"""Methods whose OSError is an answer: an agent may bring it about."""


@contextmanager
def guard(what: str, *allowed: type[Exception]) -> Iterator[None]:
    """Raise `SandboxFault` for whatever `what`, a class or a method of the user's, raises beside its contract."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (CodeRepairError, *allowed)):
            raise
        said = "".join(traceback.format_exception_only(error)).strip()  # also of an error whose own text fails
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise SandboxFault(
            f"the sandbox {what} raised {said} ({place.filename}, line {place.lineno})",
            fix="repair the class; `crrl check sandbox module:Class` asks what it must do",
        ) from error


class Guarded(SandboxBackend):
    """The backend `inner`, of the class `path` (``module:Class``). Errors of it and of its sandboxes are faults."""

    def __init__(self, inner: SandboxBackend, path: str) -> None:
        self.name = inner.name
        self._inner = inner
        self._path = path

    @property
    def opens_images(self) -> bool:
        """As the inner one's."""
        with guard(f"{self._path}.opens_images"):
            return self._inner.opens_images

    def show(self, folders: Sequence[str]) -> None:
        """As the inner one's."""
        with guard(f"{self._path}.show"):
            self._inner.show(folders)

    def check(self) -> None:
        """As the inner one's. Raises `SandboxFault`, and what that raises."""
        with guard(f"{self._path}.check"):
            self._inner.check()

    def info(self) -> SandboxInfo:
        """As the inner one's."""
        with guard(f"{self._path}.info"):
            return self._inner.info()

    def close(self) -> None:
        """As the inner one's."""
        with guard(f"{self._path}.close"):
            self._inner.close()

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        """As `SandboxBackend.open`."""
        return self._open(task)

    @asynccontextmanager
    async def _open(self, task: Task) -> AsyncIterator[Sandbox]:
        with guard(f"{self._path}.open"):
            context = self._inner.open(task)
            box = await context.__aenter__()
        try:
            yield cast(Sandbox, _GuardedSandbox(box, self._path))
        except BaseException:
            raised = sys.exc_info()
            with guard(f"{self._path}.open", *((type(raised[1]),) if isinstance(raised[1], Exception) else ())):
                done = await context.__aexit__(*raised)
            if not done:
                raise
        else:
            with guard(f"{self._path}.open"):
                await context.__aexit__(None, None, None)


class _GuardedSandbox:
    def __init__(self, inner: Sandbox, path: str) -> None:
        self._inner = inner
        self._path = path

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._guarded(name, found) if name in _RETURNS else found

    def _guarded(self, name: str, method: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def call(*args: Any, **options: Any) -> object:
            what = f"{self._path}.{name}"
            with guard(what, *((OSError,) if name in _OF_FILES else ())):
                answer = await method(*args, **options)
            if not isinstance(answer, _RETURNS[name]):
                raise SandboxFault(f"the sandbox {what} returned {answer!r:.200}, not {_RETURNS[name].__name__}")
            return answer

        return call
