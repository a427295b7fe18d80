"""Cost of a sandbox: a command against a plain `bash -c true`, alone and 32 at once, and the CPU of an episode.

    python benchmarks/sandbox.py [--rounds 200] [--sandbox bwrap]

Rounds are interleaved, so that other load hits all columns alike. Target: p50 at most 2.0 times the plain command;
32 at once are compared with 32 plain commands, one per thread, until all are done. An episode is open, one edit, diff
and close, on three files; its CPU is that of this process and its children, one episode after another and eight at
once, again as a multiple of `bash -c true`; for `bwrap` also with `fork=false`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

from coderepairrl.processes.meter import cpu_seconds
from coderepairrl.protocols import SandboxBackend
from coderepairrl.sandbox import make_backend
from coderepairrl.types import Task

TARGET = 2.0
MANY = 32


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


async def cpu_of_episodes(name: str, count: int) -> dict[str, list[float]]:
    """CPU seconds of an episode by row of the table, measured in batches of eight."""
    backends = {name: make_backend(name)}
    if name == "bwrap":
        backends |= {f"{name}, fork=false": make_backend(name, fork=False)}
    seconds: dict[str, list[float]] = {}

    async def episode(backend: SandboxBackend) -> None:
        async with backend.open(task) as box:
            await box.write("file0.py", b"x = 7\n")
            await box.diff()

    async def one_by_one(backend: SandboxBackend) -> None:
        for _ in range(8):
            await episode(backend)

    async def at_once(backend: SandboxBackend) -> None:
        await asyncio.gather(*(episode(backend) for _ in range(8)))

    async def plain(_: SandboxBackend) -> None:
        for _ in range(8):
            subprocess.run(["bash", "-c", "true"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)

    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            Path(folder, f"file{number}.py").write_text(f"x = {number}\n")
        task = Task("benchmark/1", "", "python", f"dir:{folder}", b"")
        for backend in backends.values():
            await episode(backend)  # prepares the workspace and checks the machine, once
        batches = [("plain bash -c true", plain, backends[name])]
        for label, backend in backends.items():
            batches += [(f"episode, {label}", one_by_one, backend), (f"8 episodes, {label}", at_once, backend)]
        for _ in range(max(count // 8, 1)):
            for label, batch, backend in batches:
                before = cpu_seconds()
                await batch(backend)
                seconds.setdefault(label, []).append((cpu_seconds() - before) / 8)
    for backend in backends.values():
        backend.close()  # type: ignore[attr-defined]
    return seconds


async def measure_at_once(backend: SandboxBackend, task: Task, rounds: int, note: Callable[[str, float], None]) -> None:
    """Time `MANY` open sandboxes that run a command at the same time, and `MANY` plain commands, until all are done."""
    loop = asyncio.get_running_loop()

    def plain() -> None:
        subprocess.run(["bash", "-c", "true"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)

    with ThreadPoolExecutor(MANY) as pool:
        async with AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(backend.open(task)) for _ in range(MANY)]
            for _ in range(rounds):
                started = time.perf_counter()
                await asyncio.gather(*(loop.run_in_executor(pool, plain) for _ in boxes))
                note(f"{MANY} at once: plain bash -c true", started)
                started = time.perf_counter()
                await asyncio.gather(*(box.exec(["bash", "-c", "true"]) for box in boxes))
                note(f"{MANY} at once: exec bash -c true", started)


async def measure(name: str, rounds: int) -> dict[str, list[float]]:
    backend = make_backend(name)
    seconds: dict[str, list[float]] = {}

    def note(row: str, started: float) -> None:
        seconds.setdefault(row, []).append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            Path(folder, f"file{number}.py").write_text(f"x = {number}\n")
        task = Task("benchmark/1", "", "python", f"dir:{folder}", b"")
        async with backend.open(task):
            pass  # prepares the workspace and checks the machine, once
        async with backend.open(task) as box:
            for _ in range(rounds):
                started = time.perf_counter()
                subprocess.run(["bash", "-c", "true"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
                note("plain bash -c true", started)
                started = time.perf_counter()
                await box.exec(["bash", "-c", "true"])
                note("exec bash -c true", started)
                started = time.perf_counter()
                await box.read("file1.py")
                note("read", started)
        for number in range(max(rounds // 10, 5)):
            started = time.perf_counter()
            async with backend.open(task) as box:
                note("open, 3 files", started)
                await box.write("file0.py", f"x = {number + 1}\n".encode())
                started = time.perf_counter()
                await box.diff()
                note("diff, 1 change", started)
                started = time.perf_counter()
            note("close", started)
        started = time.perf_counter()

        async def one() -> None:
            async with backend.open(task) as box:
                await box.exec(["true"])

        await asyncio.gather(*(one() for _ in range(MANY)))
        note(f"{MANY} at once: open, true, close", started)
        await measure_at_once(backend, task, max(rounds // 10, 5), note)
    backend.close()  # type: ignore[attr-defined]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sandbox", default="bwrap")
    options = parser.parse_args()
    seconds = asyncio.run(measure(options.sandbox, options.rounds))
    plain = statistics.median(seconds["plain bash -c true"])
    together = statistics.median(seconds[f"{MANY} at once: plain bash -c true"])
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    print(f"{options.sandbox + ', ms':32}{'p50':>9}{'p95':>9}{'ratio':>8}{'n':>6}")
    for row, values in seconds.items():
        p50 = statistics.median(values)
        base = together if "bash" in row and "at once" in row else plain
        print(f"{row:32}{1e3 * p50:9.2f}{1e3 * percentile(values, 0.95):9.2f}{p50 / base:8.2f}{len(values):6}")
    ratios = {
        "exec / plain": statistics.median(seconds["exec bash -c true"]) / plain,
        f"exec / plain, {MANY} at once": statistics.median(seconds[f"{MANY} at once: exec bash -c true"]) / together,
    }
    cpu = asyncio.run(cpu_of_episodes(options.sandbox, options.rounds))
    base = statistics.median(cpu["plain bash -c true"])
    for row, values in cpu.items():
        p50 = statistics.median(values)
        print(f"{row + ', CPU ms':40}{1e3 * p50:9.2f}{1e3 * percentile(values, 0.95):9.2f}{p50 / base:8.2f}", end="")
        print(f"{8 * len(values):6}")
    for label, ratio in ratios.items():
        print(f"{label}, at p50: {ratio:.2f} (target <= {TARGET}): {'met' if ratio <= TARGET else 'missed'}")
    return 0 if max(ratios.values()) <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
