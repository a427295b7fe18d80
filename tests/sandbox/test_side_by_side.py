"""Two sandboxes side by side: neither uses up what the kernel counts by user."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.session import GuestSandbox, ResourceLimits
from coderepairrl.types import Task

from .conftest import Make, wait_until_marked

TAKE = """
import ctypes, itertools, os, signal, socket, sys, time
libc, kind, most = ctypes.CDLL(None), sys.argv[1], int(sys.argv[2])
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
event, timer = (ctypes.c_int * 32)(0, 0, 40), ctypes.c_void_p()
pairs = []
def descriptors_on_their_way():
    pairs.append(socket.socketpair())
    try:
        socket.send_fds(pairs[-1][0], [b"x"], [0] * 200)
    except OSError:
        return -1
    return 0
take = {
    "watchers": lambda: libc.inotify_init1(0),
    "signals": lambda: libc.sigqueue(os.getpid(), 40, 0),
    "timers": lambda: libc.timer_create(1, event, ctypes.byref(timer)),
    "queues": lambda: libc.mq_open(b"/mine", 0o102, 0o600, None),
    "descriptors": descriptors_on_their_way,
}[kind]
print(sum(1 for _ in itertools.takewhile(lambda _: take() >= 0, range(most))), flush=True)
if most > 3:
    if os.fork() == 0:
        os.execvp("sleep", [sys.argv[3], "60"])
    time.sleep(60)
"""


@asynccontextmanager
async def taking(backend: Bubblewrap, task: Task, kind: str, marker: str) -> AsyncIterator[None]:
    """Open another sandbox that takes as many as it gets, and holds them."""
    async with backend.open(task) as box:
        attack = asyncio.create_task(box.exec(["python3", "-ISc", TAKE, kind, "200000", marker], timeout=60))
        await wait_until_marked(marker)
        yield
        attack.cancel()
        await asyncio.wait({attack})


async def take_three(box: GuestSandbox, kind: str) -> int:
    """Try to take three; return how many it gets."""
    return int((await box.exec(["python3", "-ISc", TAKE, kind, "3"])).output)


@pytest.mark.parametrize("kind", ["watchers", "signals", "timers"])
async def test_resources_counted_by_user_are_limited_in_each_sandbox(
    kind: str, bwrap: Bubblewrap, task: Task, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Message queues are refused. The control is of signals: without their limit one sandbox takes all."""
    async with bwrap.open(task) as box, taking(bwrap, task, kind, marker):
        assert (await take_three(box, kind), await take_three(box, "queues")) == (3, 0)
    if kind == "signals":
        limits = ResourceLimits.rlimits
        monkeypatch.setattr(ResourceLimits, "rlimits", lambda *a, **k: limits(*a, **k) | {"SIGPENDING": 1 << 30})
        async with bwrap.open(task) as box, taking(bwrap, task, kind, marker):
            assert await take_three(box, kind) == 0


async def test_the_gateway_is_reached_while_another_has_many_descriptors_on_their_way(
    bwrap: Bubblewrap, task: Task, marker: str, tmp_path: Path
) -> None:
    """The kernel refuses a sender once its user's descriptors in transit exceed the sender's limit of open files.

    The guest's limit is higher until its first command; that of commands is not (the control).
    """
    address = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.bind(str(address))
        gateway.listen()
        async with taking(bwrap, task, "descriptors", marker), bwrap.open(task) as box:
            assert (await box.reach(str(address))).startswith("http://127.0.0.1:")
            assert await take_three(box, "descriptors") == 0


async def test_descriptors_that_another_leaves_on_their_way_keep_nobody_from_opening(
    task: Task, make: Make, marker: str
) -> None:
    """They count against the sender's limit of open files, for all senders of a user; here it is a low one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    backend = make("bwrap", open_files=1000)
    try:
        open_here = len(list(Path("/proc/self/fd").iterdir()))  # many tests may leave some hundreds
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(open_here + 150, 900), hard))
        backend.require()
        async with taking(backend, task, "descriptors", marker), asyncio.timeout(20.0), backend.open(task) as box:
            assert (await box.exec(["true"])).ok
            assert await take_three(box, "descriptors") == 0, "control"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
