"""Tokens per second of the tiny engine beside transformers' ``model.generate``, in one run.

    python benchmarks/engine.py [--repeat 5] [--json]

The same random Qwen3 of about a million parameters on the same distinct prompts, greedy, one torch thread each.
`generate` runs in this process, the engine in its child, frames and event loop included; repetitions alternate, so
that a busy machine slows both. Every repetition draws new prompts: nothing is served from a prefix.
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
from typing import Any

from coderepairrl.engines.tiny import Tiny, TinyEngine
from coderepairrl.types import Sampling

PROMPT, NEW = 250, 60


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


def of_generate(model: Any, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    import torch

    # prompts of one length: left padding would only add masked tokens to generate's work
    ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - started
    return len(prompts) * NEW / seconds, [row[PROMPT:].tolist() for row in out]


async def of_engine(engine: TinyEngine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    async def one(prompt: list[int]) -> list[int]:
        sampling = Sampling(temperature=0.0, max_tokens=NEW)
        return [token async for chunk in engine.generate(prompt, sampling, 0) for token in chunk.ids]

    started = time.perf_counter()
    out = await asyncio.gather(*map(one, prompts))
    return len(prompts) * NEW / (time.perf_counter() - started), list(out)


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
                rates: dict[str, list[float]] = {"engine": [], "generate": []}
                same = 0
                for repetition in range(options.repeat + 1):
                    prompts = [[rng.randrange(267) for _ in range(PROMPT)] for _ in range(sequences)]
                    ours, mine = await of_engine(engine, prompts)
                    theirs, yours = of_generate(model, prompts)
                    if repetition:  # the first one warms both up
                        rates["engine"].append(ours)
                        rates["generate"].append(theirs)
                        same += sum(a == b for a, b in zip(mine, yours, strict=True))
                engine_rate, generate_rate = (statistics.median(rates[side]) for side in ("engine", "generate"))
                ratios = [a / b for a, b in zip(rates["engine"], rates["generate"], strict=True)]
                results.append(
                    {
                        "sequences": sequences,
                        "engine_tokens_per_s": round(engine_rate),
                        "generate_tokens_per_s": round(generate_rate),
                        "ratio": round(statistics.median(ratios), 2),
                        "ratio_min": round(min(ratios), 2),
                        "ratio_max": round(max(ratios), 2),
                        "equal_outputs": round(same / (options.repeat * sequences), 3),
                    }
                )
        finally:
            await engine.close()
    if options.json:
        print(json.dumps(results))
        return
    print(f"{PROMPT}-token prompts, {NEW} new tokens, medians of {options.repeat} interleaved repetitions")
    for row in results:
        print(
            f"{row['sequences']:>3} sequences: engine {row['engine_tokens_per_s']:>6} tokens/s, "
            f"generate {row['generate_tokens_per_s']:>6} tokens/s, ratio {row['ratio']:.2f} "
            f"({row['ratio_min']:.2f}-{row['ratio_max']:.2f}), outputs equal {row['equal_outputs']:.1%}"
        )


if __name__ == "__main__":
    asyncio.run(main())
