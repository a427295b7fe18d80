"""Tokens per wall-clock and CPU second of the tiny engine and of transformers' ``model.generate``, in one run.

    python benchmarks/engine.py [--repeat 5] [--json]

Both sample greedily from one random Qwen3 of about a million parameters on the same prompts, one torch thread each.
`generate` runs in this process, the engine in a child process, its protocol and event loop included; repetitions
alternate, so that a busy machine slows both. CPU time is user and system time of both processes. Every repetition draws
new prompts: nothing is served from the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.engines.tiny import Tiny, TinyEngine
from coderepairrl.processes.meter import cpu_seconds
from coderepairrl.types import Sampling

PROMPT, NEW = 250, 60


class Rate(NamedTuple):
    """Tokens per second."""

    wall: float
    cpu: float


class Clock:
    """Starts when constructed. CPU time has a resolution of 0.01 s, as the kernel shows that of a child."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def rate(self, tokens: int) -> Rate:
        """`tokens` divided by the time since the start."""
        return Rate(tokens / (time.perf_counter() - self._wall), tokens / max(0.01, cpu_seconds() - self._cpu))


def build(folder: Path) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=267,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def run_generate(model: Any, prompts: list[list[int]]) -> tuple[Rate, list[list[int]]]:
    import torch

    # prompts of one length: left padding would only add masked tokens to generate's work
    ids = torch.tensor(prompts)
    clock = Clock()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return clock.rate(len(prompts) * NEW), [row[PROMPT:].tolist() for row in out]


async def run_engine(engine: TinyEngine, prompts: list[list[int]]) -> tuple[Rate, list[list[int]]]:
    async def one(prompt: list[int]) -> list[int]:
        sampling = Sampling(temperature=0.0, max_tokens=NEW)
        return [token async for chunk in engine.generate(prompt, sampling, 0) for token in chunk.ids]

    clock = Clock()
    out = await asyncio.gather(*map(one, prompts))
    return clock.rate(len(prompts) * NEW), list(out)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    results: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build(folder)
        engine = await Tiny().start(folder, log_dir=folder)
        try:
            for sequences in (1, 16):
                rates: dict[str, list[Rate]] = {"engine": [], "generate": []}
                same = 0
                for repetition in range(options.repeat + 1):
                    prompts = [[rng.randrange(267) for _ in range(PROMPT)] for _ in range(sequences)]
                    our_rate, our_ids = await run_engine(engine, prompts)
                    their_rate, their_ids = run_generate(model, prompts)
                    if repetition:  # the first one warms both up
                        rates["engine"].append(our_rate)
                        rates["generate"].append(their_rate)
                        same += sum(a == b for a, b in zip(our_ids, their_ids, strict=True))
                row: dict[str, float] = {"sequences": sequences}
                for at, clock in enumerate(Rate._fields):
                    by_side = {side: [rate[at] for rate in measured] for side, measured in rates.items()}
                    ratios = [a / b for a, b in zip(by_side["engine"], by_side["generate"], strict=True)]
                    row |= {
                        f"{side}_tokens_per_{clock}_s": round(statistics.median(each)) for side, each in by_side.items()
                    }
                    row |= {
                        f"{clock}_ratio": round(statistics.median(ratios), 2),
                        f"{clock}_ratio_min": round(min(ratios), 2),
                        f"{clock}_ratio_max": round(max(ratios), 2),
                    }
                results.append(row | {"equal_outputs": round(same / (options.repeat * sequences), 3)})
        finally:
            await engine.close()
    if options.json:
        print(json.dumps(results))
        return
    print(f"{PROMPT}-token prompts, {NEW} new tokens, medians of {options.repeat} interleaved repetitions")
    for row in results:
        for clock in Rate._fields:
            print(
                f"{row['sequences']:>3} sequences, {clock}: engine {row[f'engine_tokens_per_{clock}_s']:>6} tokens/s, "
                f"generate {row[f'generate_tokens_per_{clock}_s']:>6} tokens/s, ratio {row[f'{clock}_ratio']:.2f} "
                f"({row[f'{clock}_ratio_min']:.2f}-{row[f'{clock}_ratio_max']:.2f})"
            )
        print(f"{row['sequences']:>3} sequences: outputs equal {row['equal_outputs']:.1%}")


if __name__ == "__main__":
    asyncio.run(main())
