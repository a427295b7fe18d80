"""Task orders compared on the tiny policy: the cost until the held-out reward reaches that of uniform epochs.

``python benchmarks/curriculum.py FOLDER`` makes a probe of the training tasks once, then runs each arm with each seed
by ``crrl train``, one at a time; ``--table`` prints the results so far. Repeating the command skips finished runs and
resumes interrupted ones.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.stages.history import read_history
from coderepairrl.stats.intervals import cluster_tasks, mean_interval
from coderepairrl.stats.replicates import mean_of_replicates, replicated_difference
from coderepairrl.types import Ending

TASKS, HELD_OUT, STEPS, EVERY, PROBES = 96, 64, 16, 4, 4
SEEDS = (0, 1, 2)
TRAINED = f"{{split='train', quoted=1, n={TASKS}}}"
COMMON = (
    *(f"run.steps={STEPS}", f"run.checkpoint_every={STEPS}", "run.health.action=warn", "tasks.verify=false"),
    f"tasks.options={TRAINED}",
    *("reward={tests=1}", "eval.reward={tests=1}", "rollout.group_size=4"),
    *(f"eval.options={{split='test', quoted=1, n={HELD_OUT}}}", f"eval.every={EVERY}"),
)
"""Settings of all arms, beside those of `crrl hello`: few tasks, so that they repeat; only tests as reward and small
groups, so that many groups have equal rewards (as shipped, with half of the reward for similarity, one in 25 has)."""


def arms(probe: Path) -> dict[str, tuple[str, ...]]:
    """Settings in which each arm differs."""
    return {
        "uniform": (),
        "easy-first": (f"curriculum.easy_first={{steps={STEPS // 2}}}", f"curriculum.probe={probe}"),
        "band": ("curriculum.band=true", f"curriculum.probe={probe}"),
        "refill": ("curriculum.refill=8",),
    }


class Point(NamedTuple):
    """An evaluation after `step`: the cost of training until then, and the held-out reward by task."""

    step: int
    episodes: int
    tokens: int
    rewards: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Mean reward over all held-out tasks."""
        return fmean(self.rewards.values())


def crrl(*arguments: str) -> None:
    """Run the command to its end. Raises `subprocess.CalledProcessError`."""
    subprocess.run([sys.executable, "-m", "coderepairrl.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


def make_probe(folder: Path) -> Path:
    """Evaluate the initial policy: `PROBES` attempts at each training task; returns the run's folder."""
    target = RunFolder(folder / "probe")
    if not is_finished(target):
        resume = ["--resume"] if target.log.exists() else []
        how = ("--attempts", str(PROBES), "--output", str(target.path))
        crrl("eval", "hello", f"eval.options={TRAINED}", "eval.split=train", *how, *resume)
    return target.path


def is_finished(run: RunFolder) -> bool:
    """Whether the run has ended."""
    return run.log.exists() and any(record["type"] == "end" for record in run.records())


def measure(folder: Path) -> None:
    """Run what is missing, seed by seed, so that all arms have the same seeds."""
    others = arms(make_probe(folder))
    for seed in SEEDS:
        for name, settings in others.items():
            run = RunFolder(folder / f"{name}-{seed}")
            if not is_finished(run):
                resume = ["--resume"] if run.log.exists() else []
                where = (f"run.name={run.path.name}", f"run.dir={folder}", f"run.seed={seed}")
                crrl("train", "hello", *where, *COMMON, *settings, *resume)


def points(run: RunFolder) -> list[Point]:
    """The evaluations of a run, first to last."""
    history = read_history(run)
    held_out: dict[int, dict[str, list[float]]] = {}
    for episode in logged_episodes(run.records(), lambda name: name.startswith("eval-")):
        if episode.ending is not Ending.VOID:
            held_out.setdefault(episode.step, {}).setdefault(episode.task_id, []).append(episode.reward)
    evaluations = []
    for name, step in history.evaluations:
        steps = history.steps[:step]
        episodes = sum(record["metrics"]["episodes"] for record in steps)
        tokens = sum(record["account"]["sampled"] for record in steps)
        rewards = {task: fmean(values) for task, values in held_out[step].items()}
        if name == "eval":
            evaluations.append(Point(step, episodes, tokens, rewards))
    return evaluations


def cost(curve: Sequence[Point], target: float) -> tuple[float, float]:
    """Episodes and tokens until `curve` first reaches `target`, interpolated between evaluations; infinite if never."""
    if curve[0].mean >= target:
        return curve[0].episodes, curve[0].tokens
    for early, late in pairwise(curve):
        if late.mean >= target:
            part = (target - early.mean) / (late.mean - early.mean)
            episodes, tokens = late.episodes - early.episodes, late.tokens - early.tokens
            return early.episodes + part * episodes, early.tokens + part * tokens
    return math.inf, math.inf


def table(folder: Path) -> Iterator[str]:
    """The results so far, as Markdown. Arms are compared on the seeds that both have."""
    names = arms(folder / "probe").keys()
    runs = {(name, seed): RunFolder(folder / f"{name}-{seed}") for name in names for seed in SEEDS}
    curves = {key: points(run) for key, run in runs.items() if is_finished(run)}
    yield (
        "| arm | seeds | episodes | sampled tokens | informative groups | held-out reward at the end | minus uniform |"
        " episodes, as a part of uniform's, to uniform's last reward | tokens, likewise |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in names:
        seeds = [seed for seed in SEEDS if (name, seed) in curves and ("uniform", seed) in curves]
        if not seeds:
            continue
        arm_curves, uniform_curves = ([curves[arm, seed] for seed in seeds] for arm in (name, "uniform"))
        steps = [record["metrics"] for seed in seeds for record in read_history(runs[name, seed]).steps]
        last_rewards = [[curve[-1].rewards for curve in arm] for arm in (arm_curves, uniform_curves)]
        tasks = sorted(set.intersection(*(set(rewards) for arm in last_rewards for rewards in arm)))
        arm_rewards, uniform_rewards = ([[rewards[task] for task in tasks] for rewards in arm] for arm in last_rewards)
        clusters = list(cluster_tasks(dict.fromkeys(tasks, "")).values())
        pairs = zip(arm_curves, uniform_curves, strict=True)
        costs = [(cost(curve, uniform[-1].mean), uniform[-1]) for curve, uniform in pairs]
        cells = (
            str(len(seeds)),
            f"{fmean(curve[-1].episodes for curve in arm_curves):,.0f}",
            f"{fmean(curve[-1].tokens for curve in arm_curves):,.0f}",
            f"{fmean(metrics['informative'] for metrics in steps):.2f}",
            str(mean_of_replicates(arm_rewards, clusters, share=True).interval),
            ""
            if name == "uniform"
            else str(replicated_difference(uniform_rewards, arm_rewards, clusters, share=True).interval),
            _mean([episodes / end.episodes for (episodes, _), end in costs]),
            _mean([tokens / end.tokens for (_, tokens), end in costs]),
        )
        yield f"| {name} | {' | '.join(cells)} |"
    yield f"\n| arm | seed | held-out reward after {', '.join(map(str, range(0, STEPS + 1, EVERY)))} steps | episodes |"
    yield "|---|---|---|---|"
    for (name, seed), curve in curves.items():
        rewards = ", ".join(f"{point.mean:.3f}" for point in curve)
        yield f"| {name} | {seed} | {rewards} | {', '.join(str(point.episodes) for point in curve)} |"


def _mean(values: Sequence[float]) -> str:
    """Mean over seeds with its Student t interval; infinite values are counted apart."""
    finite = [value for value in values if math.isfinite(value)]
    mean = str(mean_interval(finite, range(len(finite)), share=False, least=0.0)) if finite else ""
    never = f"{len(values) - len(finite)} of {len(values)} never" if len(finite) < len(values) else ""
    return "; ".join(filter(None, (mean, never)))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", action="store_true", help="run nothing, and print what is there")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.table:
        measure(options.folder)
    print("\n".join(table(options.folder)))


if __name__ == "__main__":
    main()
