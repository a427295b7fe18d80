"""Attacks on a sandbox, each tried where nothing stops it, too.

``python -m coderepairrl.certify.redteam NAME ...`` prints the table of ``docs/measurements/redteam.md``.
An attack is a function of a `Stage`, and returns whether it succeeded. `Inside` is a sandbox; `Outside`, the positive
control, is a plain process of the same user in a plain clone. A probe that does not succeed there proves nothing.
What an attack gained is a word that it cannot know otherwise, a file on the host, or a lie that we believed.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from coderepairrl.certify.probes import (
    DIFF,
    DOORS,
    ESCAPES,
    FIX,
    KEEPER,
    LIFETIME,
    LIMITS,
    NETWORK,
    REFERENCE,
    SECRETS,
    THREADS,
)
from coderepairrl.errors import CodeRepairError, ConfigError, SandboxFault
from coderepairrl.processes import hostgit
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.sandbox.privileges import command_as
from coderepairrl.types import ExecResult, Task

TIGHT: Mapping[str, Any] = {
    "processes": 64,
    "memory": 128 << 20,
    "file_bytes": 8 << 20,
    "tmp_bytes": 16 << 20,
    "disk_bytes": 32 << 20,
    "files": 2000,
    "cpu_seconds": 2,
    "open_files": 256,
}
"""Limits small enough to be broken on purpose, on the host as well."""


NOT_KEPT: Mapping[str, tuple[str, ...]] = {
    "sandlock": ("tmp_bytes", "disk_bytes", "files"),
}
"""Limits that a backend refuses, since it cannot keep them."""


def tight(name: str) -> dict[str, Any]:
    """`TIGHT`, as far as the backend `name` has it."""
    return {limit: value for limit, value in TIGHT.items() if limit not in NOT_KEPT.get(name, ())}


PATIENCE = 120.0
"""Seconds that a probe has: one that needs seconds of CPU waits long for them on a machine that does other things."""


class Stage(Protocol):
    """Where an attack runs: in a sandbox, or where nothing stops it."""

    async def run(self, script: str, *, timeout: float = PATIENCE, max_bytes: int = 1 << 20) -> ExecResult:
        """A bash script in the workspace."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """What a file tool of an agent does for the model. Raises OSError."""
        ...

    async def patch(self) -> bytes:
        """The change as whoever judges the attempt sees it; empty if that fails."""
        ...

    async def exchange(self, script: str) -> bytes:
        """What the keeper of the workspace says after `script` had a go at it: ``fine`` and a newline."""
        ...


class Target(NamedTuple):
    """The host that is attacked."""

    folder: Path
    word: str
    """Only the secrets hold it, and whoever has found a door says it: its two halves are known to every probe."""
    env: Mapping[str, str]
    """What probes are told."""
    user: int | None
    """Whom a plain process becomes, where we are root."""

    @property
    def plant(self) -> Path:
        """A file outside every workspace, in a folder that the sandbox's user may write to."""
        return self.folder / "outside" / "plant"

    def gained(self, said: bytes) -> bool:
        """Whether a probe got something: it said the word, or left a file on the host."""
        planted = self.plant.exists()
        self.plant.unlink(missing_ok=True)
        return planted or self.word.encode() in said


Act = Callable[[Stage, Target], Awaitable[bool]]


@dataclass(frozen=True)
class Attack:
    """One attack. `needs` is what its control takes that not every machine has: ``root``, or words for the table."""

    family: str
    name: str
    act: Act
    needs: str = ""


class AttackResult(NamedTuple):
    """What came of an attack; `control` is None where this machine cannot show it."""

    family: str
    name: str
    succeeded: bool
    control: bool | None


# -- the two stages


@dataclass
class Inside:
    """An open sandbox."""

    box: Sandbox
    target: Target

    async def run(self, script: str, *, timeout: float = PATIENCE, max_bytes: int = 1 << 20) -> ExecResult:
        """As `Stage.run`."""
        return await self.box.exec(
            ["bash", "-c", script], env=self.target.env, timeout=timeout, max_bytes=max_bytes, stdin=b""
        )

    async def write(self, path: str, data: bytes) -> None:
        """As `Stage.write`."""
        await self.box.write(path, data)

    async def patch(self) -> bytes:
        """As `Stage.patch`."""
        return await self.box.diff()

    async def exchange(self, script: str) -> bytes:
        """As `Stage.exchange`: the attack is one command, the question the next."""
        try:
            async with asyncio.timeout(60):
                said = (await self.run(script, timeout=10)).output
                if self.target.word.encode() in said:
                    return said
                return (await self.box.exec(["echo", "fine"])).output
        except (SandboxFault, TimeoutError):
            return b""


@dataclass
class Outside:
    """A clone with all of its history, and nothing in the way."""

    work: Path
    target: Target
    user: int | None

    async def run(self, script: str, *, timeout: float = PATIENCE, max_bytes: int = 1 << 20) -> ExecResult:
        """As `Stage.run`; nothing ends what outlives the command."""
        return await asyncio.to_thread(self._run, ["bash", "-c", script], timeout)

    def _run(self, argv: Sequence[str], timeout: float) -> ExecResult:
        with tempfile.TemporaryFile() as out:  # a pipe would wait for daemons that hold it
            process = subprocess.Popen(
                command_as(self.user, argv),
                cwd=self.work,
                env={**os.environ, **self.target.env, "HOME": str(self.work.parent), "LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            timed_out = False
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                timed_out = True
            out.seek(0)
            return ExecResult(process.returncode & 0xFF, out.read(), timed_out=timed_out)

    async def write(self, path: str, data: bytes) -> None:
        """As `Stage.write`."""
        (self.work / path).write_bytes(data)

    async def patch(self) -> bytes:
        """As `Stage.patch`, by plain git and a plain walk over the files."""
        done = await asyncio.to_thread(self._run, [sys.executable, "-c", _PLAIN], 5.0)
        return done.output if done.exit_code == 0 and not done.timed_out else b""

    async def exchange(self, script: str) -> bytes:
        """As `Stage.exchange`: a parent that runs `script` with its socket open, as a user who has nothing to lose."""
        return await asyncio.to_thread(self._exchange, script)

    def _exchange(self, script: str) -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                argv = [sys.executable, "-P", "-c", KEEPER, str(theirs.fileno()), script]
                keeper = subprocess.Popen(
                    command_as(_SACRIFICED if os.geteuid() == 0 else None, argv),
                    env={**self.target.env, "PATH": os.environ["PATH"]},
                    cwd="/",
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            ours.settimeout(3.0)
            said = b""
            with contextlib.suppress(TimeoutError):
                while data := ours.recv(4096):
                    said += data
            keeper.kill()
            keeper.wait()
        return said


_SACRIFICED = 61_000 + os.getpid() % 4000
"""A user of nobody's: all that it may signal is what we started as it."""

_PLAIN = """
import os, subprocess, sys
for folder, folders, files in os.walk("."):
    folders[:] = [name for name in folders if name != ".git"]
    for name in "\\n".join(files).split("\\n"):
        if name: open(os.path.join(folder, name), encoding="utf-8").read()
        if name: name.encode()
subprocess.run(["git", "add", "-A"], check=True)
sys.stdout.buffer.write(subprocess.run(["git", "diff", "--cached", "HEAD"], check=True, capture_output=True).stdout)
"""
"""What one would write: it reads files as text, names by line, and trusts the repository's own git."""


# -- the acts


def says(script: str) -> Act:
    """The script says the word, or leaves a file on the host."""

    async def act(stage: Stage, target: Target) -> bool:
        return target.gained((await stage.run(script)).output)

    return act


def _keeper(script: str) -> Act:
    """The keeper is dead, deaf, or says what it did not mean to."""

    async def act(stage: Stage, target: Target) -> bool:
        return await stage.exchange(script) != b"fine\n"

    return act


def _spoils_the_diff(script: str) -> Act:
    """The repair is missing from the diff, or code of the agent ran while it was taken."""

    async def act(stage: Stage, target: Target) -> bool:
        if not (done := await stage.run(FIX)).ok:
            raise SandboxFault(f"no attack can be tried here: {done.output!r}")
        await stage.run(script)  # refused, perhaps: its control shows whether it is a script at all
        patch = await stage.patch()
        ran = await stage.run("ls RAN || ls ../RAN")
        return ran.ok or not all(part in patch for part in (b"+    return a + b", b"+added"))

    return act


async def _writes_by_tool(stage: Stage, target: Target) -> bool:
    await stage.run('ln -s "$OUTSIDE" way')
    with contextlib.suppress(OSError):
        await stage.write("way/plant", b"x")
    return target.gained(b"")


async def _floods(stage: Stage, target: Target) -> bool:
    return len((await stage.run("yes | head -c 5000000", max_bytes=1 << 20)).output) > 1 << 20


def _outlives(script: str, *, timeout: bool = False) -> Act:
    """A daemon holds a lock after its command has returned, or was ended."""

    async def act(stage: Stage, target: Target) -> bool:
        for seconds in (1.0, 5.0, 25.0) if timeout else (30.0,):
            await stage.run(script, timeout=seconds)
            if (await stage.run("test -s started")).ok:  # else the machine was too slow for it
                break
        else:
            raise SandboxFault("no attack can be tried here: the daemon never ran")
        await stage.patch()
        return (await stage.run("flock -n lock true")).exit_code == 1

    return act


def _daemon(last: str) -> str:
    start = f"(setsid bash -c 'trap \"\" HUP TERM INT; exec 9> lock; flock 9; echo $$ > started; {last}' "
    return start + "> /dev/null 2>&1 &); until test -s started; do read -t 0.01 < /dev/zero; done"


def attacks() -> tuple[Attack, ...]:
    """All of them, by family."""
    scripts: dict[str, tuple[Mapping[str, str], Callable[[str], Act]]] = {
        "escapes": (ESCAPES, says),
        "secrets": (SECRETS, says),
        "network": (NETWORK, says),
        "kernel": (DOORS, says),
        "reference": (REFERENCE, says),
        "limits": (LIMITS, says),
        "keeper": (LIFETIME, _keeper),
        "diff": (DIFF, _spoils_the_diff),
    }
    found = [
        Attack(family, name.removesuffix(" (root)"), act(script), "root" if name.endswith(" (root)") else "")
        for family, (table, act) in scripts.items()
        for name, script in table.items()
    ]
    daemon, stopped = (_daemon(last) for last in ("exec sleep 300", "kill -STOP $$"))
    return (
        *found,
        Attack("escapes", "a file tool through a link", _writes_by_tool),
        Attack("limits", "a flood of output", _floods),
        Attack("keeper", "a daemon after its command", _outlives(daemon)),
        Attack("keeper", "a daemon after a timeout", _outlives(f"{daemon}; sleep 300", timeout=True)),
        Attack("keeper", "a daemon that is stopped", _outlives(stopped)),
        Attack("keeper", "a daemon that nobody is parent of", _outlives(f"({daemon}) & wait")),
        Attack("keeper", "threads whose first has ended", _outlives(THREADS)),
    )


FRESH = ("diff", "reference", "keeper", "limits")
"""Families whose attacks change the workspace or the sandbox: each gets its own."""


# -- running them


async def run(backend: SandboxBackend, families: Sequence[str] = (), *, controls: bool = True) -> list[AttackResult]:
    """Every attack of `families` (default: all) on `backend`, each with its control unless told otherwise.

    The family ``limits`` breaks what it can on this host, too, so `backend` should have small ones (`TIGHT`). Raises
    `ConfigError` for a backend that is no isolation: its attacks would hit whoever runs them.
    """
    info = backend.info()
    if not info.isolates:
        raise ConfigError(f"{backend.name} isolates nothing: every attack succeeds", fix="attack another sandbox")
    wanted = [attack for attack in attacks() if not families or attack.family in families]
    outcomes = []
    kept = tight(backend.name)
    limits = {name: info.limits.get(name, value) if name in kept else value for name, value in TIGHT.items()}
    with contextlib.ExitStack() as stack:
        target, repository = _prepare(stack, limits, info.user)
        task = Task("attack/1", "", "python", f"dir:{repository}", b"")
        shared: Sandbox | None = None
        async with contextlib.AsyncExitStack() as opened:
            for attack in wanted:
                if attack.family in FRESH:
                    async with backend.open(task) as box:
                        succeeded = await attack.act(Inside(box, target), target)
                else:
                    if shared is None:
                        shared = await opened.enter_async_context(backend.open(task))
                    succeeded = await attack.act(Inside(shared, target), target)
                outcomes.append(
                    AttackResult(
                        attack.family, attack.name, succeeded, await _control(attack, target) if controls else None
                    )
                )
    return outcomes


async def _control(attack: Attack, target: Target) -> bool | None:
    user = target.user
    if attack.needs == "root":
        if os.geteuid() != 0:
            return None
        user = None
    if attack.family == "keeper" and os.geteuid() != 0 and "everything" in attack.name:
        return None  # it would end the session of whoever runs this
    async with _clone(target, user) as work:
        if await attack.act(Outside(work, target, user), target):
            return True
    return None if attack.name in _NOT_EVERYWHERE else False


_NOT_EVERYWHERE = frozenset((
    "the internet", "vsock", "io_uring_setup", "userfaultfd", "perf_event_open", "init_module", "delete_module",
    "kexec_load", "kexec_file_load", "userfaultfd by its device", "what runs when a control group is empty",
    "priority of all of a user's processes", "sysrq",
    "the kernel's memory", "a disk", "a control group", "a new device", "answers in this package",
    "a search for answers",
))  # fmt: skip
"""What a machine may lack, or refuse to everybody."""


@contextlib.asynccontextmanager
async def _clone(target: Target, user: int | None) -> AsyncIterator[Path]:
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


def _prepare(stack: contextlib.ExitStack, limits: Mapping[str, int], user: int | None) -> tuple[Target, Path]:
    """A host worth attacking: secrets, sockets, a process, and a repository whose future holds the repair."""
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
        "PACKAGE": str(Path(__file__).resolve().parents[1]),
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
    """Let `user` own all of `folder`: git reads no repository of somebody else."""
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(Path(parent, name), user if user is not None else -1, -1, follow_symlinks=False)


def _repository(folder: Path, remote: Path, word: str, user: int | None) -> str:
    """Two commits, of which the second is the repair and holds the word; checked out is the first."""

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


async def examine(backend: SandboxBackend) -> AsyncIterator[Finding]:
    """One `Finding` per family, but for the limits, which the exam asks for."""
    for family in dict.fromkeys(attack.family for attack in attacks() if attack.family != "limits"):
        title = f"No attack of the family {family!r} succeeds"
        try:
            outcomes = await run(backend, [family])
        except (CodeRepairError, OSError) as error:
            yield Finding(title, False, str(error))
            continue
        bad = [f"{outcome.name} succeeds" for outcome in outcomes if outcome.succeeded]
        bad += [
            f"{outcome.name} fails even where nothing stops it, and proves nothing"
            for outcome in outcomes
            if outcome.control is False
        ]
        shown = sum(outcome.control is True for outcome in outcomes)
        detail = ", ".join(bad) or f"{len(outcomes)}, of which {shown} were seen to succeed where nothing stops them"
        yield Finding(title, not bad, detail)


def table(results: Mapping[str, Sequence[AttackResult]]) -> str:
    """A Markdown table: attacks by rows, backends by columns."""
    names = list(results)
    lines = [f"| | attack | where nothing stops it | {' | '.join(names)} |", f"|---|---|---|{'---|' * len(names)}"]
    words = {True: "succeeds", False: "**fails: the probe is broken**", None: "not on this machine"}
    family = ""
    for row in zip(*results.values(), strict=True):
        first = row[0]
        said = ["**succeeds**" if outcome.succeeded else "fails" for outcome in row]
        shown = first.family if first.family != family else ""
        family = first.family
        lines.append(f"| {shown} | {first.name} | {words[first.control]} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def main(names: Sequence[str]) -> int:
    """Attack the named backends and print the table; 1 if one attack succeeds or one control fails."""
    from coderepairrl.sandbox import make

    results: dict[str, list[AttackResult]] = {}
    for name in names:
        results[name] = asyncio.run(run(make(name, **tight(name)), controls=not results))  # one control serves all
    sys.stdout.write(table(results))
    bad = [entry for rows in results.values() for entry in rows if entry.succeeded or entry.control is False]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["bwrap"]))
