"""Landlock's sandbox: attacks that matter only without namespaces, and refusal where a promise does not hold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from coderepairrl.errors import PrerequisiteError, SandboxFault
from coderepairrl.sandbox.privileges import command_as
from coderepairrl.sandbox.sandlock import MACHINES, PACKAGE, PORTS, Sandlock
from coderepairrl.sandbox.session import GuestSandbox
from coderepairrl.types import Task

from .conftest import Make, wait_until_marked

TRY = """
import os, socket, ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
def tries(action, *values):
    try: return str(action(*values) or "done")
    except OSError as error: return "refused"
def call(*values):
    if libc.syscall(*values) < 0: raise OSError(ctypes.get_errno())
"""


async def run_in_box(box: GuestSandbox, code: str) -> list[str]:
    """Lines that a program prints inside."""
    return (await box.exec(["python3", "-c", TRY + code])).output.decode().splitlines()


async def run_in_new_box(backend: Sandlock, task: Task, code: str) -> list[str]:
    """Lines that a program prints in a sandbox of its own."""
    async with backend.open(task) as box:
        return await run_in_box(box, code)


def run_outside(backend: Sandlock, public: Path, code: str) -> list[str]:
    """Lines that the same program prints outside, where only its user id stops it: the positive control."""
    command = command_as(backend.user, ["/usr/bin/env", "python3", "-c", TRY + code])
    return subprocess.run(command, capture_output=True, text=True, cwd=public).stdout.splitlines()


@pytest.fixture
def public(sandlock: Sandlock) -> Iterator[Path]:
    """A folder of the host that the sandbox's user owns (and no other test session changes the way to it)."""
    with tempfile.TemporaryDirectory(prefix="crrl-public-") as name:
        if sandlock.user is not None:
            os.chown(name, sandlock.user, sandlock.user)
        Path(name).chmod(0o755)
        yield Path(name)


# -- isolation: attacks beyond the red team's, which matter only without namespaces


async def test_a_race_on_a_path_of_proc_reads_no_other_process(sandlock: Sandlock, task: Task, public: Path) -> None:
    """The kernel refuses memory and environment of others, also if the supervisor is deceived."""
    sleep = command_as(sandlock.user, ["/usr/bin/env", "CRRL_TEST_KEY=sk-test", "sleep", "60"])
    holder = subprocess.Popen(sleep)
    code = f"""
import threading, time
spot = ctypes.create_string_buffer(64)
paths = (b"/proc/self/environ\\0", b"/proc/{holder.pid}/environ\\0")
on = True
def swap():
    while on:
        for path in paths: spot[0 : len(path)] = path
threading.Thread(target=swap, daemon=True).start()
end, opened, seen = time.time() + 2, 0, 0
while time.time() < end:
    fd = libc.open(spot, os.O_RDONLY)
    if fd >= 0:
        opened += 1
        seen += b"CRRL_TEST_KEY" in os.read(fd, 1 << 20)
        os.close(fd)
on = False
print(seen, opened > 0)
"""
    try:
        assert await run_in_new_box(sandlock, task, code) == ["0 True"]
        control = f"print('CRRL_TEST_KEY' in open('/proc/{holder.pid}/environ').read())"
        assert run_outside(sandlock, public, control) == ["True"]
    finally:
        holder.kill()
        holder.wait()


async def test_modes_times_owners_and_lengths_of_outside_files_stay(
    sandlock: Sandlock, task: Task, public: Path
) -> None:
    """Landlock governs few of these; another sandbox's files belong to the same user."""
    mine = public / "mine"
    mine.write_text("x")
    mine.chmod(0o644)
    if sandlock.user is not None:
        os.chown(mine, sandlock.user, sandlock.user)
    before = mine.stat()
    code = f"""
m = {str(mine)!r}
fd = os.open(m, os.O_PATH)
print(tries(os.chmod, m, 0o600), tries(os.utime, m, (1, 1)), tries(os.setxattr, m, "user.x", b"1"),
      tries(os.chown, m, -1, -1), tries(os.chmod, f"/proc/self/fd/{{fd}}", 0o600),
      tries(call, 452, fd, b"", 0o600, 0x1000))
os.symlink(m, "crrl-way")
print(tries(os.chmod, "crrl-way", 0o600), tries(os.utime, "crrl-way", (1, 1)))
print(tries(os.truncate, m, 0), tries(os.rename, m, m + "-moved"))
"""
    assert set(" ".join(await run_in_new_box(sandlock, task, code)).split()) == {"refused"}
    after = mine.stat()
    assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, 1)
    assert set(" ".join(run_outside(sandlock, public, code)).split()) == {"done"}


async def test_modes_and_times_of_ones_own_files(sandlock: Sandlock, task: Task) -> None:
    code = """
os.chmod("app.py", 0o755); os.utime("app.py", (1, 2)); print(oct(os.stat("app.py").st_mode), os.stat("app.py").st_mtime)
os.chmod("bin", 0o700); d = os.open("bin", os.O_RDONLY); os.chmod("run", 0o700, dir_fd=d)
print(oct(os.stat("bin/run").st_mode), tries(os.chmod, "missing", 0), oct(os.stat("bin").st_mode))
os.symlink("app.py", "l"); os.utime("l", (5, 5), follow_symlinks=False)
print(os.lstat("l").st_mtime, os.stat("l").st_mtime)
with open("app.py", "a") as f: os.fchmod(f.fileno(), 0o600); os.utime(f.fileno())
print(oct(os.stat("app.py").st_mode), os.stat("app.py").st_mtime > 9)
"""
    said = ["0o100755 2.0", "0o100700 refused 0o40700", "5.0 2.0", "0o100600 True"]
    assert await run_in_new_box(sandlock, task, code) == said


async def test_links_and_renames_between_folders(sandlock: Sandlock, task: Task) -> None:
    """Every Landlock domain denies these unless it says otherwise, and commands are in three."""
    code = """
os.mkdir("d"); os.rename("app.py", "d/app.py"); os.link("d/app.py", "again"); os.rename("d", "bin/d")
print(os.stat("again").st_nlink, os.listdir("bin/d"))
"""
    assert await run_in_new_box(sandlock, task, code) == ["2 ['app.py']"]


async def test_no_way_out_by_any_socket(sandlock: Sandlock, task: Task, public: Path) -> None:
    """Only TCP, only to the bridge: no other address on its port, no fast open, no server, no bound socket file."""
    address = public / "s"
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(address))
        unix.listen()
        address.chmod(0o777)
        code = f"""
port = {other.getsockname()[1]}
I, S, D = socket.AF_INET, socket.SOCK_STREAM, socket.SOCK_DGRAM
def unix(path):
    with socket.socket(socket.AF_UNIX) as s: s.connect(path)
def mptcp():
    with socket.socket(I, S, 262) as s: s.connect(("127.0.0.1", port))
def mapped():
    with socket.socket(socket.AF_INET6, S) as s: s.connect(("::ffff:127.0.0.1", port))
os.symlink({str(address)!r}, "crrl-socket")
print(tries(unix, {str(address)!r}), tries(unix, os.path.abspath("crrl-socket")), tries(mptcp), tries(mapped))
print(tries(lambda: socket.create_server(("127.0.0.1", 0)).close()), tries(lambda: socket.socket(I, S).listen()))
print(tries(lambda: socket.socket(I, D).sendto(b"x", ("127.0.0.1", 9))),
      tries(lambda: socket.socket(I, S).sendto(b"x", 0x20000000, ("127.0.0.1", port))))
"""
        assert set(" ".join(await run_in_new_box(sandlock, task, code)).split()) == {"refused"}
        assert run_outside(sandlock, public, code)[:2] == ["done done done done", "done done"]


async def test_a_bridge_is_one_address_and_their_number_is_limited(
    sandlock: Sandlock, task: Task, tmp_path: Path
) -> None:
    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    address = tmp_path / "gateway"
    server = await asyncio.start_unix_server(hello, address)
    async with server, sandlock.open(task) as box:
        assert box.guest.port_sockets is not None
        spare = box.guest.port_sockets[0].getsockname()[1]
        port = int((await box.reach(str(address))).rpartition(":")[2])
        with socket.create_server(("127.0.0.2", port)):
            said = await run_in_box(
                box,
                f"""
def get(host, port):
    with socket.create_connection((host, port), 5) as s: return s.recv(9).decode()
print(tries(get, "127.0.0.1", {port}), tries(get, "127.0.0.2", {port}), tries(get, "127.0.0.1", {spare}))
""",
            )
        assert said == ["hello refused refused"]
        for _ in range(PORTS - 1):
            await box.reach(str(address))
        with pytest.raises(SandboxFault):
            await box.reach(str(address))


async def test_two_sandboxes_do_not_see_each_other(sandlock: Sandlock, task: Task, marker: str) -> None:
    async with sandlock.open(task) as first, sandlock.open(task) as second:
        sleeping = asyncio.create_task(second.exec(["bash", "-c", f"exec -a {marker} sleep 1000"]))
        [pid] = await wait_until_marked(marker)
        code = f"""
other, pid = {second.workdir!r}, {pid}
print(tries(lambda: open(other + "/app.py").read()), tries(os.listdir, other), tries(os.chmod, other + "/app.py", 0))
print(tries(os.kill, pid, 9), tries(lambda: open(f"/proc/{{pid}}/cmdline").read()), str(pid) in os.listdir("/proc"))
import resource
print(tries(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1)), tries(os.sched_setaffinity, pid, {{0}}),
      tries(os.setpriority, os.PRIO_PROCESS, pid, 19))
"""
        said = ["refused refused refused", "refused refused False", "refused refused refused"]
        assert await run_in_box(first, code) == said
        os.kill(pid, signal.SIGKILL)
        assert (await sleeping).exit_code == 137
        assert (await second.exec(["cat", "app.py"])).ok


# -- lifetime


@pytest.mark.parametrize("victim", ["guest", "supervisor", "neither"])
async def test_nothing_outlives_guest_or_supervisor(sandlock: Sandlock, task: Task, marker: str, victim: str) -> None:
    """If one is killed, the other ends every process of the sandbox; closing ends all."""
    async with sandlock.open(task) as box:
        command = f"(setsid bash -c 'exec -a {marker} sleep 1000' &); exec -a {marker} sleep 1000"
        running = asyncio.create_task(box.exec(["bash", "-c", command]))
        await wait_until_marked(marker, 2)
        if victim != "neither":
            supervisor = box.guest.process.pid
            guest = int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])
            os.kill(guest if victim == "guest" else supervisor, signal.SIGKILL)
            with pytest.raises(SandboxFault):
                await running
    await wait_until_marked(marker, 0)
    if victim == "neither":
        with pytest.raises(SandboxFault):
            await running


async def test_names_that_are_not_utf8_are_in_the_diff(sandlock: Sandlock, task: Task) -> None:
    """sandlock opens no such file. A model must not hide changes, or void its episode, by a name."""
    odd = "import os; os.mkdir(b'd\\xfe'); open('n', 'w').write('new'); os.chmod('app.py', 0)\n"
    odd += "os.rename('n', b'd\\xfe/n\\xff'); os.rename('app.py', b'a\\xfd')"
    async with sandlock.open(task) as box:
        assert (await box.exec(["python3", "-c", odd])).output == b""
        control = await box.exec(["bash", "-c", "cat $'a\\xfd'"])
        assert not control.ok
        patch = await box.diff()
        assert b'"b/d\\376/n\\377"' in patch and b"+new" in patch and b'"b/a\\375"' in patch
        assert b"rename from app.py" in patch or b"deleted file" in patch
        assert await box.diff() == patch
        assert (await box.exec(["ls"])).ok


def test_it_comes_with_the_project_on_machines_that_it_has_wheels_for() -> None:
    """And an installation never fails on others."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [marked] = [Requirement(line) for line in project["dependencies"] if line.startswith("sandlock")]
    assert f"{marked.name}{marked.specifier}" == PACKAGE and marked.marker is not None
    linux = {"sys_platform": "linux"}
    for machine in (*MACHINES, "riscv64", "ppc64le"):
        assert marked.marker.evaluate(linux | {"platform_machine": machine}) == (machine in MACHINES)
    assert not marked.marker.evaluate({"sys_platform": "darwin", "platform_machine": "x86_64"})


@pytest.mark.parametrize(("abi", "words"), [(-1, "no Landlock"), (5, "Landlock ABI 5")])
def test_an_old_kernel_is_refused(monkeypatch: pytest.MonkeyPatch, abi: int, words: str) -> None:
    package = pytest.importorskip("sandlock")
    monkeypatch.setattr(package, "landlock_abi_version", lambda: abi)
    with pytest.raises(PrerequisiteError, match=words):
        Sandlock().require()


@pytest.mark.parametrize(
    ("hole", "words"),
    [
        ("readable", "reads a file of the host"),
        ("ports", "reaches the host's loopback"),
        ("writable", "writes outside the workspace"),
    ],
)
def test_a_promise_that_does_not_hold_is_refused(
    sandlock: Sandlock, make: Make, monkeypatch: pytest.MonkeyPatch, hole: str, words: str
) -> None:
    """A supervisor with a hole stands for a kernel that does not enforce what it was asked for."""
    supervised = Sandlock._supervisor_command

    def leaky(self: Sandlock, box: Path, argv: list[str], ports: list[int], control: int) -> list[str]:
        *command, text = supervised(self, box, argv, ports, control)
        settings = json.loads(text)
        settings[hole].insert(0, int(argv[-1]) if hole == "ports" else str(box))
        return [*command, json.dumps(settings)]

    monkeypatch.setattr(Sandlock, "_supervisor_command", leaky)
    with pytest.raises(PrerequisiteError, match=words):
        make("sandlock").require()
