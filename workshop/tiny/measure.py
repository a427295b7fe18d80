"""``python -m workshop.tiny.measure FOLDER``: exact repairs in simulated episodes on held-out tasks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from coderepairrl.tasks.mutants.corpus_tasks import Exercise, load_mutants, make_exercise
from coderepairrl.tokens import Codec, load_codec

if TYPE_CHECKING:
    from torch import Tensor

LIMITS = {"calls": 5, "turn_tokens": 96, "tokens": 1024}


def held_out(split: str, count: int, *, quoted: bool, seed: int = 0) -> list[Exercise]:
    """The first `count` exercises of a split, in an order given by `seed`."""
    rng = Random(f"{split}/{seed}")
    pool = [mutant for mutant in load_mutants() if mutant.split == split]
    rng.shuffle(pool)
    exercises = (make_exercise(mutant, Random(f"{mutant.key}/{seed}"), quoted) for mutant in pool)
    return [e for e in exercises if e is not None][:count]


def measure(
    codec: Codec, folder: Path, tensors: dict[str, Tensor], exercises: Sequence[Exercise], temperature: float
) -> dict[str, float]:
    """Rates of exact repairs, empty patches and limits over simulated episodes, and median tokens."""
    import torch

    from coderepairrl.engines.tiny.config import ModelConfig
    from coderepairrl.engines.tiny.model import TinyModel, Weights
    from workshop.tiny.simulate import Simulation

    config = ModelConfig.read(folder)
    weights = Weights.build(config, lambda name: tensors[name].detach())
    simulation = Simulation(codec, TinyModel(config, slots=32, context=LIMITS["tokens"]), **LIMITS)
    attempts = simulation.run(weights, exercises, temperature, torch.Generator().manual_seed(0))
    count = len(attempts)
    lengths = sorted(len(attempt.ids) for attempt in attempts)
    return {
        "exact": round(sum(a.exact for a in attempts) / count, 4),
        "empty": round(sum(a.empty for a in attempts) / count, 4),
        "limit": round(sum(a.ended != "submitted" for a in attempts) / count, 4),
        "tokens": lengths[count // 2],
    }


def measure_all(folder: Path) -> None:
    """Print `measure` of the policy in `folder` by split and quoting, sampled and greedy."""
    from safetensors.torch import load_file

    codec, tensors = load_codec(folder), load_file(folder / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    for split, quoted in (("test", True), ("test", False), ("unseen", True), ("unseen", False)):
        exercises = held_out(split, 400, quoted=quoted)
        for temperature in (1.0, 0.0):
            row = {"split": split, "quoted": quoted, "temperature": temperature, "tasks": len(exercises)}
            print(json.dumps(row | measure(codec, folder, tensors, exercises, temperature)), flush=True)


def main() -> None:
    """Measure, on one thread."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model folder, or a checkpoint of a run")
    torch.set_num_threads(1)
    measure_all(parser.parse_args().folder)


if __name__ == "__main__":
    main()
