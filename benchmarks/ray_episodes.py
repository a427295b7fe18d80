"""Cost of an episode with the local executor and with Ray on the same machine: 2,000 scripted episodes.

Each attempts a hand-made task with three calls to the model, a command and a write in a real sandbox, and is compared
with the reference; the engine answers at once. Memory is the sum over all processes, with shared pages counted once
(PSS): before the first episode, and the peak during them. CPU time is of all processes, from the first episode.

Run: ``python benchmarks/ray_episodes.py [--episodes 2000] [--concurrency 16] [--room 8] [--only local|ray]``
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from coderepairrl import models, rewards, sandbox, tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent, Shell, Write
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.processes.meter import cpu_seconds
from coderepairrl.processes.scratch import scratch
from coderepairrl.rollout.episodes import AttemptSettings, Executor, PlannedAttempt, Rollout, derive_seed
from coderepairrl.rollout.local import LocalExecutor
from coderepairrl.rollout.ray_executor import ray_executor
from coderepairrl.rollout.worker import WorkerSetup
from coderepairrl.runs import Log
from coderepairrl.tasks.handmade import HandmadeSource
from coderepairrl.types import Limits, Sampling

WORDS = 64
"""Tokens of a reply."""
SCRIPT = (Say("Look."), Shell("ls -R . | head -50"), Say("Repair."), Write("note.py", "x = 1\n"), Say("Done?"))


def make_settings() -> Mapping[str, AttemptSettings]:
    """Settings of all attempts, the same for both executors."""
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    paid = rewards.make_rewards({"patch_lines": 1.0})
    return {"": AttemptSettings(ScriptedAgent(SCRIPT), backend, Limits(seconds=120.0), {"train": paid})}


def processes() -> set[int]:
    """Ids of this process and its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(") ")[2].split()[1])
    ours = fresh = {os.getpid()}
    while fresh := {pid for pid, parent in parents.items() if parent in fresh} - ours:
        ours = ours | fresh
    return ours


def memory() -> tuple[int, int, int]:
    """Bytes of all processes, of this one, and of the largest actor."""
    total = controller = actor = 0
    for pid in processes():
        with suppress(OSError, ValueError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            total += used
            controller += used if pid == os.getpid() else 0
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::WorkerActor"):
                actor = max(actor, used)
    return total, controller, actor


@asynccontextmanager
async def opened(name: str, engine: ScriptedEngine, log: Log, arguments: argparse.Namespace) -> AsyncIterator[Executor]:
    """Open the executor `name`."""
    codec = tokens.load_codec(models.find_model_folder("builtin:tiny"))
    if name == "local":
        gateway = Gateway(PolicySource(codec, engine), sampling=Sampling(), on_turn=log.turn)
        with scratch("benchmark") as home:
            async with gateway.listening(socket=home / "gateway.sock"):
                yield LocalExecutor(gateway, make_settings())
        return
    assert codec.loaded_from is not None
    factory = importlib.import_module(Path(__file__).stem).make_settings  # an actor cannot import it from `__main__`
    async with ray_executor(
        WorkerSetup(codec.loaded_from, factory),
        engine,
        log.turn,
        address="local",
        concurrency=arguments.concurrency,
        capacity=arguments.room,
        memory=0,
        patience=120.0,
        say=print,
    ) as executor:
        yield executor


async def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one executor."""
    codec = tokens.load_codec(models.find_model_folder("builtin:tiny"))
    reply = codec.encode("so " * WORDS)[: WORDS - 1]
    engine = ScriptedEngine(lambda ids, sampling, seed: [*reply, *codec.stop_ids[:1]])
    tasks, endings, peak = list(HandmadeSource()), Counter[str](), (0, 0, 0)
    with tempfile.TemporaryDirectory() as folder, closing(Log(Path(folder, "log.jsonl"))) as log:
        async with opened(name, engine, log, arguments) as executor:
            rollout = Rollout(
                executor=executor,
                log=log,
                concurrency=arguments.concurrency,
                on_episode=lambda episode: endings.update([episode.ending.value]),
            )

            async def watch() -> None:
                nonlocal peak
                while True:
                    now = await asyncio.to_thread(memory)
                    peak = max(peak[0], now[0]), max(peak[1], now[1]), max(peak[2], now[2])
                    await asyncio.sleep(2.0)

            if name == "ray":
                while len(executor.workers) < -(-arguments.concurrency // arguments.room):  # type: ignore[attr-defined]
                    await asyncio.sleep(0.1)
            before, *_ = memory()
            watching = asyncio.create_task(watch())
            cpu, controller_cpu, began = cpu_seconds(), time.process_time(), time.monotonic()
            waiting = asyncio.Queue[int]()
            for number in range(arguments.episodes):
                waiting.put_nowait(number)

            async def work() -> None:  # an episode is only planned when it begins, so that waiting ones hold no memory
                while not waiting.empty():
                    number = waiting.get_nowait()
                    task = tasks[number % len(tasks)]
                    seed = derive_seed(0, number)
                    await rollout.run(PlannedAttempt(task, "train", 1, f"train-{number:05d}", 0, seed, Sampling()))

            await asyncio.gather(*(work() for _ in range(arguments.concurrency)))
            wall, cpu, controller_cpu = (
                time.monotonic() - began,
                cpu_seconds() - cpu,
                time.process_time() - controller_cpu,
            )
            watching.cancel()
        size = Path(folder, "log.jsonl").stat().st_size
    return {
        "executor": name,
        "episodes": arguments.episodes,
        "endings": dict(endings),
        "seconds": round(wall, 1),
        "episodes a second": round(arguments.episodes / wall, 1),
        "CPU ms an episode": round(1000 * cpu / arguments.episodes, 1),
        "of which the controller": round(1000 * controller_cpu / arguments.episodes, 1),
        "MiB before": before >> 20,
        "MiB at most": peak[0] >> 20,
        "MiB of the controller at most": peak[1] >> 20,
        "MiB of an actor at most": peak[2] >> 20,
        "MiB more, an episode at once": round((peak[0] - before) / arguments.concurrency / (1 << 20), 1),
        "log MiB": size >> 20,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Print a line of JSON for each executor, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--room", type=int, default=8)
    parser.add_argument("--only", choices=("local", "ray"))
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(asyncio.run(measure(arguments.only, arguments))))
        return
    for name in ("local", "ray"):
        subprocess.run([sys.executable, *sys.argv, "--only", name], check=True)


if __name__ == "__main__":
    main()
