"""A sandbox without isolation: a folder, for agents with scripted models."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from coderepairrl.errors import SandboxFault
from coderepairrl.processes.hostgit import git
from coderepairrl.types import ExecResult

_ENVIRONMENT = {"PATH": os.defpath, "HOME": "/nonexistent", "LC_ALL": "C.UTF-8", "GIT_CONFIG_NOSYSTEM": "1"}
_IDENTITY = ("-c", "user.name=exam", "-c", "user.email=exam@localhost")


class FolderSandbox:
    """A git repository of `files`. Commands run as ordinary child processes."""

    def __init__(self, workdir: Path, files: Mapping[str, bytes]) -> None:
        self.workdir = str(workdir)
        self._root = workdir.resolve()
        for name, data in files.items():
            (workdir / name).parent.mkdir(parents=True, exist_ok=True)
            (workdir / name).write_bytes(data)
        git("init", "-q", "-b", "main", self.workdir)
        self._git("-c", "core.autocrlf=false", "add", "-A")
        self._git(*_IDENTITY, "commit", "-q", "--allow-empty", "-m", "task")
        self._base = self._git("rev-parse", "HEAD").decode().strip()

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
        """Run `argv` in a new session, killed at the end."""
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._root / (cwd or "."),
            env={**_ENVIRONMENT, **(env or {})},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        output = bytearray()
        timed_out = truncated = False
        try:
            async with asyncio.timeout(timeout):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(stdin)
                    process.stdin.close()
                while data := await process.stdout.read(1 << 16):
                    truncated = truncated or len(output) + len(data) > max_bytes
                    output += data[: max_bytes - len(output)]
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
        code = 128 - code if code < 0 else code
        return ExecResult(code, bytes(output), timed_out, truncated, time.monotonic() - started)

    async def read(self, path: str) -> bytes:
        """Read a file of the repository."""
        return self._resolve_inside(path).read_bytes()

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Replace or create a file. Raises `SandboxFault` without `follow`: this class cannot refuse links."""
        if not follow:
            raise SandboxFault("a plain folder cannot refuse symbolic links: grade in a sandbox")
        target = self._resolve_inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def reach(self, address: str) -> str:
        """Raise `SandboxFault`: no bridge is needed, since commands share the host's network."""
        raise SandboxFault("a plain folder has no bridge: its commands reach the host's loopback directly")

    async def diff(self) -> bytes:
        """Diff against the first commit, including new and committed files."""
        self._git("add", "-A", "-f")
        return self._git("diff", "--cached", "--binary", self._base)

    def _resolve_inside(self, path: str) -> Path:
        target = (self._root / path).resolve()
        if not target.is_relative_to(self._root):
            raise PermissionError(f"{path} is outside")
        return target

    def _git(self, *arguments: str) -> bytes:
        return git(*arguments, folder=self._root / ".git", tree=self._root)
