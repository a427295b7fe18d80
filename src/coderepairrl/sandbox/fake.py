"""A sandbox for tests, without processes: files are in memory, and answers to commands are scripted."""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from coderepairrl.errors import SandboxFault
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.types import ExecResult

if TYPE_CHECKING:
    from coderepairrl.types import Task

_AnswerFunction = Callable[[tuple[str, ...], "ScriptedSandbox"], ExecResult]


class ScriptedSandbox(Sandbox):
    """Files in a dict; commands answered by `script`, which maps a command line or its program to a result.

    A result is an `ExecResult`, bytes (printed, exit code 0), an exception (raised), or a function of argv and this
    sandbox. Commands without a result exit with 127. `calls` lists all commands.

    >>> import asyncio
    >>> box = ScriptedSandbox({"a.py": b"x = 1\\n"}, {"ls": b"a.py\\n"})
    >>> asyncio.run(box.exec(["ls", "-l"])).output
    b'a.py\\n'
    """

    workdir = "/workspace"

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        script: Mapping[str, ExecResult | bytes | BaseException | _AnswerFunction] | None = None,
    ) -> None:
        self.files = dict(files or {})
        self.script = dict(script or {})
        self.calls: list[tuple[str, ...]] = []
        self.reached: list[str] = []
        self.dead = False
        self._before = dict(self.files)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_bytes: int = 1 << 20,
        cwd: str | None = None,
    ) -> ExecResult:
        """Look the answer up by the full command line, then by the program."""
        self._check_alive()
        line = tuple(argv)
        self.calls.append(line)
        answer = self.script.get(" ".join(line), self.script.get(line[0]))
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            return ExecResult(127, f"{line[0]}: command not found\n".encode())
        if isinstance(answer, bytes):
            return ExecResult(0, answer[:max_bytes], truncated=len(answer) > max_bytes)
        return answer if isinstance(answer, ExecResult) else answer(line, self)

    async def read(self, path: str) -> bytes:
        """Read a file of the dict. Raises FileNotFoundError, PermissionError."""
        self._check_alive()
        name = self._relative_path(path)
        if name not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[name]

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Write a file of the dict. Raises PermissionError."""
        self._check_alive()
        self.files[self._relative_path(path)] = data

    async def reach(self, address: str) -> str:
        """Record `address` in `reached` without bridging it."""
        self._check_alive()
        self.reached.append(address)
        return "http://127.0.0.1:1"

    async def diff(self) -> bytes:
        """Compute a unified diff of text files with difflib."""
        self._check_alive()
        parts = []
        for name in sorted({*self._before, *self.files}):
            old, new = self._before.get(name), self.files.get(name)
            if old == new:
                continue
            parts.append(f"diff --git a/{name} b/{name}\n".encode())
            parts += [b"new file mode 100644\n"] if old is None else []
            parts += [b"deleted file mode 100644\n"] if new is None else []
            lines = difflib.diff_bytes(
                difflib.unified_diff,
                (old or b"").splitlines(keepends=True),
                (new or b"").splitlines(keepends=True),
                b"/dev/null" if old is None else f"a/{name}".encode(),
                b"/dev/null" if new is None else f"b/{name}".encode(),
            )
            parts += [line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines]
        return b"".join(parts)

    def kill(self) -> None:
        """Make every later call raise `SandboxFault`."""
        self.dead = True

    def _check_alive(self) -> None:
        if self.dead:
            raise SandboxFault("the sandbox was killed (scripted)")

    def _relative_path(self, path: str) -> str:
        full = posixpath.normpath(posixpath.join(self.workdir, path))
        if not full.startswith(self.workdir + "/"):
            raise PermissionError(13, "outside the workspace", path)
        return full.removeprefix(self.workdir + "/")


class ScriptedBackend(SandboxBackend):
    """Opens a `ScriptedSandbox` per task, listed in `sandboxes`."""

    name = "scripted"

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        script: Mapping[str, ExecResult | bytes | BaseException | _AnswerFunction] | None = None,
    ) -> None:
        self.files, self.script = files, script
        self.sandboxes: list[ScriptedSandbox] = []

    def show(self, folders: Sequence[str]) -> None:
        """Do nothing: the files are scripted."""

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[ScriptedSandbox]:
        """Open a new `ScriptedSandbox`."""
        sandbox = ScriptedSandbox(self.files, self.script)
        self.sandboxes.append(sandbox)
        try:
            yield sandbox
        finally:
            sandbox.kill()
