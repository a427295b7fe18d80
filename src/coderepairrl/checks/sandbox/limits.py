"""Questions about limits: time, output, processes, memory, disk."""

from __future__ import annotations

import shlex
import time

from coderepairrl.checks.sandbox.scene import Scene, expect, printed, program


async def timeouts(scene: Scene) -> str:
    """A command that hangs is ended in time, with everything it started."""
    async with scene.open() as box:
        started = time.monotonic()
        result = await box.exec(["bash", "-c", "trap '' TERM; (sleep 61 &); sleep 61"], timeout=0.5)
        took = time.monotonic() - started
        expect(result.timed_out and took < 5, f"timed_out={result.timed_out} after {took:.1f} s")
    return f"after {took:.2f} s of 0.5"


async def floods(scene: Scene) -> str:
    """A flood of output is cut while it runs."""
    async with scene.open() as box:
        result = await box.exec(["bash", "-c", "yes | head -c 50000000"], max_bytes=10_000)
        expect(len(result.output) == 10_000 and result.truncated, f"{len(result.output)} bytes arrived")
    return "10,000 bytes of 50,000,000"


async def processes(scene: Scene) -> str:
    """A fork bomb is contained, and the sandbox lives on."""
    async with scene.open() as box:
        result = await box.exec(["bash", "-c", ":(){ :|:& };:; sleep 60"], timeout=2)
        expect(result.timed_out or not result.ok, "the bomb ended well")
        after = await box.exec(["echo", "alive"])
        expect(after.output == b"alive\n", f"afterwards: {after.output!r}")
    return "killed, and the next command ran"


async def memory(scene: Scene) -> str:
    """Memory is bounded, for one process and for many."""
    async with scene.open() as box:
        limit = scene.backend.info().limits.get("memory", 2 << 30) >> 20
        one = await box.exec(program("hog", str(limit * 2)), timeout=15)
        expect(not one.ok and b"got it" not in one.output, "one process got twice the limit")
        share = f"for i in 1 2 3; do {shlex.join(program('hog', str(limit * 6 // 10)))} & done; wait"
        many = await box.exec(["bash", "-c", share], timeout=60)
        # The guest ends the command; if the kernel is first, it takes only as many processes as it must, and maybe one
        # that had got its share to let the last one have it.
        bounded = many.exit_code == 137 or sum(line.startswith(b"kept ") for line in many.output.splitlines()) < 3
        expect(bounded and not many.timed_out, f"three processes kept 1.8 times the limit: {many.output!r}")
    return f"{limit} MiB"


async def keepers(scene: Scene) -> str:
    """The keeper of the limits is named."""
    return scene.backend.info().limits_kept


async def disk(scene: Scene) -> str:
    """The workspace cannot fill the disk, nor can files that were deleted and are still open."""
    limits = scene.backend.info().limits
    if "disk_bytes" not in limits:
        return "not bounded as a whole: one file is, and so is the number of open ones"
    async with scene.open() as box:
        size, each = limits["disk_bytes"] + (1 << 20), limits["file_bytes"] // 2
        output = await printed(box, "fill", str(size), str(each), timeout=60)
        expect(output == "28", f"the attempt ended with {output}")
    return f"stopped at {limits['disk_bytes'] >> 20} MiB"


async def file_size(scene: Scene) -> str:
    """One file cannot fill the disk."""
    async with scene.open() as box:
        limit = scene.backend.info().limits.get("file_bytes", 1 << 30)
        result = await box.exec(
            ["bash", "-c", f"head -c {limit + (1 << 20)} /dev/zero > big; stat -c %s big"], timeout=60
        )
        size = int(result.output.split()[-1])
        expect(size <= limit, f"a file of {size} bytes was written")
    return f"stopped at {limit >> 20} MiB"
