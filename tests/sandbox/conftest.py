"""Sandboxes to test on. A missing prerequisite skips with its reason, except in CI, where it fails."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from coderepairrl.checks import redteam
from coderepairrl.checks import sandbox as exam
from coderepairrl.protocols import SandboxBackend
from coderepairrl.sandbox import make_backend
from coderepairrl.sandbox.backend import GuestBackend
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.guesthost import GuestProcess
from coderepairrl.sandbox.local import UnsafeLocal
from coderepairrl.sandbox.sandlock import Sandlock
from coderepairrl.sandbox.session import GuestSandbox
from coderepairrl.types import Task
from needs import skip_without_prerequisites

from .images import root_file_system, write_repository

T = TypeVar("T", Bubblewrap, Sandlock)
Make = Callable[..., Any]
LIMITS = {"memory": 256 << 20, "file_bytes": 16 << 20, "disk_bytes": 64 << 20}
"""Limits that the exam reaches quickly."""
FAMILIES = tuple(dict.fromkeys(attack.family for attack in redteam.list_attacks()))
FILES = {
    "app.py": b"def add(a, b):\n    return a - b\n",
    "notes.txt": b"one\r\ntwo\r\n",
    "bin/run": b"#!/bin/sh\necho run\n",
    "logo.bin": bytes(range(256)),
    ".gitattributes": b"* text=auto\n",
}


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes backends by name and options, which are closed after the test."""
    with ExitStack() as made:

        def make(name: str, **options: Any) -> SandboxBackend:
            backend = make_backend(name, **options)
            made.callback(backend.close)
            return backend

        yield make


async def pass_exam(backend: SandboxBackend) -> None:
    """Assert that every question of the exam is asked and passed."""
    checks = await exam.examine_sandbox(backend)
    assert [check for check in checks if not check.ok] == []
    assert len(checks) == len(exam.QUESTIONS)


async def find_successful_attacks(backend: SandboxBackend, family: str) -> list[str]:
    """List the attacks of a family that succeed."""
    return [each.name for each in await redteam.run_attacks(backend, [family], controls=False) if each.succeeded]


@pytest.fixture
def marker() -> str:
    """A name for processes that no other test uses."""
    return f"crrl-{secrets.token_hex(8)}"


@pytest.fixture(autouse=True)
def room_for_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep tests of sandlock apart from tests that may start a fork bomb, in all workers.

    Sandboxes of sandlock share one user id, and with it one limit on processes. Processes in bwrap sandboxes have a
    limit of their own, but also count towards this one. While a fork bomb runs, the others cannot fork.
    """
    test = request.node.nodeid
    bombs = any(word in test for word in ("exam", "redteam", "process_limits", "fork_bomb"))
    if not bombs and "sandlock" not in test:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"crrl-sandbox-tests-{os.getuid()}"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if bombs else fcntl.LOCK_SH)
        yield


def guest_pid(guest: GuestProcess) -> int:
    """Id of the process that started the guest; of the guest itself if it was forked."""
    if guest.process is not None:
        return guest.process.pid
    return int(Path(f"/proc/self/fdinfo/{guest.pidfd}").read_text().partition("\nPid:")[2].split()[0])


def list_marked(marker: str) -> list[int]:
    """List the processes of this machine, in sandboxes too, that are named `marker`."""
    listing = subprocess.run(["ps", "axwwo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in listing if line.split()[1] == marker]


async def wait_until_marked(marker: str, count: int = 1) -> list[int]:
    """Wait until `count` processes are named `marker`; return their ids."""
    while len(found := list_marked(marker)) != count:
        await asyncio.sleep(0.01)
    return found


def find_shared_python(command_as: Sequence[str]) -> list[str]:
    """Find a Python 3.11 or later that the user of `command_as` can run."""
    for python in (Path(sys.executable).resolve(), Path("/usr/bin/python3")):
        argv = ["/usr/bin/env", str(python)]
        check = "import sys, enum, json, encodings; assert sys.version_info >= (3, 11)"
        if subprocess.run([*command_as, *argv, "-c", check], capture_output=True, cwd="/").returncode == 0:
            return argv
    assert os.environ.get("CI") != "true", "no Python 3.11 that an ordinary user can run"
    pytest.skip("no Python 3.11 that an ordinary user can run")


SOMEBODY = 12345


def run_as_somebody(home: Path, program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Give `home`, with the packages that a Python program needs, to an ordinary user, who then runs the program."""
    subprocess.run(["chown", "-R", f"{SOMEBODY}:{SOMEBODY}", home], check=True)
    ids = ["setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups"]
    command = [*ids, *find_shared_python(ids), "-c", program]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(home), "HOME": str(home)} | env
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")


@pytest.fixture(scope="session")
def bwrap() -> Iterator[Bubblewrap]:
    yield from _require_backend(Bubblewrap())


class Overlaid(Bubblewrap):
    """Opens every workspace as an overlay, not only large ones."""

    @property
    def pack_up_to(self) -> int:
        return 0


@pytest.fixture(scope="session")
def overlay() -> Iterator[Bubblewrap]:
    for backend in _require_backend(Overlaid()):
        if "no overlay" in backend.describe_workspaces():
            pytest.skip(backend.describe_workspaces())
        yield backend


@pytest.fixture(scope="session")
def sandlock() -> Iterator[Sandlock]:
    yield from _require_backend(Sandlock())


def _require_backend(backend: T) -> Iterator[T]:
    with skip_without_prerequisites():
        backend.require()
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def local() -> Iterator[UnsafeLocal]:
    backend = UnsafeLocal()
    yield backend
    backend.close()


@pytest.fixture(params=["bwrap", "overlay", "sandlock", "local"])
def backend(request: pytest.FixtureRequest) -> GuestBackend:
    """Each backend with a guest."""
    backend: GuestBackend = request.getfixturevalue(request.param)
    return backend


@pytest.fixture
async def box(backend: GuestBackend, task: Task) -> AsyncIterator[GuestSandbox]:
    async with backend.open(task) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system for containers."""
    folder = tmp_path_factory.mktemp("image") / "root"
    root_file_system(folder)
    write_repository(folder / "testbed")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain folder with text, CRLF, an executable and a binary."""
    root = tmp_path / "repository"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "bin/run").chmod(0o755)
    (root / "link").symlink_to("app.py")
    return root


@pytest.fixture
def task(folder: Path) -> Task:
    return Task("test/1", "", "python", f"dir:{folder}", b"")
