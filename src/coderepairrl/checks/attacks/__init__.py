"""Stages of attacks: a host to attack, and on it a sandbox or a plain process.

The host has secrets, sockets, a process, and a repository with the repair in a later commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from coderepairrl.checks.attacks.probes import INSIDE
from coderepairrl.errors import SandboxFault
from coderepairrl.processes import hostgit
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Sandbox
from coderepairrl.sandbox.privileges import command_as
from coderepairrl.types import ExecResult

PATIENCE = 120.0
"""Seconds for a probe; on a busy machine, CPU time passes slowly."""


class Target(NamedTuple):
    """Attacked host."""

    folder: Path
    word: str
    """Random text in the secrets only; probes get its halves."""
    env: Mapping[str, str]
    user: int | None
    """User id of plain processes, for root."""

    def gained(self, output: bytes) -> bool:
        """Whether a probe printed the word, or left a file on the host."""
        places = (self.folder / "outside" / "plant", Path("/tmp", self.word), Path("/dev/shm", self.word))
        planted = [place for place in places if place.exists()]
        for place in planted:
            place.unlink()
        return bool(planted) or self.word.encode() in output


@dataclass
class Inside:
    """Open sandbox."""

    box: Sandbox
    target: Target

    async def run(self, script: str, *, timeout: float = PATIENCE, max_bytes: int = 1 << 20) -> ExecResult:
        """Run a bash script in the workspace."""
        return await self.box.exec(
            ["bash", "-c", script], env=self.target.env, timeout=timeout, max_bytes=max_bytes, stdin=b""
        )

    async def write(self, path: str, data: bytes) -> None:
        """Write a file as an agent's file tool. Raises OSError."""
        await self.box.write(path, data)

    async def patch(self) -> bytes:
        """Change as graders get it."""
        return await self.box.diff()

    async def exchange(self, script: str) -> bytes:
        """Answer of the keeper, the commands' parent, after `script` attacked it: ``fine`` and a newline, or empty."""
        try:
            async with asyncio.timeout(60):
                output = (await self.run(script, timeout=10)).output
                if self.target.word.encode() in output:
                    return output
                return (await self.box.exec(["echo", "fine"])).output
        except (SandboxFault, TimeoutError):
            return b""


@dataclass
class Outside:
    """Unprotected clone with all its history."""

    work: Path
    target: Target
    user: int | None

    async def run(self, script: str, *, timeout: float = PATIENCE, max_bytes: int = 1 << 20) -> ExecResult:
        """Run a bash script in the clone; daemons stay."""
        return await asyncio.to_thread(self._run, ["bash", "-c", script], timeout)

    def _run(self, argv: Sequence[str], timeout: float) -> ExecResult:
        with tempfile.TemporaryFile() as out:  # a pipe would wait for daemons that hold it
            try:
                done = subprocess.run(
                    command_as(self.user, argv),
                    cwd=self.work,
                    env={**os.environ, **self.target.env, "HOME": str(self.work.parent), "LC_ALL": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    timeout=timeout,
                )
                code, timed_out = done.returncode, False
            except subprocess.TimeoutExpired:
                code, timed_out = -signal.SIGKILL, True
            out.seek(0)
            return ExecResult(code & 0xFF, out.read(), timed_out=timed_out)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, also through links."""
        (self.work / path).write_bytes(data)

    async def patch(self) -> bytes:
        """Change by plain git; empty on failure."""
        result = await asyncio.to_thread(self._run, [sys.executable, "-c", INSIDE, "diff"], 5.0)
        return result.output if result.exit_code == 0 and not result.timed_out else b""

    async def exchange(self, script: str) -> bytes:
        """Answer of a parent process whose socket `script` inherits."""
        return await asyncio.to_thread(self._exchange, script)

    def _exchange(self, script: str) -> bytes:
        ours, keeper_end = socket.socketpair()
        with ours:
            with keeper_end:
                argv = [sys.executable, "-P", "-c", INSIDE, "keeper", str(keeper_end.fileno()), script]
                keeper = subprocess.Popen(
                    command_as(_KEEPER_USER if os.geteuid() == 0 else None, argv),
                    env={**self.target.env, "PATH": os.environ["PATH"]},
                    cwd="/",
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[keeper_end.fileno()],
                )
            ours.settimeout(3.0)
            output = b""
            with contextlib.suppress(TimeoutError):
                while data := ours.recv(4096):
                    output += data
            keeper.kill()
            keeper.wait()
        return output


_KEEPER_USER = 61_000 + os.getpid() % 4000  # user id without other processes, so attacks signal only those started here


Stage = Inside | Outside
"""Place of an attack."""


@contextlib.asynccontextmanager
async def clone_workspace(target: Target, user: int | None) -> AsyncIterator[Path]:
    """Plain clone of the workspace, owned by `user`."""
    with tempfile.TemporaryDirectory(dir=target.folder, prefix="clone-", ignore_cleanup_errors=True) as name:
        work = Path(name) / "work"
        shutil.copytree(target.folder / "repository", work, symlinks=True)
        _change_owner(Path(name), user)
        Path(name).chmod(0o755)
        try:
            yield work
        finally:
            started = work / "started"
            if started.exists():  # a daemon that outlived its command, as it was meant to
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(started.read_text()), signal.SIGKILL)


def prepare_host(stack: contextlib.ExitStack, limits: Mapping[str, int], user: int | None) -> tuple[Target, Path]:
    """Prepare a host and the attacked workspace, until `stack` closes."""
    folder = stack.enter_context(scratch("redteam"))
    folder.chmod(0o755)
    word = secrets.token_hex(8)
    (folder / "secret").write_text(f"{word}\n")
    (folder / "outside").mkdir()
    for name, mode in (("secret", 0o644), ("outside", 0o777)):
        (folder / name).chmod(mode)
        if user is not None:
            os.chown(folder / name, user, user)
    env = {
        "A": word[:8],
        "B": word[8:],
        "SECRET": str(folder / "secret"),
        "OUTSIDE": str(folder / "outside"),
        "PACKAGE": str(Path(__file__).resolve().parents[2]),
        **{name.upper(): str(value) for name, value in limits.items()},
    }
    env |= _open_sockets(stack, folder)
    os.environ["CRRL_REDTEAM_KEY"] = word
    stack.callback(os.environ.pop, "CRRL_REDTEAM_KEY")
    command = ["/usr/bin/env", f"CRRL_KEY={word}", "bash", "-c", f": {word}; read < <(sleep 600)"]
    holder = subprocess.Popen(
        command_as(user, command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    stack.callback(holder.wait)
    stack.callback(os.killpg, holder.pid, signal.SIGKILL)
    env["HOLDER"] = str(holder.pid)
    repository = folder / "repository"
    env["FIXED"] = _make_repository(repository, folder / "remote", word, user)
    env["REMOTE"] = str(folder / "remote")
    return Target(folder, word, env, user), repository


def _open_sockets(stack: contextlib.ExitStack, folder: Path) -> dict[str, str]:
    tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    named = stack.enter_context(socket.socket(socket.AF_UNIX))
    named.bind(str(folder / "socket"))
    (folder / "socket").chmod(0o777)
    abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
    name = f"crrl-redteam-{secrets.token_hex(4)}"
    abstract.bind(f"\0{name}")
    for server in (named, abstract):
        server.listen()
    return {"TCP": str(tcp.getsockname()[1]), "UNIX": str(folder / "socket"), "ABSTRACT": name}


def _change_owner(folder: Path, user: int | None) -> None:
    # git refuses a repository of another user
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(Path(parent, name), user if user is not None else -1, -1, follow_symlinks=False)


def _make_repository(folder: Path, remote: Path, word: str, user: int | None) -> str:
    """Commit the bug, then the repair; check out the first."""

    def git(*args: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        return hostgit.git(*who, *args, folder=folder / ".git", tree=folder).decode().strip()

    folder.mkdir()
    hostgit.git("init", "-q", "-b", "main", str(folder))
    git("config", "user.name", "t")
    git("config", "user.email", "t@t")
    for text in ("    return a - b\n", f"    return a + b  # {word}\n"):
        (folder / "app.py").write_text(f"def add(a, b):\n{text}")
        git("add", "-A")
        git("commit", "-qm", text)
    fixed = git("rev-parse", "HEAD")
    hostgit.git("clone", "-q", "--bare", str(folder), str(remote))
    _change_owner(remote, user)
    git("remote", "add", "origin", str(remote))
    git("branch", "fixed")
    git("reset", "-q", "--hard", "HEAD~")
    git("repack", "-adq")
    return fixed
