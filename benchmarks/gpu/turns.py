"""One GPU in turns: vLLM sleeps while the learner steps; the learner is offloaded to host memory while vLLM serves.

    python benchmarks/gpu/turns.py --python ~/vllm/bin/python [--size 4B] [--share 0.85] [--rounds 3]
    python benchmarks/gpu/turns.py --toy        (a miniature, on a CPU alone, where sleeping frees nothing)

Repeats what `engine.share_devices=turns` does, without agents: a server with adapters and a learner (LoRA of rank 32,
bf16) on random weights of Qwen3's shapes, with `--requests` requests under way at each switch, as with
`rollout.max_staleness`. Prints the seconds of each part of a switch, the used GPU memory after it by the driver (MiB),
the resident memory of all processes and the used memory of the host (some pages of the driver belong to no process),
and the largest difference between the server's and the learner's logprobs. Exits with 1 if a request was lost.

Compare with the plan: ``asleep`` is what a sleeping server leaves on the GPU and ``away`` what a learner leaves, each
assumed to be 2 GB (`plan.sizing`), with moves at 20 GB/s; ``away_host_mib`` minus ``start_host_mib`` should lie between
``turns.host_gb`` and ``host_at_most_gb``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from transformers.utils import logging as hf_logging

from coderepairrl import models
from coderepairrl.engines.vllm import Vllm
from coderepairrl.learn import Learner
from coderepairrl.protocols import Engine
from coderepairrl.types import EngineNeeds, Sampling
from learner import DEVICE, SIZES, build_model, make_setting, rows  # benchmarks/gpu, where this script is


class Measured:
    """Seconds and memory after each part of a switch, by name."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    async def __call__(self, name: str, work: Any) -> Any:
        began = time.monotonic()
        done = await work
        self.found[f"{name}_seconds"] = round(time.monotonic() - began, 3)
        self.found[f"{name}_rss_mib"], self.found[f"{name}_host_mib"] = resident()
        if (taken := used()) is not None:
            self.found[f"{name}_mib"] = taken
        print(f"{name}: {self.found[f'{name}_seconds']} s, {taken} MiB taken", file=sys.stderr, flush=True)
        return done


def used() -> int | None:
    """MiB used on the first GPU by all processes; None without a GPU."""
    if DEVICE.type != "cuda":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def resident() -> tuple[int, int]:
    """Resident MiB of this process and its descendants, and used MiB of the host."""
    own, rss = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            rss += process.memory_info().rss
    memory = psutil.virtual_memory()
    return rss >> 20, (memory.total - memory.available) >> 20


async def reply(engine: Engine, prompt: list[int], seed: int, tokens: int) -> tuple[list[int], list[float], list[int]]:
    ids, logprobs, versions = list[int](), list[float](), list[int]()
    async for chunk in engine.generate(prompt, Sampling(max_tokens=tokens), seed):
        ids += chunk.ids
        logprobs += chunk.logprobs
        versions += [chunk.version] * len(chunk.ids)
    return ids, logprobs, versions


async def turns(model: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    setting = make_setting(options.size, 4096, 1)
    toy = options.size == "toy"
    args = [] if toy else ["--gpu-memory-utilization", str(options.share)]
    rank = setting.learn.lora.rank if setting.learn.lora else 0
    spec = Vllm(python=options.python, args=args, lora_rank=rank, slots=options.requests + 8)
    measured, result = Measured(), dict[str, Any]()
    prompts = [list(row.ids[: len(row.ids) // 2]) for row in rows(options.requests, 96 if toy else 2048, 97)]
    tokens = 40 if toy else 1024
    engine = await measured("start", spec.start(model, log_dir=work, needs=EngineNeeds(sleep=True)))
    learner: Learner | None = None
    try:
        await measured("asleep", engine.sleep())
        learner = await measured(
            "learner", Learner.start(model, setting.learn, log_dir=work, publish_dir=work, gpu=DEVICE.type == "cuda")
        )
        await measured("away", learner.offload())
        await measured("awake", engine.wake())
        result = {"first": measured.found, "rounds": []}
        for number in range(options.rounds):
            measured = Measured()
            began = time.monotonic()
            requests = [asyncio.ensure_future(reply(engine, p, at, tokens)) for at, p in enumerate(prompts)]
            while (await engine.health())["generated_tokens"] < (number * 2 + 1) * len(prompts) * tokens // 4:
                await asyncio.sleep(0.05)
                if all(each.done() for each in requests):
                    break
            measured.found["under_way"] = sum(not each.done() for each in requests)
            await measured("sleep", engine.sleep())
            measured.found["moved_mb"] = round((await measured("reload", learner.reload())) / 1e6)
            await measured("step", learner.step(rows(8, 96 if toy else 2048, setting.config.vocab_size)))
            published = await measured("publish", learner.publish("adapter"))
            await measured("offload", learner.offload())
            await measured("load", engine.load(*published))
            measured.found["wake_seconds"] = round((await engine.health())["wake_seconds"], 3)
            answers = await asyncio.gather(*requests)
            measured.found["lost"] = sum(len(ids) != tokens for ids, _, _ in answers)
            measured.found["tokens_per_second"] = round(len(prompts) * tokens / (time.monotonic() - began), 1)
            answer = await reply(engine, prompts[0], 0, tokens)
            await engine.sleep()
            await learner.reload()
            [truth] = await learner.logprobs([[*prompts[0], *answer[0]]])
            scored = truth[len(truth) - len(answer[0]) :]
            measured.found["mismatch"] = max(abs(a - b) for a, b in zip(scored, answer[1], strict=True))
            await learner.offload()
            await engine.wake()
            result["rounds"].append(measured.found)
    finally:
        if learner is not None:
            await learner.close()
        await engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.6B")
    parser.add_argument("--python", default="", help="that has vLLM; without it as engine.options.python")
    parser.add_argument("--share", type=float, default=0.85, help="of the GPU that the server takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if DEVICE.type == "cpu" and not options.toy:
        parser.error("there is no GPU: only --toy makes sense here")
    if DEVICE.type != "cpu" and options.toy:
        parser.error("--toy is in float32, in which vLLM has no adapters on a GPU: CUDA_VISIBLE_DEVICES= (empty)")
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options.size = "toy" if options.toy else options.size
    setting = make_setting(options.size, 4096, 1)
    if options.toy:
        setting.config.head_dim = 32  # vLLM's kernels for CPUs know no smaller heads
    with tempfile.TemporaryDirectory() as name:
        model = build_model(setting.config, setting.dtype, Path(name) / "model")
        for file in models.find_model_folder("builtin:tiny").glob("*token*"):  # vLLM needs the tokenizer
            shutil.copy(file, model)
        result = asyncio.run(turns(model, Path(name) / "work", options))
    print(json.dumps({"device": str(DEVICE), "size": options.size, **result}))
    sys.exit(any(each["lost"] for each in result["rounds"]))


if __name__ == "__main__":
    main()
