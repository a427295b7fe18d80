"""The plan's figures for every shipped preset: GPUs, memory, seconds per step, episodes per GPU-hour, limits.

    python benchmarks/gpu/presets.py [KEY=VALUE ...]

Settings apply to all presets, for example `plan.tokens=5000`; `crrl train NAME --dry-run` prints the assumed speeds. No
GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from coderepairrl.config import Config, load_config, shipped_configs
from coderepairrl.stages.command import compute_needs

HEAD = ("preset", "GPUs", "most on one, GB", "seconds per step", "episodes in a GPU-hour", "what ends an episode")
NONE = {
    "sft-tiny": "no episodes, no GPU",
    "sft-thesis": "no episodes",
    **dict.fromkeys(("hello", "full", "simplified", "qwen2.5-coder-0.5b-cpu"), "no GPU"),
}
"""Presets without a row, and why."""


def table(overrides: Sequence[str] = ()) -> list[str]:
    """Markdown lines: a row for each preset that makes episodes on GPUs."""
    rows: list[Sequence[str]] = [HEAD, ("---",) * len(HEAD)]
    for name in sorted(shipped_configs() - NONE.keys()):
        config = load_config(name, overrides)
        rows.append(_row(name, config, compute_needs(config)))
    return [f"| {' | '.join(row)} |" for row in rows]


def left_out() -> str:
    """A line about the presets that have no row."""
    return f"Without a row: {', '.join(f'`{name}` ({why})' for name, why in sorted(NONE.items()))}."


def _row(name: str, config: Config, needs: dict[str, Any]) -> tuple[str, ...]:
    gpus = len({*config.engine.devices, *config.train.devices})
    most = max(each["needs_gb"] for key, each in needs.items() if key.startswith("gpu "))
    return (
        f"`{name}`",
        f"{gpus} x {config.gpu.memory_gb:g} GB",
        f"{most:.1f}",
        f"{needs['step']['seconds']:,.0f}",
        f"{needs['run']['episodes_per_gpu_hour']:,}",
        needs["step"]["limit"].replace(": an episode gets to ", " at ").replace(" of ", "/"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    print(*table(parser.parse_args().overrides), "", left_out(), sep="\n")


if __name__ == "__main__":
    main()
