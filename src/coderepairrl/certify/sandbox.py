"""The exam that every sandbox sits: ``crrl check sandbox NAME|module:Class``.

Each question about isolation has a control: the same probe must succeed on the host, or it would prove nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from coderepairrl import grading
from coderepairrl.errors import CodeRepairError
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.types import Task


class Failed(Exception):
    """What is wrong."""


class Scene(NamedTuple):
    """What questions work with."""

    backend: SandboxBackend
    task: Task
    folder: Path
    """A folder of the host with a secret in it, and a Unix socket."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        """A fresh sandbox."""
        async with self.backend.open(self.task) as sandbox:
            yield sandbox


Question = Callable[[Scene], Awaitable[str]]


async def examine(backend: SandboxBackend) -> list[Finding]:
    """All that `sit` yields."""
    return [finding async for finding in sit(backend)]


async def sit(backend: SandboxBackend) -> AsyncIterator[Finding]:
    """Ask `backend` everything; one `Finding` per question, in order. A failed one says what happened instead."""
    with scratch("exam") as folder:
        folder.chmod(0o755)
        repository = folder / "repository"
        repository.mkdir()
        (repository / "app.py").write_bytes(b"def add(a, b):\n    return a - b\n")
        (repository / "notes.txt").write_bytes(b"one\r\ntwo\r\n")
        (folder / "secret").write_text("a host secret\n")
        scene = Scene(backend, Task("exam/1", "", "python", f"dir:{repository}", b""), folder)
        os.environ["CRRL_EXAM_KEY"] = "sk-exam"
        try:
            for question in QUESTIONS:
                yield await _ask(question, scene)
        finally:
            del os.environ["CRRL_EXAM_KEY"]


async def _ask(question: Question, scene: Scene) -> Finding:
    title = (question.__doc__ or question.__name__).strip().splitlines()[0].rstrip(".")
    if question in DANGEROUS and not scene.backend.info().isolates:
        return Finding(title, False, "not tried: nothing would keep it from the rest of this machine")
    try:
        async with asyncio.timeout(120):
            return Finding(title, True, await question(scene))
    except (Failed, CodeRepairError, OSError) as error:
        return Finding(title, False, str(error) or type(error).__name__)


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


async def _python(box: Sandbox, code: str, **options: float) -> str:
    """What a Python program prints inside, its errors too."""
    result = await box.exec(["python3", "-c", code], timeout=options.get("timeout", 30.0))
    return result.output.decode(errors="replace").strip()


# -- behaviour


async def commands(scene: Scene) -> str:
    """Commands run in the workspace, with input, environment and exit code."""
    async with scene.open() as box:
        script = 'pwd; echo "$A"; cat; echo err >&2; exit 3'
        result = await box.exec(["bash", "-c", script], env={"A": "b c"}, stdin=b"in\n")
        _expect(result.output == f"{box.workdir}\nb c\nin\nerr\n".encode(), f"printed {result.output!r}")
        _expect(result.exit_code == 3, f"exit code {result.exit_code}")
        missing = await box.exec(["no-such-program"])
        _expect(missing.exit_code == 127, f"a missing program gives {missing.exit_code}")
    return "output in order, exit codes as a shell's"


async def files(scene: Scene) -> str:
    """Files are read and written byte for byte, and only in the workspace."""
    async with scene.open() as box:
        _expect(await box.read("notes.txt") == b"one\r\ntwo\r\n", "CRLF did not survive")
        data = bytes(range(256)) * 300
        await box.write("new/folder/data.bin", data)
        _expect(await box.read("new/folder/data.bin") == data, "bytes did not survive")
        await box.exec(["ln", "-s", "/", "out"])
        for path in ("../evil", "/etc/passwd", f"{box.workdir}-evil/x", "out/etc/passwd"):
            for action in (box.read(path), box.write(path, b"x")):
                try:
                    await action
                except PermissionError:
                    continue
                except FileNotFoundError:
                    pass
                raise Failed(f"{path} was not refused")
        await box.exec(["sh", "-c", "mkdir real && ln -s real linked && ln -s app.py other"])
        await box.write("linked/file", b"1")
        _expect(await box.read("real/file") == b"1", "a link inside the workspace is not followed")
        for path in ("linked/file", "other", "out/file"):
            await box.write(path, b"2", follow=False)
            _expect(await box.read(path) == b"2", f"{path} did not become a file of its own")
        _expect(await box.read("real/file") == b"1", "a file is written through a linked folder")
        _expect(b"return" in await box.read("app.py"), "a file is written through a link")
    return "paths that leave the workspace are refused"


async def diffs(scene: Scene) -> str:
    """The diff has every change, however git was treated, and applies back exactly."""
    change = (
        "sed -i s/-/+/ app.py; git add app.py; git commit -qm x; printf 'a\\r\\n' > 'b c'; git add 'b c';"
        "mkdir d; echo new > d/e; printf '*\\n' > .gitignore; rm notes.txt; chmod +x d/e; rm -rf .git; git init -q d"
    )
    async with scene.open() as box:
        _expect(await box.diff() == b"", "a diff of nothing is not empty")
        await box.exec(["bash", "-c", change])
        patch = await box.diff()
    for part in (b"return a + b", b"b/b c", b"b/d/e", b"mode 100755", b"a/notes.txt", b"b/.gitignore"):
        _expect(part in patch, f"{part.decode()} is missing from the diff")
    async with scene.open() as box:
        _expect(not (refused := await grading.apply(box, patch)), refused)
        _expect(await box.diff() == patch, "applied, it gives another diff")
    return "edits, new, staged, committed, ignored and deleted files"


async def large(scene: Scene) -> str:
    """A workspace of 1,000 files opens as clean as a small one, and what is moved in it is in the diff."""
    many = scene.folder / "many"
    for number in range(1000):
        path = many / f"folder-{number % 10}" / f"file-{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}\n" * 300)
    scene = scene._replace(task=Task("exam/2", "", "python", f"dir:{many}", b""))
    async with scene.open() as box:
        status = await box.exec(["git", "status", "--porcelain"])
        _expect(status.ok and status.output == b"", f"it opens dirty: {status.output!r}")
        await box.exec(["bash", "-c", "mv folder-1 moved; rm -r folder-2; echo y > folder-3/file-3.py"])
        patch = await box.diff()
        counts = [patch.count(b"\n" + part) for part in (b"new file", b"deleted file", b"+y")]
        _expect(counts == [100, 200, 1], f"new, deleted and edited files: {counts}")
    return scene.backend.info().workspaces


async def bridge(scene: Scene) -> str:
    """A bridge reaches the one Unix socket, as a stream."""

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        for part in (b"one\n", b"two\n"):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.2)
        writer.close()

    server = await asyncio.start_unix_server(slowly, scene.folder / "gateway.sock")
    async with server, scene.open() as box:
        host, _, port = (await box.reach(str(scene.folder / "gateway.sock"))).removeprefix("http://").partition(":")
        code = f"""
import socket, time
s = socket.create_connection(({host!r}, {port})); s.sendall(b"hello\\n"); s = s.makefile("rb")
first = s.readline(); at = time.monotonic(); second = s.readline()
print(first, second, time.monotonic() - at > 0.1, s.read())
"""
        said = await _python(box, code)
        _expect(said == r"b'one\n' b'two\n' True b''", f"the guest saw {said}")
    return "parts arrive as they are sent"


# -- limits


async def timeouts(scene: Scene) -> str:
    """A command that hangs is ended in time, with everything it started."""
    async with scene.open() as box:
        started = time.monotonic()
        result = await box.exec(["bash", "-c", "trap '' TERM; (sleep 61 &); sleep 61"], timeout=0.5)
        took = time.monotonic() - started
        _expect(result.timed_out and took < 5, f"timed_out={result.timed_out} after {took:.1f} s")
    return f"after {took:.2f} s of 0.5"


async def floods(scene: Scene) -> str:
    """A flood of output is cut while it runs."""
    async with scene.open() as box:
        result = await box.exec(["bash", "-c", "yes | head -c 50000000"], max_bytes=10_000)
        _expect(len(result.output) == 10_000 and result.truncated, f"{len(result.output)} bytes arrived")
    return "10,000 bytes of 50,000,000"


async def processes(scene: Scene) -> str:
    """A fork bomb is contained, and the sandbox lives on."""
    async with scene.open() as box:
        result = await box.exec(["bash", "-c", ":(){ :|:& };:; sleep 60"], timeout=2)
        _expect(result.timed_out or not result.ok, "the bomb ended well")
        after = await box.exec(["echo", "alive"])
        _expect(after.output == b"alive\n", f"afterwards: {after.output!r}")
    return "killed, and the next command ran"


async def memory(scene: Scene) -> str:
    """Memory is bounded, for one process and for many."""
    hog = "import sys, time; x = bytearray(int(sys.argv[1]) << 20); print('got it', flush=True); time.sleep(10)"
    async with scene.open() as box:
        limit = scene.backend.info().limits.get("memory", 2 << 30) >> 20
        one = await box.exec(["python3", "-c", hog, str(limit * 2)], timeout=15)
        _expect(not one.ok and b"got it" not in one.output, "one process got twice the limit")
        share = f'for i in 1 2 3; do python3 -c "{hog}" {limit * 6 // 10} & done; wait'
        many = await box.exec(["bash", "-c", share], timeout=60)
        # The guest ends the command; if the kernel is first, it takes only as many processes as it must.
        kept = many.exit_code == 137 or many.output.splitlines().count(b"got it") < 3
        _expect(kept and not many.timed_out, f"three processes got 1.8 times the limit: {many.output!r}")
    return f"{limit} MiB"


async def keepers(scene: Scene) -> str:
    """Whoever keeps the limits is named."""
    return scene.backend.info().limits_kept


async def disk(scene: Scene) -> str:
    """The workspace cannot fill the disk, nor can files that were deleted and are still open."""
    limits = scene.backend.info().limits
    if "disk_bytes" not in limits:
        return "not bounded as a whole: one file is, and so is the number of open ones"
    async with scene.open() as box:
        code = f"""
import os
left = {limits["disk_bytes"] + (1 << 20)}
try:
    while left > 0:
        f = os.open("fill", os.O_WRONLY | os.O_CREAT | os.O_EXCL); os.unlink("fill"); size = {limits["file_bytes"] // 2}
        while size > 0: n = os.write(f, bytes(1 << 20)); size -= n; left -= n
    print("all of it")
except OSError as error: print(error.errno)"""
        said = await _python(box, code, timeout=60)
        _expect(said == "28", f"the attempt ended with {said}")
    return f"stopped at {limits['disk_bytes'] >> 20} MiB"


async def file_size(scene: Scene) -> str:
    """One file cannot fill the disk."""
    async with scene.open() as box:
        limit = scene.backend.info().limits.get("file_bytes", 1 << 30)
        result = await box.exec(
            ["bash", "-c", f"head -c {limit + (1 << 20)} /dev/zero > big; stat -c %s big"], timeout=60
        )
        size = int(result.output.split()[-1])
        _expect(size <= limit, f"a file of {size} bytes was written")
    return f"stopped at {limit >> 20} MiB"


# -- isolation


async def no_secrets(scene: Scene) -> str:
    """The host's files, processes and environment are out of sight."""
    secret = scene.folder / "secret"
    me = os.getpid()
    probe = f"cat {secret} /root/.bashrc /home/*/.bashrc /etc/shadow; env; cat /proc/1/environ /proc/{me}/cmdline"
    async with scene.open() as box:
        result = await box.exec(["bash", "-c", probe])
        said = result.output.decode(errors="replace")
        _expect("a host secret" not in said, "a file of the host was read")
        _expect("CRRL_EXAM_KEY" not in said, "the host's environment was read")
        ids = await _python(box, "import os; print(sum(n.isdigit() for n in os.listdir('/proc')))")
        _expect(ids.isdigit() and int(ids) <= 4, f"{ids} processes are in sight")
    control = subprocess.run(["cat", secret], capture_output=True, text=True)
    _expect(control.stdout == "a host secret\n", "the control failed: the host cannot read it either")
    return "control: the host reads the secret"


async def no_writes(scene: Scene) -> str:
    """Nothing outside the workspace and the temporary folders can be written."""
    theirs = scene.folder / "theirs"
    theirs.mkdir(exist_ok=True)
    code = f"""
import os, tempfile
tmp, probe = tempfile.gettempdir(), "crrl-probe-{os.getpid()}"
def tries(action, *values):
    try: action(*values); return True
    except OSError: return False
def write(p):
    return tries(lambda: (open(p, "w").close(), os.unlink(p)))
mine = ("/proc", "/tmp", "/dev/shm", tmp, os.getcwd())
places = [d for d, _, _ in os.walk("/") if not d.startswith(mine)]
places += ["/", "/etc", "/usr/local", "/var/tmp", "/run", "/home", "/root", {str(theirs)!r}]
print([p for p in places if not os.path.realpath(p).startswith(tmp) and write(os.path.join(p, probe))])
print([p for p in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger") if tries(lambda: open(p, "w").close())])
print(tries(os.chmod, {str(theirs)!r}, 0o700), tries(os.utime, {str(theirs)!r}))
for p in ("/tmp", "/dev/shm"): tries(lambda: open(os.path.join(p, probe), "w").close())
print(write(os.path.join(tmp, probe)), write(probe), tries(os.chmod, ".", 0o755))
"""
    theirs.chmod(0o777)
    if (user := scene.backend.info().user) is not None:
        os.chown(theirs, user, user)
    async with scene.open() as box:
        said = await _python(box, code, timeout=60)
        _expect(said == "[]\n[]\nFalse False\nTrue True True", said[:500])
    left = [place for place in ("/tmp", "/dev/shm") if Path(place, f"crrl-probe-{os.getpid()}").exists()]
    _expect(not left, f"the host sees what was written in {left}")
    control = theirs / "control"
    control.touch()
    control.unlink()
    return "control: the temporary folder and the workspace are writable; the host writes where the probe cannot"


async def no_network(scene: Scene) -> str:
    """No network: not the host's loopback, not abstract sockets, not vsock."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        port, name = tcp.getsockname()[1], f"\0crrl-exam-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        code = f"""
import socket, sys
def reaches(family, address):
    try:
        with socket.socket(family) as s: s.settimeout(1); s.connect(address); return True
    except OSError: return False
def opens(family, kind=socket.SOCK_STREAM, protocol=0):
    try: socket.socket(family, kind, protocol).close(); return True
    except OSError: return False
print(reaches(socket.AF_INET, ("127.0.0.1", {port})), reaches(socket.AF_UNIX, {name!r}))
print(reaches(socket.AF_INET, ("1.1.1.1", 53)), opens(40), opens(16, socket.SOCK_RAW, 12), opens(17, 3))
"""
        async with scene.open() as box:
            said = await _python(box, code)
            _expect(said == "False False\nFalse False False False", said)
        control = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout
        _expect(control.startswith("True True"), f"the control failed: on the host, {control!r}")
    return "control: the host reaches both"


async def no_kernel_doors(scene: Scene) -> str:
    """System calls that no repair needs are refused."""
    code = """
import ctypes, platform
call = ctypes.CDLL(None, use_errno=True).syscall
x86 = platform.machine() == "x86_64"
doors = {"unshare": (272 if x86 else 97, 0x10000000), "ptrace": (101 if x86 else 117, 0, 0, 0, 0),
         "io_uring_setup": (425, 1, 0), "bpf": (321 if x86 else 280, 0, 0, 0),
         "keyctl": (250 if x86 else 219, 0, -3, 1),
         "mount": (165 if x86 else 40, 0, 0, 0, 0, 0), "clone3": (435, 0, 0), "memfd": (319 if x86 else 279, b"m", 0),
         "perf_event_open": (298 if x86 else 241, 0, 0, 0, 0, 0), "pidfd_getfd": (438, 0, 0, 0)}
for name, (number, *rest) in doors.items():
    ctypes.set_errno(0)
    result = call(number, *rest)
    if result >= 0 or ctypes.get_errno() not in (1, 38): print(name, result, ctypes.get_errno())
status = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
none = "0" * 16  # the bounding set says nothing more where there are no new privileges, and only root can empty it
for key, want in (("CapEff", none), ("CapPrm", none), ("CapAmb", none), ("NoNewPrivs", "1"), ("Seccomp", "2")):
    if status[key].strip() != want: print(key, status[key])
"""
    async with scene.open() as box:
        said = await _python(box, code)
        _expect(said == "", said)
    return "no capabilities, no new privileges, filter on"


# -- lifetime


async def no_daemons(scene: Scene) -> str:
    """No process outlives its command, whatever it does to."""
    beat = "while :; do date +%N >> beat; done"
    daemon = f'nohup setsid bash -c \'trap "" HUP TERM INT; (setsid bash -c "{beat}" &) ; {beat}\' > /dev/null 2>&1 &'
    async with scene.open() as box:
        control = await box.exec(["bash", "-c", f"{daemon} sleep 0.3; wc -l < beat"])
        _expect(int(control.output) > 0, "the control failed: the daemon never ran")
        before = await box.read("beat")
        await asyncio.sleep(0.2)
        _expect(await box.read("beat") == before, "a daemon still writes after its command")
        await box.exec(["bash", "-c", daemon])
        _expect(await box.diff() == await box.diff(), "a daemon writes between two diffs")
    return "control: while its command runs, it writes"


async def unstoppable(scene: Scene) -> str:
    """Commands cannot kill, stop, trace or change the process that keeps them."""
    code = """
import os, signal
keeper = os.getppid()
for pid in (1, keeper):
    for number in (signal.SIGKILL, signal.SIGSTOP):
        try: os.kill(pid, number)
        except OSError: pass
    for name in ("mem", "fd/3", *(["environ"] if pid == 1 else [])):  # a keeper of the same user knows no secrets
        try: open(f"/proc/{pid}/{name}", "r+b" if name == "mem" else "rb").close(); print("opened", pid, name)
        except OSError: pass
try: os.kill(-1, 15)
except OSError: pass
for name in os.listdir("/proc/self/fd"):
    try:
        if "socket" in os.readlink(f"/proc/self/fd/{name}"): print("socket", name)
    except OSError: pass
"""
    async with scene.open() as box:
        said = await _python(box, code)
        _expect(said == "", said)
        _expect((await box.exec(["true"])).ok, "the guest does not answer any more")
    return "no signal reaches it, its memory and descriptors are closed"


# -- speed


async def speed(scene: Scene) -> str:
    """A command costs little more than a plain `bash -c` of the host."""
    allowed = scene.backend.info().slowdown
    async with scene.open() as box:
        plain, inside = [], []
        for _ in range(40):
            started = time.perf_counter()
            subprocess.run(["bash", "-c", "true"], stdout=subprocess.PIPE, check=True)
            plain.append(time.perf_counter() - started)
            started = time.perf_counter()
            await box.exec(["bash", "-c", "true"])
            inside.append(time.perf_counter() - started)
    fast, base = (statistics.quantiles(times, n=4)[0] for times in (inside, plain))  # what others' load leaves alone
    _expect(fast <= allowed * base, f"{fast / base:.1f} times, where {allowed:.0f} are allowed")
    return f"{fast / base:.2f} times, {1e3 * fast:.1f} ms"


BEHAVIOUR: tuple[Question, ...] = (commands, files, diffs, large, bridge)
LIMITS: tuple[Question, ...] = (timeouts, floods, processes, memory, file_size, disk, keepers)
ISOLATION: tuple[Question, ...] = (no_secrets, no_writes, no_network, no_kernel_doors)
LIFETIME: tuple[Question, ...] = (no_daemons, unstoppable)
DANGEROUS: tuple[Question, ...] = (processes, memory, unstoppable)
"""What would hit the whole machine, or all processes of its user, where there is no isolation."""
QUESTIONS = (*BEHAVIOUR, *LIMITS, *ISOLATION, *LIFETIME, speed)
