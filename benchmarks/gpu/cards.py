"""The smallest number of GPUs for a model by GPU size, as the plan estimates it: the base in bf16 or in nf4.

    python benchmarks/gpu/cards.py [--sizes 14B 32B] [--memory 24 48 80] [--tokens 10240] [--each]

Adapters of rank 32 in bf16 with checkpointing, episodes of `--tokens`, 16 attempts at once. Each row has a base, the GB
of engine (without its KV cache) and learner alone, and the smallest number of GPUs of each size: `1` is one GPU that
both share, `turns` one that they use in turns, `2+4` two that serve (tensor parallel) and four that learn (`fsdp2`,
which cannot shard quantised weights), `-` none of these. `--each` has a row for each GPU size instead: the GB of engine
and learner there, how many episodes of full length the cache holds, and which side does not fit on one GPU. `--nearest`
adds what `crrl train --dry-run` proposes where nothing fits. No GPU is needed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

from coderepairrl.config import Config
from coderepairrl.errors import ConfigError
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.plan.sizing import find_nearest_fit
from coderepairrl.plan.sizing.estimate import GB, Estimate, estimate_memory
from coderepairrl.plan.sizing.learner import RESERVE

BASES = {"bf16": "none", "nf4": "nf4"}
"""`model.quantise` by the format of the frozen weights."""
TOGETHER = {"1": True, "turns": "turns"}
"""`engine.share_devices` by placement; other placements, `SERVING+LEARNING`, do not share."""
MANY = (1, 2, 4, 8)
SHARES = [tenth / 20 for tenth in range(19, 2, -1)]


def planned(size: str, base: str, memory: float, place: str, share: float, tokens: int) -> Estimate | None:
    """Estimate a run on GPUs of `memory` GB; None where its settings are invalid."""
    shared = TOGETHER.get(place, False)
    serving, learning = (1, 1) if shared else map(int, place.split("+"))
    train = {"lora": True, "precision": "bf16", "gradient_checkpointing": True, "micro_tokens": tokens}
    train |= {"processes": learning, "strategy": "fsdp2" if learning > 1 else "ddp"}
    args = ["--gpu-memory-utilization", f"{share:g}", "--tensor-parallel-size", f"{serving}"]
    options = {"context": tokens, "slots": 16, "args": args, "dtype": "bfloat16"}
    first = 0 if shared else serving
    config = Config.model_validate(
        {
            "run": {"name": "cards"},
            "model": {"path": f"Qwen/Qwen3-{size}", "quantise": BASES[base]},
            "engine": {"name": "vllm", "devices": [*range(serving)], "share_devices": shared, "options": options},
            "rollout": {"tokens": tokens},
            "train": train | {"devices": [*range(first, first + learning)], "old_logprobs": "recomputed"},
            "gpu": {"memory_gb": memory},
        }
    )
    estimate = estimate_memory(config, make_learn_settings(config))
    return estimate if isinstance(estimate, Estimate) else None


def places(base: str) -> list[str]:
    """The placements to try, those with the fewest GPUs first."""
    pairs = ((serving, learning) for serving in MANY for learning in (MANY if base == "bf16" else (1,)))
    return [
        *TOGETHER,
        *(f"{serving}+{learning}" for serving, learning in sorted(pairs, key=lambda pair: (sum(pair), pair))),
    ]


@functools.cache
def smallest(size: str, base: str, memory: float, tokens: int) -> tuple[str, Estimate | None]:
    """The first placement that fits, and its estimate with the largest memory share for the engine."""
    for place in places(base):
        for share in SHARES:
            estimate = planned(size, base, memory, place, share, tokens)
            if estimate and not estimate.problem:
                return place, estimate
    return "-", None


def too_large(size: str, base: str, memory: float, tokens: int) -> str:
    """The sides (engine, learner) that do not fit on one GPU even alone."""
    alone = planned(size, base, memory, "1+1", SHARES[0], tokens)
    assert alone is not None and alone.server is not None
    sides = {
        "engine": (alone.server.kv_tokens or 0) < tokens,
        "learner": alone.learner.peak + RESERVE > memory * GB,
    }
    return ", ".join(side for side, over in sides.items() if over)


def each(size: str, base: str, memory: float, tokens: int) -> Iterator[str]:
    """Cells of a row for one size of GPU."""
    place, estimate = smallest(size, base, memory, tokens)
    yield from (f"Qwen3-{size}", base, f"{memory:g} GB", place)
    if estimate is None or estimate.server is None:
        yield from ("", "", "")
    else:
        yield f"{estimate.server.memory.fixed / GB:.1f}"
        yield f"{(estimate.learner.peak + RESERVE) / GB:.1f}"
        yield f"{estimate.as_json()['longest_sequences_at_once']}"
    yield too_large(size, base, memory, tokens) or ("" if place == "1" else "both at once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["14B", "32B"])
    parser.add_argument("--memory", nargs="+", type=float, default=[24, 48, 80])
    parser.add_argument("--tokens", type=int, default=10_240)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--nearest", action="store_true")
    options = parser.parse_args()
    if options.each:
        head = ["model", "base", "GPU", "GPUs", "engine", "learner", "episodes at once", "too large for one"]
        print(f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
        for size in options.sizes:
            for base in BASES:
                for memory in options.memory:
                    print(f"| {' | '.join(each(size, base, memory, options.tokens))} |")
        return
    cards = [f"{memory:g} GB" for memory in options.memory]
    head = ["model", "base", "engine", "learner", *cards]
    print(f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
    for size in options.sizes:
        for base in BASES:
            large = planned(size, base, 1000, "1+1", 0.9, options.tokens)
            assert large is not None and large.server is not None
            sizes = [f"{part / GB:.1f}" for part in (large.server.memory.fixed, large.needs(1))]
            fits = [smallest(size, base, memory, options.tokens)[0] for memory in options.memory]
            print(f"| {' | '.join([f'Qwen3-{size}', base, *sizes, *fits])} |")
            for memory, fit in zip(options.memory, fits, strict=True):
                estimate = planned(size, base, memory, "turns", 0.9, options.tokens) if options.nearest else None
                if estimate is not None and fit == "-":
                    try:
                        nearest = " ".join(find_nearest_fit(estimate))
                        print(f"    {memory:g} GB: {nearest or 'nothing tried fits'}")
                    except ConfigError as error:
                        print(f"    {memory:g} GB: {error}")


if __name__ == "__main__":
    main()
