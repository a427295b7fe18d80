"""What the plan says of every shipped preset: its GPUs, their memory, a step, episodes in a GPU-hour, what binds first.

    python benchmarks/gpu/presets.py [KEY=VALUE ...]

Attempts go on until a limit ends them, and a GPU reaches the share of `gpu.tflops` and `gpu.bandwidth_gb` that an H100
was seen to reach at the model's size (docs/guides/training.md#where-the-time-goes); settings given hold for all, say
`gpu.utilisation=0.16` or `plan.calls=8.5 plan.call_tokens=145`. No GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from coderepairrl import stages
from coderepairrl.config import Config, load, shipped

HEAD = ("preset", "GPUs", "most on one, GB", "s a step", "episodes in a GPU-hour", "what ends most attempts")


def table(overrides: Sequence[str] = ()) -> list[str]:
    """In Markdown, a row for each preset that takes GPUs."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for name in sorted(shipped()):
        config = load(name) if name.startswith("sft-") else load(name, overrides)
        if not name.startswith("sft-") and config.engine.devices:
            rows.append(_row(name, config))
    return [f"| {' | '.join(row)} |" for row in rows]


def _row(name: str, config: Config) -> tuple[str, ...]:
    needs: dict[str, Any] = stages.needs(config)
    gpus = len({*config.engine.devices, *config.train.devices})
    most = max(each["needs_gb"] for key, each in needs.items() if key.startswith("gpu "))
    step, limit = needs["step"], needs["step"]["limit"]
    speed = needs["run"]["episodes_per_gpu_hour"]
    return (
        f"`{name}`",
        f"{gpus} x {config.gpu.memory_gb:g} GB",
        f"{most:.1f}",
        f"{step['seconds']:,.0f}",
        f"{speed:,}",
        limit,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    print("\n".join(table(parser.parse_args().overrides)))


if __name__ == "__main__":
    main()
