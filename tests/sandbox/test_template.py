"""Guests forked from a template: like started ones, isolated from each other, and ended with the template."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coderepairrl.errors import PrerequisiteError, SandboxFault
from coderepairrl.sandbox.bwrap import WORKDIR, Bubblewrap
from coderepairrl.sandbox.guest import main as guest
from coderepairrl.sandbox.template import Template
from coderepairrl.types import Task
from needs import need

from .conftest import Make, guest_pid

LOOK = """
id; hostname; pwd; umask; ulimit -a; env | sort; ls -ld / /tmp /dev /dev/shm "$PWD" | tr -s ' ' | cut -d' ' -f1-4
ls -A / /dev /tmp /dev/shm /dev/pts /proc/self/ns; python3 -c 'import os; print(os.ttyname(os.openpty()[1]))'
grep -e ^Cap -e ^Seccomp: -e ^NoNewPrivs -e ^Groups -e ^NSpid /proc/self/status /proc/1/status; cat /proc/self/cgroup
cat /proc/net/dev /proc/sys/kernel/hostname | tr -s ' ' | cut -d' ' -f1-3
for place in /proc/sys/kernel/core_pattern /proc/sys/net/ipv4/ip_forward /proc/sysrq-trigger /etc/x /dev/x /usr/x /x; do
  { : >> $place; } 2>&1 | sed 's/.*line [0-9]*//'
done
"""


@pytest.fixture
def forking(bwrap: Bubblewrap, make: Make) -> Bubblewrap:
    backend = make("bwrap")
    backend.require()
    need(not backend._no_fork, backend._no_fork)
    return backend


async def until_empty(left: Callable[[], Any]) -> None:
    """Wait until nothing is left, for 20 seconds: a busy machine takes its time to end processes."""
    for _ in range(400):
        if not any(found := left()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still there: {found}")


def list_processes_of(folder: Path) -> list[str]:
    """List the processes whose command line names `folder`."""
    listing = subprocess.run(["ps", "axwwo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if str(folder) in line]


async def test_a_forked_sandbox_looks_like_a_started_one(forking: Bubblewrap, task: Task, make: Make) -> None:
    looks, mounts = [], []
    for backend in (forking, make("bwrap", fork=False)):
        async with backend.open(task) as box:
            assert (box.guest.process is None) == (backend is forking)
            looks.append((await box.exec(["bash", "-c", LOOK])).output.decode())
            lines = [line.split() for line in (await box.exec(["cat", "/proc/mounts"])).output.decode().splitlines()]
            ours = {at: (kind, options.split(",")) for _, at, kind, options, *_ in lines}  # the one on top
            mounts.append({at: (kind, *sorted(options)) for at, (kind, options) in ours.items()})
    assert looks[0] == looks[1]
    assert mounts[1].pop("/run/workspace")  # which a forked guest is handed open, and closes before any command
    kind, *options = mounts[0]["/proc/sys"]
    mounts[0]["/proc/sys"] = (kind, *(option for option in options if option != "noexec"))
    assert mounts[0] == mounts[1]


async def test_two_at_once_share_nothing(forking: Bubblewrap, task: Task) -> None:
    """Neither files, nor processes, nor networks, nor descriptors."""
    leave = f"""
import pathlib, socket, time
server, other = socket.create_server(("127.0.0.1", 7777)), socket.socket(socket.AF_UNIX)
other.bind(chr(0) + "crrl")
other.listen()
for folder in ("{WORKDIR}", "/tmp", "/dev/shm"):
    pathlib.Path(folder, "left").touch()
time.sleep(60)
"""
    look = (
        "import socket\n"
        "for family, place in ((socket.AF_INET, ('127.0.0.1', 7777)), (socket.AF_UNIX, chr(0) + 'crrl')):\n"
        "    print(socket.socket(family).connect_ex(place))"
    )
    async with forking.open(task) as one, forking.open(task) as two:
        first = asyncio.create_task(one.exec(["python3", "-c", leave]))
        while "/dev/shm/left" not in "".join(map(str, Path(f"/proc/{guest_pid(one.guest)}/root/dev/shm").iterdir())):
            assert not first.done(), first.result()
            await asyncio.sleep(0.01)
        seen = await two.exec(["bash", "-c", f"ls -A {WORKDIR} /tmp /dev/shm; ls -d /proc/[0-9]*"])
        assert b"left" not in seen.output and b"/proc/1\n" in seen.output and seen.output.count(b"/proc/") <= 3
        assert (await two.exec(["python3", "-c", look])).output == b"111\n111\n"  # ECONNREFUSED
        held = [
            {str(entry.readlink()) for entry in Path(f"/proc/{guest_pid(box.guest)}/fd").iterdir()}
            for box in (one, two)
        ]
        assert {name for name in held[0] & held[1] if "socket" in name or "pipe" in name or "box-" in name} == set()
        first.cancel()


async def test_a_dead_template_is_replaced(forking: Bubblewrap, task: Task) -> None:
    """Its guests die with it, which is a fault; the next sandbox gets a new template."""
    async with forking.open(task) as box:
        [template] = forking._templates.values()
        template._process.kill()
        with pytest.raises(SandboxFault):
            await box.exec(["sleep", "60"])
    async with forking.open(task) as box:
        assert box.guest.process is None and (await box.exec(["true"])).ok
    [after] = forking._templates.values()
    assert after is not template


async def test_cancelled_while_it_is_forked_leaves_nobody(forking: Bubblewrap, task: Task) -> None:
    async with forking.open(task) as box:
        parent = int(Path(f"/proc/{guest_pid(box.guest)}/stat").read_text().rpartition(")")[2].split()[1])

    async def one() -> None:
        async with forking.open(task):
            pass

    for number in range(20):
        opening = asyncio.create_task(one())
        await asyncio.sleep(0.001 * number)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    children = Path(f"/proc/{parent}/task/{parent}/children")
    await until_empty(lambda: (children.read_text(), list(forking.state.glob("box-*"))))


async def test_closing_the_backend_ends_its_template(forking: Bubblewrap, task: Task) -> None:
    state = forking.state
    async with forking.open(task) as box:
        assert list_processes_of(state)
        pid = guest_pid(box.guest)
    assert not Path(f"/proc/{pid}").exists()
    forking.close()
    await until_empty(lambda: list_processes_of(state))  # bubblewrap has ended; the kernel ends what is in it


async def test_guests_are_started_where_they_cannot_be_forked(
    task: Task, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Template, "try_fork", lambda *_: "unshare: Operation not permitted")
    async with make("bwrap").open(task) as box:
        assert box.guest.process is not None and (await box.exec(["true"])).ok


async def test_a_guest_that_stays_in_our_control_groups_view_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """On kernels with such namespaces."""
    server = object.__new__(guest.ForkServer)
    server.libc = SimpleNamespace(unshare=lambda flags: -1 if flags == guest.NEW_CGROUP else 0)  # type: ignore[assignment]
    forked = object.__new__(guest.Forked)
    forked.server = server
    with pytest.raises(OSError, match="unshare cgroup"):
        forked.drop_rights()


def test_a_probe_that_fails_is_made_again(forking: Bubblewrap, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, tried = make("bwrap"), []

    def fails(*_: object) -> None:
        tried.append(1)
        raise PrerequisiteError("no room", fix="make some")

    monkeypatch.setattr(backend, "_probe_template", fails)
    for _ in range(2):
        with pytest.raises(PrerequisiteError, match="no room"):
            backend.require()
    assert len(tried) == 2
