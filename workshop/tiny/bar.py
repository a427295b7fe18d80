"""``make hello-bar``: the improvement that `crrl hello` must show over several seeds, beside a control run.

Each seed is a run of the shipped config with two more evaluations: greedy, and on functions that occur in no training
task and no demonstration. The control continues supervised training instead, for about the same CPU time. Finished
runs are not repeated, so the command can be interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.errors import exit_on_error
from coderepairrl.plan.imitation import resolve_imitation
from coderepairrl.runs import open_run
from coderepairrl.runs.examples import write_examples
from coderepairrl.stages import command, life_cycle
from coderepairrl.stages.sft import run_sft
from coderepairrl.stats.intervals import Interval, cluster_episodes, get_quote_slice
from coderepairrl.stats.measures import pair_measures
from coderepairrl.types import Episode
from workshop.tiny.warmstart import examples

FULL: Sequence[str] = ('eval.also={greedy={temperature=0}, unseen={split="unseen", options={split="unseen", n=128}}}',)
SHORT: Sequence[str] = (
    *("run.steps=12", 'tasks.options={split="train", quoted=1}'),
    'eval.options={split="test", n=128, quoted=1}',
)
CONTROL: Sequence[str] = (
    *("data.held_out=0", "data.batch=8", "data.epochs=1"),
    *("train.lr=1e-3", "train.warmup_ratio=0.05"),
)
"""Settings of the control: those of the last stage of `hello.toml`, for about the CPU time of 60 steps of reinforcement
learning."""
BAR = {"patch_lines": 0.20, "tests": 0.20}
"""Least pooled gain of the sampled policy on held-out tasks."""
UNQUOTED, GREEDY = 0.10, 0.05
"""Least pooled gain of tests passing: sampled where no line is quoted, and greedy on all."""
TASKS, FUNCTIONS = 256, 15
SHOWN = ("patch_edits", "patch_lines", "tests", "tests_per_patch", "empty_patches", "tool_success", "limit")

Episodes = tuple[list[Episode], list[Episode]]
"""Episodes of an evaluation, before and after training."""


@dataclass(frozen=True, slots=True)
class BarCheck:
    """One demand, whether it is met, and the measured value."""

    demand: str
    met: bool
    found: str


def main() -> None:
    """Run what is missing, print the tables, exit with 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--short", action="store_true", help="a few steps, quoted issues only: has anything been learned?"
    )
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, for every run")
    options = parser.parse_args()
    name, settings = ("hello-short", SHORT) if options.short else ("hello-bar", FULL)
    overrides = [*settings, *options.overrides]
    runs = {seed: finish_run([f"run.name={name}-{seed}", f"run.seed={seed}", *overrides]) for seed in options.seeds}
    control = None if options.short else control_run(options.seeds[0], overrides)
    evaluated = {f"seed {seed}": evaluations(path, path) for seed, path in runs.items()}
    if len(runs) > 1:
        evaluated["pooled"] = pooled(list(evaluated.values()))
    if control is not None:
        evaluated["more supervised training instead"] = evaluations(runs[options.seeds[0]], control)
    checks = judge_short(evaluated) if options.short else judge(evaluated)
    print(table(evaluated), "", *(f"{'met   ' if v.met else 'MISSED'} {v.demand}: {v.found}" for v in checks), sep="\n")
    if options.json:
        print(json.dumps(as_json(evaluated, checks)))
    sys.exit(not all(check.met for check in checks))


def control_run(seed: int, overrides: Sequence[str]) -> Path:
    """Evaluate the shipped policy after more supervised training; returns the run's folder."""
    config = configs.load_config("hello", overrides)
    model = train_on_more_demonstrations(models.find_model_folder(config.model.path), Path(config.run.dir))
    also = ["run.steps=0", "eval.after=false", f"model.path={model}", "tasks.learned=train"]
    return finish_run([f"run.name=hello-bar-control-{seed}", f"run.seed={seed}", *overrides, *also])


def train_on_more_demonstrations(model: Path, runs: Path) -> Path:
    """Fine-tune `model` on more examples of the last lesson, unless done; returns the run's folder in `runs`."""
    learned = runs / "hello-bar-control.parquet"
    if not learned.exists():
        runs.mkdir(parents=True, exist_ok=True)
        write_examples(learned, examples("control", model))
    where = [f"model.path={model}", f"data.paths={learned}", f"run.dir={runs}", "run.name=hello-bar-control-model"]
    config = life_cycle.pin_models(configs.load_config("sft-tiny", [*CONTROL, *where]))
    folder = life_cycle.locate_run_folder(config)
    if not has_ended(folder.path):
        asyncio.run(run_sft(resolve_imitation(config), folder, resume=(folder.path / "run.json").exists()))
    return folder.path


def has_ended(run: Path) -> bool:
    """Whether the last process of the run in `run` finished."""
    kinds = [record["type"] for record in open_run(run).records()] if (run / "log.jsonl").exists() else []
    return [kind for kind in kinds if kind != "used"][-1:] == ["end"]


def finish_run(overrides: Sequence[str]) -> Path:
    """Start or resume the run with these settings unless it has ended; returns its folder."""
    config = configs.load_config("hello", overrides)
    path = Path(config.run.dir) / config.run.name
    if not (path / "run.json").exists():
        asyncio.run(command.run_training(config))
        return path
    config = configs.load_config(path, overrides)
    if config != configs.load_config(path) or not has_ended(path):
        asyncio.run(command.run_training(config, resume=True))
    return path


def evaluations(first: Path, second: Path) -> dict[str, Episodes]:
    """Episodes of every evaluation, also by quoting of issues: the first of the run `first`, the last of `second`."""
    config = configs.load_config(second)
    episodes_by_name: dict[str, Episodes] = {}
    for name in config.eval.each:
        before = list(open_run(first).episodes(f"{name}-00000"))
        after = list(open_run(second).episodes(f"{name}-{config.run.steps:05d}"))
        title = {"eval": "sampled"}.get(name, name)
        episodes_by_name[title] = before, after
        for kind in sorted({get_quote_slice(episode.task_id) for episode in before} - {""}):
            early, late = ([e for e in side if get_quote_slice(e.task_id) == kind] for side in (before, after))
            episodes_by_name[f"{title}, {kind}"] = early, late
    return episodes_by_name


def pooled(seeds: Sequence[Mapping[str, Episodes]]) -> dict[str, Episodes]:
    """Pool the seeds: a task's mean is over its attempts in all of them."""
    return {
        name: ([e for seed in seeds for e in seed[name][0]], [e for seed in seeds for e in seed[name][1]])
        for name in seeds[0]
    }


def _pool(by_run: Mapping[str, Mapping[str, Episodes]]) -> Mapping[str, Episodes]:
    return by_run.get("pooled") or next(iter(by_run.values()))


def _changes(episodes: Episodes) -> dict[str, Interval]:
    return {name: pairs.change for name, pairs in pair_measures(*episodes).items()}


def judge(by_run: Mapping[str, Mapping[str, Episodes]]) -> list[BarCheck]:
    """Check all demands. A single seed counts as the pool."""
    pool = _pool(by_run)
    tasks = {episode.task_id for episode in pool["sampled"][0]}
    functions = set(cluster_episodes(pool["sampled"][0]).values())
    size = f"{len(tasks)} tasks over {len(functions)} functions"
    checks = [BarCheck("held-out tasks", len(tasks) >= TASKS and len(functions) >= FUNCTIONS, size)]
    change = _changes(pool["sampled"])
    for name, least in BAR.items():
        checks.append(BarCheck(f"pooled {name} +{least:.2f}", change[name].value >= least, str(change[name])))
    for seed, evaluated in by_run.items():
        if seed.startswith("seed"):
            seed_changes = _changes(evaluated["sampled"])
            for name in BAR:
                checks.append(
                    BarCheck(f"{seed}: {name} above zero", seed_changes[name].is_all_above(0), str(seed_changes[name]))
                )
    rises = change["tests_per_patch"]
    checks.append(BarCheck("pooled tests per non-empty patch above zero", rises.is_all_above(0), str(rises)))
    unquoted, greedy = (_changes(pool[name])["tests"] for name in ("sampled, unquoted issues", "greedy"))
    return [
        *checks,
        BarCheck(f"pooled tests of unquoted issues +{UNQUOTED:.2f}", unquoted.value >= UNQUOTED, str(unquoted)),
        BarCheck(f"pooled tests, greedy, +{GREEDY:.2f}", greedy.value >= GREEDY, str(greedy)),
        BarCheck("pooled tests, greedy, above zero", greedy.is_all_above(0), str(greedy)),
    ]


def judge_short(by_run: Mapping[str, Mapping[str, Episodes]]) -> list[BarCheck]:
    """Whether a few steps of all seeds together have improved the policy on held-out tasks at all.

    Tests either pass or not, so that their interval after 12 steps is wide: only its mean must be above zero.
    """
    change = _changes(_pool(by_run)["sampled"])
    lines, tests = (change[name] for name in BAR)
    return [
        BarCheck("pooled patch_lines above zero", lines.is_all_above(0), str(lines)),
        BarCheck("pooled tests rise", tests.value > 0, str(tests)),
    ]


def table(by_run: Mapping[str, Mapping[str, Episodes]]) -> str:
    """Markdown: a row per run, evaluation and measure."""
    lines = ["| run | evaluation | measure | tasks | before | after | change [95 %] |", "|---|---|---|---|---|---|---|"]
    for run, evaluated in by_run.items():
        for evaluation, episodes in evaluated.items():
            for measure, pairs in pair_measures(*episodes).items():
                if measure in SHOWN:
                    means = (f"{side.value:.3f}" for side in (pairs.early, pairs.late))
                    cells = [run, evaluation, measure, str(pairs.tasks), *means]
                    cells.append(pairs.change.text("+.3f"))
                    lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_json(by_run: Mapping[str, Mapping[str, Episodes]], checks: Sequence[BarCheck]) -> dict[str, Any]:
    """Changes by run, evaluation and measure, and the checks."""
    return {
        "changes": {
            run: {
                evaluation: {measure: value._asdict() for measure, value in _changes(episodes).items()}
                for evaluation, episodes in evaluated.items()
            }
            for run, evaluated in by_run.items()
        },
        "checks": [{"demand": v.demand, "met": v.met, "found": v.found} for v in checks],
        "met": all(check.met for check in checks),
    }


if __name__ == "__main__":
    with exit_on_error():
        main()
