"""Exam of sandboxes: ``crrl check sandbox NAME|module:Class``.

Behaviour, limits and speed; isolation is tested by attacks with controls (`redteam`).
"""

from __future__ import annotations

import asyncio
import functools
import shlex
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

from coderepairrl import grading
from coderepairrl.checks.sandbox import inside
from coderepairrl.errors import CodeRepairError
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.types import Task


class Failed(Exception):
    """Failed expectation."""


class Scene(NamedTuple):
    """Backend and task to examine, and a host folder."""

    backend: SandboxBackend
    task: Task
    folder: Path
    """Host folder for repositories and a socket."""

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        """Open a fresh sandbox."""
        return self.backend.open(self.task)


Question = Callable[[Scene], Awaitable[str]]


def expect(condition: bool, otherwise: str) -> None:
    """Raise `Failed` with `otherwise` unless `condition` holds."""
    if not condition:
        raise Failed(otherwise)


@functools.cache
def inside_program(name: str, *arguments: str) -> tuple[str, ...]:
    """Command line of a function in `inside`."""
    return ("python3", "-c", Path(inside.__file__).read_text(encoding="utf-8"), name, *arguments)


async def run_inside(box: Sandbox, name: str, *arguments: str, timeout: float = 30.0) -> str:
    """Output of a function in `inside`, with errors."""
    result = await box.exec(inside_program(name, *arguments), timeout=timeout)
    return result.output.decode(errors="replace").strip()


async def check_privileges(scene: Scene) -> str:
    """Commands have no capabilities, get no new privileges, and are filtered."""
    async with scene.open() as box:
        result = await box.exec(["cat", "/proc/self/status"])
    status = dict(line.split(":\t", 1) for line in result.output.decode().splitlines() if ":\t" in line)
    none = "0" * 16  # the bounding set means nothing where there are no new privileges, and only root can empty it
    for key, want in (("CapEff", none), ("CapPrm", none), ("CapAmb", none), ("NoNewPrivs", "1"), ("Seccomp", "2")):
        expect(status.get(key) == want, f"{key} is {status.get(key)}")
    return "no capabilities, no new privileges, filter on"


async def check_timeouts(scene: Scene) -> str:
    """A command that hangs is ended in time, with everything it started."""
    async with scene.open() as box:
        started = time.monotonic()
        result = await box.exec(["bash", "-c", "trap '' TERM; (sleep 61 &); sleep 61"], timeout=0.5)
        took = time.monotonic() - started
        expect(result.timed_out and took < 5, f"timed_out={result.timed_out} after {took:.1f} s")
    return f"ended after {took:.2f} s with a timeout of 0.5 s"


async def check_output_limit(scene: Scene) -> str:
    """A flood of output is cut while it runs."""
    async with scene.open() as box:
        result = await box.exec(["bash", "-c", "yes | head -c 50000000"], max_bytes=10_000)
        expect(len(result.output) == 10_000 and result.truncated, f"{len(result.output)} bytes arrived")
    return "10,000 bytes of 50,000,000"


async def check_process_limit(scene: Scene) -> str:
    """A fork bomb is contained, and the sandbox lives on."""
    async with scene.open() as box:
        result = await box.exec(["bash", "-c", ":(){ :|:& };:; sleep 60"], timeout=2)
        expect(result.timed_out or not result.ok, "the fork bomb succeeded")
        after = await box.exec(["echo", "alive"])
        expect(after.output == b"alive\n", f"afterwards: {after.output!r}")
    return "killed, and the next command ran"


async def check_memory_limit(scene: Scene) -> str:
    """Memory is bounded, for one process and for many."""
    async with scene.open() as box:
        limit = scene.backend.info().limits.get("memory", 2 << 30) >> 20
        one = await box.exec(inside_program("hog", str(limit * 2)), timeout=15)
        expect(not one.ok and b"got it" not in one.output, "one process got twice the limit")
        share = f"for i in 1 2 3; do {shlex.join(inside_program('hog', str(limit * 6 // 10)))} & done; wait"
        many = await box.exec(["bash", "-c", share], timeout=60)
        # The guest kills the whole command. If the kernel acts first, it kills only as many processes as it must,
        # perhaps one that already has its share, so that the last one gets its own.
        bounded = many.exit_code == 137 or sum(line.startswith(b"kept ") for line in many.output.splitlines()) < 3
        expect(bounded and not many.timed_out, f"three processes kept 1.8 times the limit: {many.output!r}")
    return f"{limit} MiB"


async def report_limit_keeper(scene: Scene) -> str:
    """The sandbox names what enforces limits."""
    return scene.backend.info().limits_kept


async def check_disk_limit(scene: Scene) -> str:
    """The workspace cannot fill the disk, nor can files that were deleted and are still open."""
    limits = scene.backend.info().limits
    if "disk_bytes" not in limits:
        return "not bounded as a whole, only the size of a file and the number of open files"
    async with scene.open() as box:
        size, each = limits["disk_bytes"] + (1 << 20), limits["file_bytes"] // 2
        output = await run_inside(box, "fill", str(size), str(each), timeout=60)
        expect(output == "28", f"writing ended with {output}, not errno 28 (no space left)")
    return f"stopped at {limits['disk_bytes'] >> 20} MiB"


async def check_file_size_limit(scene: Scene) -> str:
    """One file cannot fill the disk."""
    async with scene.open() as box:
        limit = scene.backend.info().limits.get("file_bytes", 1 << 30)
        result = await box.exec(
            ["bash", "-c", f"head -c {limit + (1 << 20)} /dev/zero > big; stat -c %s big"], timeout=60
        )
        size = int(result.output.split()[-1])
        expect(size <= limit, f"a file of {size} bytes was written")
    return f"stopped at {limit >> 20} MiB"


async def check_commands(scene: Scene) -> str:
    """Commands run in the workspace, with input, environment and exit code."""
    async with scene.open() as box:
        script = 'pwd; echo "$A"; cat; echo err >&2; chmod 755 . && : > "${TMPDIR:-/tmp}/exam" && exit 3'
        result = await box.exec(["bash", "-c", script], env={"A": "b c"}, stdin=b"in\n")
        expect(result.output == f"{box.workdir}\nb c\nin\nerr\n".encode(), f"printed {result.output!r}")
        expect(result.exit_code == 3, f"exit code {result.exit_code}")
        missing = await box.exec(["no-such-program"])
        expect(missing.exit_code == 127, f"a missing program gives {missing.exit_code}")
    return "output in order, exit codes as a shell's"


async def check_file_access(scene: Scene) -> str:
    """Files are read and written byte for byte, and only in the workspace."""
    async with scene.open() as box:
        expect(await box.read("notes.txt") == b"one\r\ntwo\r\n", "CRLF did not survive")
        data = bytes(range(256)) * 300
        await box.write("new/folder/data.bin", data)
        expect(await box.read("new/folder/data.bin") == data, "bytes did not survive")
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
        expect(await box.read("real/file") == b"1", "a link inside the workspace is not followed")
        for path in ("linked/file", "other", "out/file"):
            await box.write(path, b"2", follow=False)
            expect(await box.read(path) == b"2", f"{path} did not become a file of its own")
        expect(await box.read("real/file") == b"1", "a file is written through a linked folder")
        expect(b"return" in await box.read("app.py"), "a file is written through a link")
    return "paths that leave the workspace are refused"


async def check_diffs(scene: Scene) -> str:
    """The diff has every change, whatever was done to git, and applies exactly."""
    change = (
        "sed -i s/-/+/ app.py; git add app.py; git commit -qm x; printf 'a\\r\\n' > 'b c'; git add 'b c';"
        "mkdir d; echo new > d/e; printf '*\\n' > .gitignore; rm notes.txt; chmod +x d/e; rm -rf .git; git init -q d"
    )
    async with scene.open() as box:
        expect(await box.diff() == b"", "a diff of nothing is not empty")
        await box.exec(["bash", "-c", change])
        patch = await box.diff()
    for part in (b"return a + b", b"b/b c", b"b/d/e", b"mode 100755", b"a/notes.txt", b"b/.gitignore"):
        expect(part in patch, f"{part.decode()} is missing from the diff")
    async with scene.open() as box:
        expect(not (refused := await grading.apply_patch(box, patch)), refused)
        expect(await box.diff() == patch, "the diff, applied, gives a different one")
    return "edits, new, staged, committed, ignored and deleted files"


async def check_large_workspace(scene: Scene) -> str:
    """A workspace of 1,000 files opens as clean as a small one, and what is moved in it is in the diff."""
    many = scene.folder / "many"
    for number in range(1000):
        path = many / f"folder-{number % 10}" / f"file-{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}\n" * 300)
    scene = scene._replace(task=Task("exam/2", "", "python", f"dir:{many}", b""))
    async with scene.open() as box:
        status = await box.exec(["git", "status", "--porcelain"])
        expect(status.ok and status.output == b"", f"it opens dirty: {status.output!r}")
        await box.exec(["bash", "-c", "mv folder-1 moved; rm -r folder-2; echo y > folder-3/file-3.py"])
        patch = await box.diff()
        counts = [patch.count(b"\n" + part) for part in (b"new file", b"deleted file", b"+y")]
        expect(counts == [100, 200, 1], f"new, deleted and edited files: {counts}")
    return scene.backend.info().workspaces


async def check_bridge(scene: Scene) -> str:
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
        output = await run_inside(box, "converse", host, port)
        expect(output == r"b'one\n' b'two\n' True b''", f"the guest saw {output}")
    return "parts arrive as they are sent"


async def check_speed(scene: Scene) -> str:
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
    # the lower quartile, since other load disturbs it least
    fast, base = (statistics.quantiles(times, n=4)[0] for times in (inside, plain))
    expect(fast <= allowed * base, f"{fast / base:.1f} times, where {allowed:.0f} are allowed")
    return f"{fast / base:.2f} times, {1e3 * fast:.1f} ms"


async def examine_sandbox(backend: SandboxBackend) -> list[Finding]:
    """Collect what `ask_questions` yields."""
    return [finding async for finding in ask_questions(backend)]


async def ask_questions(backend: SandboxBackend) -> AsyncIterator[Finding]:
    """Ask `backend` every question; yield findings in order."""
    with scratch("exam") as folder:
        folder.chmod(0o755)
        repository = folder / "repository"
        repository.mkdir()
        (repository / "app.py").write_bytes(b"def add(a, b):\n    return a - b\n")
        (repository / "notes.txt").write_bytes(b"one\r\ntwo\r\n")
        scene = Scene(backend, Task("exam/1", "", "python", f"dir:{repository}", b""), folder)
        for question in QUESTIONS:
            yield await _ask_question(question, scene)


async def _ask_question(question: Question, scene: Scene) -> Finding:
    title = (question.__doc__ or question.__name__).strip().splitlines()[0].rstrip(".")
    if question in DANGEROUS and not scene.backend.info().isolates:
        return Finding(title, False, "not tried: nothing would keep it from the rest of this machine")
    try:
        async with asyncio.timeout(120):
            return Finding(title, True, await question(scene))
    except (Failed, CodeRepairError, OSError) as error:
        return Finding(title, False, str(error) or type(error).__name__)


BEHAVIOUR: tuple[Question, ...] = (check_commands, check_file_access, check_diffs, check_large_workspace, check_bridge)
LIMITS: tuple[Question, ...] = (
    check_timeouts,
    check_output_limit,
    check_process_limit,
    check_memory_limit,
    check_file_size_limit,
    check_disk_limit,
    report_limit_keeper,
)
DANGEROUS: tuple[Question, ...] = (check_process_limit, check_memory_limit)
"""Questions that harm the machine without isolation."""
QUESTIONS = (*BEHAVIOUR, *LIMITS, check_privileges, check_speed)
