"""What of a model fits on one GPU of a size, by the plan: the base in 16 bits, in codes for the learner, or for both.

    python benchmarks/gpu/cards.py [--sizes 14B 32B] [--memory 24 48 80] [--tokens 10240]

Adapters of rank 32 in bf16 with checkpointing, episodes of `--tokens`, 16 attempts at once. Of each base, in GB: engine
(without its cache of keys and values) and learner alone, and the smallest number of GPUs of each size: `turns` is one
that both have by turns, `1` one that both share, `1+1` one each, `-` none of these. `--nearest` adds what
`crrl train --dry-run` then proposes. No GPU is needed.
"""

from __future__ import annotations

import argparse

from coderepairrl.assembly.learner import settings
from coderepairrl.assembly.sizing import estimate
from coderepairrl.assembly.sizing.estimate import GB, Estimate
from coderepairrl.assembly.sizing.fit import nearest
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError

BASES = {
    "bf16": ("", "none"),
    "int8": ("", "int8"),
    "nf4": ("", "nf4"),
    "FP8": ("-FP8", "none"),
    "AWQ": ("-AWQ", "none"),
}
"""Endings of the model's name, and `model.quantise`."""
PLACES = {"turns": ("turns", 0), "1": (True, 0), "1+1": (False, 1)}
SHARES = [tenth / 20 for tenth in range(19, 2, -1)]


def planned(size: str, base: str, memory: float, place: str, share: float, tokens: int) -> Estimate | None:
    """A run on GPUs of `memory` GB; None where a setting speaks against it."""
    ending, form = BASES[base]
    shared, learner = PLACES[place]
    train = {"lora": True, "precision": "bf16", "gradient_checkpointing": True, "micro_tokens": tokens}
    options = {"context": tokens, "slots": 16, "args": ["--gpu-memory-utilization", f"{share:g}"], "dtype": "bfloat16"}
    given = Config.model_validate(
        {
            "run": {"name": "cards"},
            "model": {"path": f"Qwen/Qwen3-{size}{ending}", "quantise": form},
            "engine": {"name": "vllm", "devices": [0], "share_devices": shared, "options": options},
            "rollout": {"tokens": tokens},
            "train": train | {"devices": [learner], "old_logprobs": "recomputed"},
            "gpu": {"memory_gb": memory},
        }
    )
    found = estimate(given, settings(given))
    return found if isinstance(found, Estimate) else None


def smallest(size: str, base: str, memory: float, tokens: int) -> str:
    """The place with which it fits, the fewest GPUs first."""
    for place in ("1", "turns", "1+1"):
        if any((found := planned(size, base, memory, place, share, tokens)) and not found.problem for share in SHARES):
            return place
    return "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["14B", "32B"])
    parser.add_argument("--memory", nargs="+", type=float, default=[24, 48, 80])
    parser.add_argument("--tokens", type=int, default=10_240)
    parser.add_argument("--nearest", action="store_true")
    options = parser.parse_args()
    cards = [f"{memory:g} GB" for memory in options.memory]
    head = ["model", "base", "engine", "learner", *cards]
    print(f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
    for size in options.sizes:
        for base in BASES:
            large = planned(size, base, 1000, "1+1", 0.9, options.tokens)
            assert large is not None and large.server is not None
            sizes = [f"{part / GB:.1f}" for part in (large.server.memory.fixed, large.needs(1))]
            fits = [smallest(size, base, memory, options.tokens) for memory in options.memory]
            print(f"| {' | '.join([f'Qwen3-{size}', base, *sizes, *fits])} |")
            for memory, fit in zip(options.memory, fits, strict=True):
                given = planned(size, base, memory, "turns", 0.9, options.tokens) if options.nearest else None
                if given is not None and fit == "-":
                    try:
                        print(
                            f"    {memory:g} GB: {' '.join(nearest(given, settings)) or 'nothing that is tried fits'}"
                        )
                    except ConfigError as error:
                        print(f"    {memory:g} GB: {error}")


if __name__ == "__main__":
    main()
