"""Host worth attacking: secrets, sockets, a process, a repository with the repair in its future."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from coderepairrl.checks.attacks.stages import Target
from coderepairrl.processes import hostgit
from coderepairrl.processes.scratch import scratch
from coderepairrl.sandbox.privileges import command_as


@contextlib.asynccontextmanager
async def clone(target: Target, user: int | None) -> AsyncIterator[Path]:
    """Plain clone of the workspace, owned by `user`."""
    with tempfile.TemporaryDirectory(dir=target.folder, prefix="clone-", ignore_cleanup_errors=True) as name:
        work = Path(name) / "work"
        shutil.copytree(target.folder / "repository", work, symlinks=True)
        _give(Path(name), user)
        Path(name).chmod(0o755)
        try:
            yield work
        finally:
            started = work / "started"
            if started.exists():  # a daemon that outlived its command, as it was meant to
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(started.read_text()), signal.SIGKILL)


def prepare(stack: contextlib.ExitStack, limits: Mapping[str, int], user: int | None) -> tuple[Target, Path]:
    """Prepare a host, until `stack` closes, and the attacked workspace."""
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
    env |= _sockets(stack, folder)
    stack.enter_context(_variable("CRRL_REDTEAM_KEY", word))
    command = ["/usr/bin/env", f"CRRL_KEY={word}", "bash", "-c", f": {word}; read < <(sleep 600)"]
    holder = subprocess.Popen(
        command_as(user, command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    stack.callback(holder.wait)
    stack.callback(os.killpg, holder.pid, signal.SIGKILL)
    env["HOLDER"] = str(holder.pid)
    repository = folder / "repository"
    env["FIXED"] = _repository(repository, folder / "remote", word, user)
    env["REMOTE"] = str(folder / "remote")
    return Target(folder, word, env, user), repository


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _sockets(stack: contextlib.ExitStack, folder: Path) -> dict[str, str]:
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


def _give(folder: Path, user: int | None) -> None:
    # git reads no repository of another user
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(Path(parent, name), user if user is not None else -1, -1, follow_symlinks=False)


def _repository(folder: Path, remote: Path, word: str, user: int | None) -> str:
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
    _give(remote, user)
    git("remote", "add", "origin", str(remote))
    git("branch", "fixed")
    git("reset", "-q", "--hard", "HEAD~")
    git("repack", "-adq")
    return fixed
