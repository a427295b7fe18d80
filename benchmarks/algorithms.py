"""Algorithms compared on the tiny policy, in simulated episodes, after the same number of steps.

``python benchmarks/algorithms.py FOLDER`` trains each algorithm from each seed, one after the other, on one thread;
``--table`` prints the results so far. Finished runs are not repeated. Tools are simulated; rewards (half
`patch_lines`, half tests, judged in forked processes) and the learner are real. Every step has four minibatches: with
one, all ratios would be 1 and most of these algorithms the same. DAPO is without its dynamic sampling, so that all arms
see the same number of episodes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from benchmarks.hello_gspo import scores
from coderepairrl.config.schema import Algorithm
from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.engines.tiny.model import TinyModel, Weights
from coderepairrl.learn import RECIPES, LearnSettings, compute_group_advantages
from coderepairrl.learn.trainer import Trainer
from coderepairrl.stats.replicates import mean_of_replicates, replicated_difference
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, load_mutants, make_exercise
from coderepairrl.tokens import load_codec
from coderepairrl.types import Sample
from workshop.tiny.measure import held_out
from workshop.tiny.simulate import Attempt, Simulation

ARMS: tuple[Algorithm, ...] = ("dr_grpo", "gspo", "dapo")
SEEDS = (0, 1, 2)
ENDS = ("before", "after")
MODEL = Path("src/coderepairrl/models/tiny")
TOKENS, TASKS, GROUP, ALPHA = 1024, 8, 8, 0.5


def rows(attempts: Sequence[Attempt], rewards: Sequence[float], settings: LearnSettings, version: int) -> list[Sample]:
    """The training rows of a step's attempts, group after group; groups of equal rewards have none."""
    samples = []
    for at in range(0, len(attempts), GROUP):
        group = zip(attempts[at : at + GROUP], rewards[at : at + GROUP], strict=True)
        values = compute_group_advantages(rewards[at : at + GROUP], settings.baseline).values
        for number, ((attempt, _), advantage) in enumerate(zip(group, values, strict=True)):
            if advantage is not None:
                versions = tuple(version if on else -1 for on in attempt.sampled)
                columns = (tuple(attempt.ids), tuple(attempt.sampled), tuple(attempt.logprobs), versions)
                samples.append(Sample(f"{at}-{number}", *columns, advantage, group=str(at)))
    return samples


def compute_rewards(attempts: Sequence[Attempt]) -> list[float]:
    """Rewards: half `patch_lines`, half whether tests pass."""
    scored = scores(attempts, ("patch_lines",))
    return [ALPHA * each["patch_lines"] + (1 - ALPHA) * each["tests"] for each in scored]


class Run:
    """One algorithm from one seed."""

    def __init__(self, algorithm: Algorithm, seed: int, count: int) -> None:
        constant = TOKENS if RECIPES[algorithm].aggregation == "constant" else None
        settings: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "max_grad_norm": 1.0}
        self.settings = LearnSettings(
            algorithm=algorithm, minibatches=4, micro_tokens=4096, max_completion_tokens=constant, **settings
        )
        self.trainer = Trainer(MODEL, self.settings)
        self.config = ModelConfig.read(MODEL)
        tiny = TinyModel(self.config, slots=64, context=TOKENS)
        self.simulation = Simulation(load_codec(MODEL), tiny, calls=5, turn_tokens=96, tokens=TOKENS)
        self.rng, self.generator = Random(seed), torch.Generator().manual_seed(seed)
        self.pool = [mutant for mutant in load_mutants() if mutant.split == "train"]
        self.held_out = held_out("test", count, quoted=True)

    @property
    def weights(self) -> Weights:
        """The policy's weights in the form that the engine takes."""
        state = self.trainer.policy.model.state_dict()
        return Weights.build(self.config, lambda name: state[name].detach())

    def step(self) -> dict[str, float]:
        """Train on one batch; returns its mean reward and the learner's metrics."""
        chosen: list[Exercise] = []
        while len(chosen) < TASKS:
            if (exercise := make_exercise(self.rng.choice(self.pool), self.rng, True)) is not None:
                chosen.append(exercise)
        attempts = self.simulation.run(self.weights, [e for e in chosen for _ in range(GROUP)], 1.0, self.generator)
        rewards = compute_rewards(attempts)
        samples = rows(attempts, rewards, self.settings, self.trainer.version)
        tokens = sum(sum(attempt.sampled) for attempt in attempts)
        learned = self.trainer.step(samples, len(attempts), tokens) if samples else {}
        clipped = learned.get("clip_low", 0.0) + learned.get("clip_high", 0.0)
        return {"reward": fmean(rewards), "bounded": clipped, "grad_norm": learned.get("grad_norm", 0.0)}

    def evaluate(self) -> list[float]:
        """The reward of one attempt at each held-out task."""
        attempts = self.simulation.run(self.weights, self.held_out, 1.0, torch.Generator().manual_seed(1))
        return compute_rewards(attempts)


def table(folder: Path, arms: Sequence[Algorithm]) -> str:
    """Held-out rewards before and after, and the difference from the first arm: 95 % intervals over seeds and tasks."""
    lines = [f"| algorithm | seeds | before | after | after, less `{arms[0]}` | bounded |", "|---|---|---|---|---|---|"]
    first: dict[str, list[float]] = {}
    for arm in arms:
        runs = {file.stem[-1]: json.loads(file.read_text()) for file in sorted(folder.glob(f"{arm}-[0-9].json"))}
        if not runs:
            continue
        tasks = range(len(next(iter(runs.values()))["before"]))
        cells = [
            str(mean_of_replicates([run[when] for run in runs.values()], tasks, share=True).interval) for when in ENDS
        ]
        after = {seed: run["after"] for seed, run in runs.items()}
        first = first or after
        both = sorted({*first} & {*after})
        pairs = [first[seed] for seed in both], [after[seed] for seed in both]
        less = "" if first is after or not both else str(replicated_difference(*pairs, tasks, share=True).interval)
        bounded = fmean(step["bounded"] for run in runs.values() for step in run["steps"])
        lines.append(f"| `{arm}` | {len(runs)} | {' | '.join(cells)} | {less} | {bounded:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--count", type=int, default=128, help="held-out tasks")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    for seed in () if options.table else options.seeds:
        for arm in options.arms:
            target = options.folder / f"{arm}-{seed}.json"
            if not target.exists():
                run = Run(arm, seed, options.count)
                before = run.evaluate()
                steps = [run.step() for _ in range(options.steps)]
                target.write_text(json.dumps({"before": before, "steps": steps, "after": run.evaluate()}))
    print(table(options.folder, options.arms))


if __name__ == "__main__":
    main()
