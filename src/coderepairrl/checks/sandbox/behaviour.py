"""Questions about commands, files, diffs, the bridge and speed."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time

from coderepairrl import grading
from coderepairrl.checks.sandbox.scene import Failed, Scene, expect, printed
from coderepairrl.types import Task


async def commands(scene: Scene) -> str:
    """Commands run in the workspace, with input, environment and exit code."""
    async with scene.open() as box:
        script = 'pwd; echo "$A"; cat; echo err >&2; exit 3'
        result = await box.exec(["bash", "-c", script], env={"A": "b c"}, stdin=b"in\n")
        expect(result.output == f"{box.workdir}\nb c\nin\nerr\n".encode(), f"printed {result.output!r}")
        expect(result.exit_code == 3, f"exit code {result.exit_code}")
        missing = await box.exec(["no-such-program"])
        expect(missing.exit_code == 127, f"a missing program gives {missing.exit_code}")
    return "output in order, exit codes as a shell's"


async def files(scene: Scene) -> str:
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


async def diffs(scene: Scene) -> str:
    """The diff has every change, however git was treated, and applies back exactly."""
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
        expect(not (refused := await grading.apply(box, patch)), refused)
        expect(await box.diff() == patch, "applied, it gives another diff")
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
        expect(status.ok and status.output == b"", f"it opens dirty: {status.output!r}")
        await box.exec(["bash", "-c", "mv folder-1 moved; rm -r folder-2; echo y > folder-3/file-3.py"])
        patch = await box.diff()
        counts = [patch.count(b"\n" + part) for part in (b"new file", b"deleted file", b"+y")]
        expect(counts == [100, 200, 1], f"new, deleted and edited files: {counts}")
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
        output = await printed(box, "converse", host, port)
        expect(output == r"b'one\n' b'two\n' True b''", f"the guest saw {output}")
    return "parts arrive as they are sent"


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
    expect(fast <= allowed * base, f"{fast / base:.1f} times, where {allowed:.0f} are allowed")
    return f"{fast / base:.2f} times, {1e3 * fast:.1f} ms"
