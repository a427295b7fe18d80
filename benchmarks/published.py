"""Speed of CPU engines on a published model: the tiny engine, vLLM and transformers' ``generate``, in one run.

    python benchmarks/published.py FOLDER [--threads 1] [--repeat 3] [--vllm .venv/vllm/bin/python] [--skip generate]

All compute in float32 with the same number of threads. Requests are those of a training step: two tasks, whose prompts
begin alike, with eight attempts each, sampled at T = 1; each repetition draws new prompts. `generate` gets them as one
batch. CPU time is that of this process and all children; only the measured one is busy.

The last lines are for one sequence alone: the weights that the tiny engine reads a second, as a share of the rate at
which this machine reads memory with the same number of threads (the best of ten passes over 1 GB, in the same run).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from coderepairrl import engines
from coderepairrl.engines.tiny.config import EMBEDDING, HEAD, ModelConfig
from coderepairrl.protocols import Engine
from coderepairrl.types import Sampling
from engine import Clock, Rate

SHARED, PROMPT, NEW, TASKS, ATTEMPTS = 200, 350, 100, 2, 8


def draw_prompts(rng: random.Random, vocabulary: int) -> list[list[int]]:
    shared = [rng.randrange(vocabulary) for _ in range(SHARED)]
    tasks = [[*shared, *(rng.randrange(vocabulary) for _ in range(PROMPT - SHARED))] for _ in range(TASKS)]
    return [prompt for prompt in tasks for _ in range(ATTEMPTS)]


async def ask(engine: Engine, prompt: list[int], seed: int) -> Rate:
    """Ask for `NEW` tokens; returns the rate of those after the first chunk."""
    clock, count = Clock(), -1
    async for chunk in engine.generate(prompt, Sampling(max_tokens=NEW), seed):
        clock, count = (clock, count + len(chunk.ids)) if count >= 0 else (Clock(), 0)
    return clock.rate(count)


async def measure(contestant: Any, prompts: list[list[int]]) -> Rate:
    clock = Clock()
    if not isinstance(contestant, torch.nn.Module):
        await asyncio.gather(*(ask(contestant, prompt, seed) for seed, prompt in enumerate(prompts)))
    else:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            contestant.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
    return clock.rate(len(prompts) * NEW)


def read_rate() -> float:
    """Measure the bytes of memory read per second."""
    block = torch.ones(2**16, 2**12)
    row = torch.ones(2**12)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        torch.mv(block, row)
        seconds.append(time.perf_counter() - began)
    return 4 * block.numel() / min(seconds)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vllm", help="interpreter that has vLLM for CPUs")
    parser.add_argument("--skip", nargs="*", default=(), choices=("generate", "step", "alone"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = ModelConfig.read(options.folder)
    rng = random.Random(0)
    async with AsyncExitStack() as parts:
        logs = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        contestants: dict[str, Any] = {}
        chosen: dict[str, dict[str, Any]] = {"tiny": {"threads": options.threads, "kv_gib": 4}}
        if options.vllm:
            env = {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_KVCACHE_SPACE": "2"}
            chosen["vllm"] = {"python": options.vllm, "dtype": "float32", "env": env, "args": ["--enforce-eager"]}
        for name, settings in chosen.items():
            engine = await engines.make_engine(name, context=1024, **settings).start(options.folder, log_dir=logs)
            parts.push_async_callback(engine.close)
            contestants[name] = engine
        if "generate" not in options.skip:
            model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
            contestants["generate"] = model.eval()
        rates: dict[str, list[Rate]] = {name: [] for name in contestants}
        for repetition in range(1 if "step" in options.skip else options.repeat + 1):
            prompts = draw_prompts(rng, config.vocab_size)
            for name, contestant in contestants.items():
                if repetition:
                    rates[name].append(await measure(contestant, prompts))
                elif not isinstance(contestant, torch.nn.Module):  # the first one warms servers up
                    await measure(contestant, prompts[:2])
        print(
            f"{TASKS * ATTEMPTS} sequences, {PROMPT} + {NEW} tokens, {options.threads} threads, medians (least, most)"
        )
        for name, each in rates.items() if "step" not in options.skip else ():
            for at, clock in enumerate(Rate._fields):
                values = [rate[at] for rate in each]
                spread = f"({min(values):.1f} to {max(values):.1f})"
                print(f"{name:>9}: {statistics.median(values):6.1f} {spread} tokens a {clock} s")
        if "alone" in options.skip:
            return
        shapes = config.shapes()
        unread = 0 if config.tied else shapes[EMBEDDING][0] * shapes[HEAD][1]
        weights = 4 * (sum(torch.Size(shape).numel() for shape in shapes.values()) - unread)
        for _ in range(options.repeat):
            rate = read_rate()
            alone = await ask(contestants["tiny"], draw_prompts(rng, config.vocab_size)[0], 0)
            shares = " and ".join(
                f"{speed:.1f} tokens a {clock} s ({speed * weights / rate:.0%})"
                for clock, speed in alone._asdict().items()
            )
            print(f"    alone: {shares} of {rate / 1e9:.1f} GB/s at {weights / 1e9:.2f} GB a token")


if __name__ == "__main__":
    asyncio.run(main())
