"""Several runs of adapters on one learner, with one copy of the frozen model, against a learner for each.

    python benchmarks/gpu/shared.py [--size 4B] [--seeds 3] [--length 2048] [--steps 2]
    python benchmarks/gpu/shared.py --toy        (a miniature, on a CPU too: shows that the script runs)

What `train.learner` does, without engines: so many learners (LoRA of rank 32, bf16, other seeds) on random weights of
Qwen3's shapes, all there at once, that step in turn; first each a process of its own, then all on one
(``crrl learner SOCKET --share``). Prints what is taken by the time that the first, the second and so on has stepped
(MiB: of the GPU as its driver says, without one the processes' PSS), the seconds of a step, and whether both ways gave
the same adapters, bit for bit: where they did not, it exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from transformers.utils import logging as hf_logging
from turns import used

from coderepairrl.learn import Learner
from learner import DEVICE, SIZES, Setting, build_model, rows, setting  # benchmarks/gpu, where this script is


def taken() -> int:
    """MiB of the GPU; without one those of the processes below this one, pages that several have counted once."""
    if (of_gpu := used()) is not None:
        return of_gpu
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            total += process.memory_full_info().pss
    return total >> 20


@asynccontextmanager
async def sharing(work: Path) -> AsyncIterator[Path]:
    """The socket of a learner that several runs share."""
    socket = work / "learner.sock"
    command = [sys.executable, "-m", "coderepairrl.cli", "learner", str(socket), "--share", "--logs", str(work)]
    server = await asyncio.create_subprocess_exec(*command)
    try:
        while not socket.exists():
            if server.returncode is not None:
                raise SystemExit(f"the learner ended with {server.returncode}")
            await asyncio.sleep(0.05)
        yield socket
    finally:
        server.terminate()
        await server.wait()


async def run(
    model: Path, work: Path, given: Setting, options: argparse.Namespace, shared: Path | None
) -> dict[str, Any]:
    samples = rows(8, options.length, given.config.vocab_size)
    learners: list[Learner] = []
    found: dict[str, Any] = {"taken_mib": [], "step_seconds": [], "checksums": []}
    try:
        for seed in range(options.seeds):
            settings, out = given.learn.but(seed=seed), work / f"weights-{seed}"
            place = {"shared": shared, "run": f"seed-{seed}"} if shared else {"gpu": DEVICE.type == "cuda"}
            learners.append(await Learner.start(model, settings, log_dir=work, publish_dir=out, **place))
            await learners[-1].step(samples)
            found["taken_mib"].append(taken())
            print(f"{seed + 1} {'shared' if shared else 'apart'}: {taken()} MiB", file=sys.stderr, flush=True)
        for _ in range(options.steps):
            for each in learners:
                began = time.monotonic()
                await each.step(samples)
                found["step_seconds"].append(round(time.monotonic() - began, 3))
        found["checksums"] = [(await each.publish("adapter")).checksum for each in learners]
    finally:
        await asyncio.gather(*(each.close() for each in learners))
    return found


async def both(model: Path, work: Path, given: Setting, options: argparse.Namespace) -> dict[str, Any]:
    before = taken()
    apart = await run(model, work / "apart", given, options, None)
    async with sharing(work) as socket:
        shared = await run(model, work / "shared", given, options, socket)
    same = apart.pop("checksums") == shared.pop("checksums")
    return {"before_mib": before, "apart": apart, "shared": shared, "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.6B")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest row")
    parser.add_argument("--steps", type=int, default=2, help="of each, after its first")
    parser.add_argument(
        "--precision", choices=["bf16", "fp32"], default="bf16", help="of the frozen model as it is held"
    )
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    given = setting("toy" if options.toy else options.size, 4096, 1)
    if options.toy:
        options.length, options.precision = 64, "fp32"
    given = given._replace(learn=given.learn.but(precision=options.precision))
    with tempfile.TemporaryDirectory() as name:
        model = build_model(given.config, given.dtype, Path(name) / "model")
        result = asyncio.run(both(model, Path(name), given, options))
    print(json.dumps({"device": str(DEVICE), "size": "toy" if options.toy else options.size, **result}))
    sys.exit(not result["same"])


if __name__ == "__main__":
    main()
