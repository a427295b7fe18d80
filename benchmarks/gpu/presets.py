"""What the plan says of every shipped preset: its GPUs, their memory, a step, episodes in a GPU-hour, what binds first.

    python benchmarks/gpu/presets.py [KEY=VALUE ...]

A second table has what this assumes of attempts and GPUs, and which part, were it twice as fast or as many, would
shorten a step most. Attempts go on until a limit ends them, and a GPU reaches the share of `gpu.tflops` and
`gpu.bandwidth_gb` that an H100 was seen to reach at the model's size (docs/guides/training.md#where-the-time-goes);
settings given hold for all, say `gpu.utilisation=0.16` or `plan.calls=8.5 plan.call_tokens=145`. No GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from coderepairrl import stages
from coderepairrl.config import Config, load, shipped

HEAD = ("preset", "GPUs", "most on one, GB", "s a step", "episodes in a GPU-hour", "what ends most attempts")
ASSUMED = ("preset", "shortens a step most", "tokens of an attempt", "reached of a GPU")
NONE = {
    "sft-tiny": "no episodes, no GPU",
    "sft-thesis": "no episodes",
    **dict.fromkeys(("hello", "full", "simplified"), "no GPU"),
}
"""Presets without a row, and why."""


def tables(overrides: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """In Markdown, a row for each preset that makes episodes on GPUs."""
    speeds, assumed = [HEAD, ("---",) * len(HEAD)], [ASSUMED, ("---",) * len(ASSUMED)]
    for name in sorted(shipped() - NONE.keys()):
        config = load(name, overrides)
        needs = stages.needs(config)
        speeds.append(_speed(name, config, needs))
        assumed.append(_assumed(name, needs))
    return _markdown(speeds), _markdown(assumed)


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def left_out() -> str:
    """A line about those that have no row."""
    return f"Without a row: {', '.join(f'`{name}` ({why})' for name, why in sorted(NONE.items()))}."


def _assumed(name: str, needs: dict[str, Any]) -> tuple[str, ...]:
    step, assumed = needs["step"], needs["assumed"]
    part, seconds = min(step["if_twice"].items(), key=lambda each: float(each[1].split()[0]))
    return f"`{name}`", f"{part.replace('_', ' ')}: {seconds}", assumed["tokens"], assumed["gpu"]


def _speed(name: str, config: Config, needs: dict[str, Any]) -> tuple[str, ...]:
    gpus = len({*config.engine.devices, *config.train.devices})
    most = max(each["needs_gb"] for key, each in needs.items() if key.startswith("gpu "))
    return (
        f"`{name}`",
        f"{gpus} x {config.gpu.memory_gb:g} GB",
        f"{most:.1f}",
        f"{needs['step']['seconds']:,.0f}",
        f"{needs['run']['episodes_per_gpu_hour']:,}",
        needs["step"]["limit"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    speeds, assumed = tables(parser.parse_args().overrides)
    print(*speeds, "", *assumed, "", left_out(), sep="\n")


if __name__ == "__main__":
    main()
