"""Commands, files, the bridge and the death of a guest, on every backend with a guest."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from coderepairrl.errors import SandboxFault
from coderepairrl.sandbox import bwrap as bwrap_module
from coderepairrl.sandbox import session
from coderepairrl.sandbox.backend import GuestBackend, _remove_abandoned_states
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.guesthost import StartedGuest
from coderepairrl.sandbox.session import GuestSandbox
from coderepairrl.types import ExecResult, Task
from sweeping import wait_for_sweep

from .conftest import Make, guest_pid, wait_until_marked

HOLDS = """
import ctypes, os, signal
file = os.open("/tmp/pages", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 1 << 20)
mmap = ctypes.CDLL(None).mmap
mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for at in range(60_000):  # one area of memory each, as neighbours differ in what they allow
    mmap(None, 4096, 1 + 2 * (at % 2), 1, file, 4096 * (at % 256))
while os.fork():
    pass
signal.pause()
"""
"""A program whose processes each have 60,000 areas of memory, which the kernel frees one by one."""


async def test_the_umask_of_the_host_does_not_reach_sandboxes(backend: GuestBackend, task: Task) -> None:
    """Administrators set 077 for root, whose sandboxes run as another user."""
    before = os.umask(0o077)
    try:
        with closing(type(backend)()) as fresh:
            async with fresh.open(task) as box:
                printed = await box.exec(["bash", "-c", "git status --porcelain; umask; echo x > new"])
                assert printed.output == b"0022\n"
                assert b"new file mode 100644" in await box.diff()
    finally:
        os.umask(before)


async def test_an_overlay_is_seen_inside_only(overlay: Bubblewrap, task: Task) -> None:
    async with overlay.open(task) as box:
        assert (await box.exec(["stat", "-fc", "%T", "."])).output == b"overlayfs\n"
        assert box.folder.name not in Path("/proc/self/mounts").read_text()
        assert list((box.folder / "merged").iterdir()) == []
        before = sorted(box.prepared.tree.rglob("*"))
        assert (await box.exec(["bash", "-c", "echo x > new; rm -rf .git app.py; mv bin d; chmod 0 d"])).ok
    assert sorted(overlay.state.rglob("new")) == [] and sorted(box.prepared.tree.rglob("*")) == before


@pytest.mark.parametrize("copy", [False, True], ids=["kernel", "option"])
async def test_without_overlays_workspaces_are_copied(
    make: Make, bwrap: Bubblewrap, task: Task, monkeypatch: pytest.MonkeyPatch, copy: bool
) -> None:
    monkeypatch.setattr(bwrap_module, "OVERLAY_ABOVE", 0)
    if not copy:
        monkeypatch.setattr(bwrap_module, "_OVERLAY", "exit 3")
    backend = make("bwrap", copy=copy)
    async with backend.open(task) as box:
        assert (await box.exec(["stat", "-fc", "%T", "."])).output == b"tmpfs\n"
    why = f"no overlay: {'option copy' if copy else 'exit code 3'}"
    assert backend.describe_workspaces() == f"copied ({why}); images read-only but for a copied working folder"


ENDINGS: tuple[tuple[list[str], str, int, str | None], ...] = (
    (["bash", "-c", "kill -SEGV $$"], ".", 128 + signal.SIGSEGV, None),
    (["./app.py"], ".", 126, None),
    (["true"], "no/such/folder", 127, None),
    (["cat", "run"], "bin", 0, "#!/bin/sh\necho run\n"),
    (["bash", "-c", "echo before; (sleep 1000; echo never) & echo after"], ".", 0, "before\nafter\n"),  # all is killed
    (["bash", "-c", "ls -l /proc/self/fd | grep -c -e socket"], ".", 1, "0\n"),  # none of the guest's descriptors
)


async def test_results_tell_how_a_command_ended(box: GuestSandbox) -> None:
    for argv, folder, code, output in ENDINGS:
        done = await box.exec(argv, cwd=folder)
        assert done.exit_code == code and (output is None or done.output == output.encode()), (argv, done)
    assert done.seconds > 0
    with pytest.raises(ValueError):
        await box.exec([])


async def test_input_and_output_larger_than_pipes(box: GuestSandbox) -> None:
    data = os.urandom(3_000_000)
    assert (await box.exec(["cat"], stdin=data, max_bytes=4_000_000)).output == data
    ignored = await box.exec(["true"], stdin=data)
    assert ignored.ok and ignored.output == b""
    cut = await box.exec(["cat"], stdin=data, max_bytes=1000)
    assert cut.output == data[:1000] and cut.truncated and cut.ok
    whole = await box.exec(["printf", "12345"], max_bytes=5)
    assert whole.output == b"12345" and not whole.truncated


async def test_bytes_in_names_arguments_and_environment(box: GuestSandbox, backend: GuestBackend) -> None:
    name = os.fsdecode(b"\xff odd\nname") if backend.name != "sandlock" else "\xff odd\nname"  # it opens UTF-8 alone
    await box.write(name, b"1")
    assert await box.read(name) == b"1"
    shown = await box.exec(["bash", "-c", 'cat "$1"; printf %s "$V"', "-", name], env={"V": os.fsdecode(b"\xfe")})
    assert shown.output == b"1\xfe"


async def test_writing_keeps_the_mode_and_makes_folders(box: GuestSandbox) -> None:
    await box.write("bin/run", b"#!/bin/sh\necho new\n")
    assert (await box.exec(["bin/run"])).output == b"new\n"
    await box.exec(["chmod", "444", "app.py"])
    await box.write("app.py", b"locked\n")
    assert (await box.exec(["stat", "-c", "%a", "app.py"])).output == b"444\n"
    await box.write(f"{box.workdir}/deep/er/file", b"x")
    assert await box.read("deep/er/file") == b"x"


async def test_folders_and_pipes_are_not_read_as_files(box: GuestSandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await box.read("missing")
    with pytest.raises(IsADirectoryError):
        await box.write("bin", b"")
    await box.exec(["mkfifo", "pipe"])
    for path in ("pipe", "bin"):
        with pytest.raises(OSError):
            await asyncio.wait_for(box.read(path), 5)


def hanging(box: GuestSandbox, marker: str) -> asyncio.Task[ExecResult]:
    """A command that runs for longer than any test may."""
    return asyncio.create_task(box.exec(["bash", "-c", f"echo $$ > pid; exec -a {marker} sleep 1000"]))


async def test_cancelling_a_command_ends_it_and_the_sandbox_goes_on(box: GuestSandbox, marker: str) -> None:
    waiting = hanging(box, marker)
    await wait_until_marked(marker)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    after = await box.exec(["bash", "-c", "kill -0 $(cat pid) 2>&1 || echo gone"])
    assert after.output.endswith(b"gone\n")


async def test_cancelling_one_that_waits_leaves_the_running_one_alone(box: GuestSandbox, marker: str) -> None:
    first = asyncio.create_task(box.exec(["bash", "-c", f"(exec -a {marker} sleep 1000); echo done"]))
    [pid] = await wait_until_marked(marker)
    second = asyncio.create_task(box.exec(["echo", "second"]))
    await asyncio.sleep(0)  # it waits for its turn
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    os.kill(pid, signal.SIGKILL)
    assert (await first).output.endswith(b"done\n")


async def test_requests_at_the_same_time_take_turns(box: GuestSandbox) -> None:
    results = await asyncio.gather(*(box.exec(["echo", str(n)]) for n in range(20)))
    assert [int(result.output) for result in results] == list(range(20))


@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_a_dead_or_closed_guest_is_a_fault(how: str, backend: GuestBackend, task: Task, marker: str) -> None:
    async with backend.open(task) as box:
        running = hanging(box, marker)
        await wait_until_marked(marker)
        if how == "killed":
            os.kill(guest_pid(box.guest), signal.SIGKILL)
            with pytest.raises(SandboxFault):
                await running
            for action in (box.exec(["true"]), box.read("app.py"), box.write("x", b""), box.diff()):
                with pytest.raises(SandboxFault):
                    await action
    for action in (running, box.exec(["true"])):
        with pytest.raises(SandboxFault):
            await action
    assert not box.folder.exists()


async def test_a_guest_that_stops_answering_is_a_fault(
    bwrap: Bubblewrap, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bwrap.open(task) as box:
        with monkeypatch.context() as patch:
            patch.setattr(session, "GRACE_SECONDS", 0.3)
            os.kill(guest_pid(box.guest), signal.SIGSTOP)
            with pytest.raises(SandboxFault, match="did not answer"):
                await box.exec(["true"], timeout=0.1)


@pytest.mark.parametrize("ending", [0.1, session.ENDING_SECONDS])
async def test_slow_cleanup_in_the_kernel_is_no_fault(
    ending: float, bwrap: Bubblewrap, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory takes longer to free than a guest may be silent. The control is a guest without the extra time."""
    monkeypatch.setattr(session, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(session, "ENDING_SECONDS", ending)
    async with bwrap.open(task) as box:
        if ending < 1:
            with pytest.raises(SandboxFault, match="did not answer"):
                await box.exec(["python3", "-c", HOLDS], timeout=3)
            return
        held = await box.exec(["python3", "-c", HOLDS], timeout=3)
        assert held.timed_out and held.seconds > 3.1
        assert (await box.exec(["echo", "alive"])).output == b"alive\n"


async def test_the_guest_dies_with_its_host(folder: Path, bwrap: Bubblewrap, make: Make, marker: str) -> None:
    """Kill -9 of the controller leaves no sandbox, and the next backend removes its folder."""
    program = f"""
import asyncio
from coderepairrl.sandbox import make_backend
from coderepairrl.types import Task
async def main():
    backend = make_backend("bwrap")
    async with backend.open(Task("t", "", "python", "dir:{folder}", b"")) as box:
        print(backend.state, flush=True)
        await box.exec(["bash", "-c", "exec -a {marker} sleep 1000"])
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        state = Path(child.stdout.readline().strip())
        assert state.is_dir()
        await wait_until_marked(marker)
        child.kill()
    await wait_until_marked(marker, 0)
    assert make("bwrap").state.is_dir()
    wait_for_sweep()
    assert not state.exists()


async def test_a_full_disk_of_the_host_is_a_fault(
    bwrap: Bubblewrap, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faked answer stands for a disk without space, and a high threshold for a full disk."""
    async with bwrap.open(task) as box:

        async def full(*_: object) -> tuple[dict[str, object], bytes]:
            return {"errno": 28, "error": "No space left on device"}, b""

        monkeypatch.setattr(box, "_exchange_frames", full)
        with pytest.raises(OSError, match="No space left"):  # control: room on the host, so it is the sandbox's own
            await box.write("x", b"x")
        monkeypatch.setattr(session, "_LEAST_ROOM", 1 << 60)
        with pytest.raises(SandboxFault, match="No space left"):
            await box.write("x", b"x")


async def test_process_limits_are_per_sandbox(task: Task, bwrap: Bubblewrap, make: Make, marker: str) -> None:
    """One sandbox at its process limit takes nothing from another of the same user."""
    backend = make("bwrap", processes=30)
    fill = f"""
import os, signal
try:
    while os.fork(): pass
    signal.pause()
except BlockingIOError as error: print(error, flush=True)
os.execv("/bin/sleep", [{marker!r}, "1000"])"""
    async with backend.open(task) as first, backend.open(task) as second:
        filling = asyncio.create_task(first.exec(["python3", "-c", fill]))
        [pid] = await wait_until_marked(marker)
        assert (await second.exec(["bash", "-c", "echo $(echo fine)"])).output == b"fine\n"
        os.kill(pid, signal.SIGKILL)
        assert b"Resource temporarily unavailable" in (await filling).output  # control: it was at its limit


async def test_the_bridge_serves_many_and_ends_with_the_sandbox(box: GuestSandbox, tmp_path: Path) -> None:
    served = 0

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        writer.write(await reader.read())
        await writer.drain()
        writer.close()

    address = tmp_path / "s"
    server = await asyncio.start_unix_server(echo, address)
    port = int((await box.reach(str(address))).rpartition(":")[2])
    code = f"""
import socket, concurrent.futures
def one(n):
    with socket.create_connection(("127.0.0.1", {port})) as s:
        data = bytes([n]) * 200_000
        s.sendall(data); s.shutdown(socket.SHUT_WR)
        got = b"".join(iter(lambda: s.recv(65536), b""))
        return got == data
with concurrent.futures.ThreadPoolExecutor(10) as pool: print(all(pool.map(one, range(40))))
"""
    result = await box.exec(["python3", "-c", code])
    assert result.output == b"True\n" and served == 40
    server.close()


async def test_connections_that_a_daemon_holds_are_gone_with_it(bwrap: Bubblewrap, task: Task, tmp_path: Path) -> None:
    """More than the bridge serves at a time, silent ones and one that never reads."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(echo, tmp_path / "echo")
    async with server, bwrap.open(task) as box:
        host, _, port = (await box.reach(str(tmp_path / "echo"))).removeprefix("http://").partition(":")
        hold = f"""
import os, socket, time
held = [socket.socket() for _ in range({2 * box.limits.connections})]
for each in held:
    each.setblocking(False); each.connect_ex(({host!r}, {port}))
time.sleep(0.3)
try:
    while True: held[0].send(bytes(1 << 16))
except OSError as error: print(type(error).__name__, flush=True)
if os.fork() == 0: os.setsid(); time.sleep(100)
"""
        assert (await box.exec(["python3", "-c", hold])).output == b"BlockingIOError\n"
        ask = f"import socket\ns = socket.create_connection(({host!r}, {port}))\ns.send(b'x'); print(s.recv(1))"
        assert (await box.exec(["python3", "-c", ask], timeout=20)).output == b"b'x'\n"


async def test_reaching_a_missing_socket_is_a_fault(box: GuestSandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxFault):
        await box.reach(str(tmp_path / "missing"))


async def test_a_bubblewrap_killed_while_it_starts_leaves_nobody(tmp_path: Path) -> None:
    """Its child would wait forever for its user ids."""
    argv = ["bwrap", "--die-with-parent", "--unshare-all", "--ro-bind", "/", "/", "sleep", "60"]
    groups = []
    for number in range(60):
        guest = StartedGuest(lambda _: (argv, ()), log=tmp_path / "log")
        await asyncio.sleep(0.0002 * number)
        os.kill(guest_pid(guest), signal.SIGKILL)  # as somebody who is out of memory does
        await guest.close()
        groups.append(guest_pid(guest))
    listing = subprocess.run(["ps", "axo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout.split()
    living = {int(group) for group, state in zip(listing[::2], listing[1::2], strict=True) if state[0] not in "ZX"}
    assert not living & set(groups)


def test_what_a_killed_owner_had_half_started_ends_with_the_next_sweep(tmp_path: Path) -> None:
    """No process is left to kill its group."""
    stale = tmp_path / "crrl-sandbox-stale"
    stale.mkdir()
    (stale / ".lock").touch()
    process = subprocess.Popen(["bwrap", "-f", stale / ".lock"], executable="/usr/bin/tail")  # looks like one
    try:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():  # empty until exec has set up its arguments
            time.sleep(0.01)
        _remove_abandoned_states(tmp_path)
        assert process.wait(5) == -signal.SIGKILL and not stale.exists()
    finally:
        process.kill()
        process.wait()
