"""``crrl hello``: evaluation, reinforcement learning, evaluation again, and the changes with intervals."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from coderepairrl import config as configs
from coderepairrl.config import Config
from coderepairrl.errors import UsageError, replace_crrl
from coderepairrl.printable import format_count, printable
from coderepairrl.processes.meter import sum_usage
from coderepairrl.registry import suggest_run
from coderepairrl.report.analysis import MeasureChanges, compare_slices
from coderepairrl.runs import RunFolder, Tail, logged_episodes, open_run
from coderepairrl.stages import command, life_cycle
from coderepairrl.stages.results import format_next_commands
from coderepairrl.stages.trace import cut_text, format_call, indent_value
from coderepairrl.stats.intervals import QUOTES, Interval
from coderepairrl.types import Ending, Episode

MEASURES = {
    "reward": "reward",
    "patch_edits": "patch_edits",
    "patch_lines": "patch_lines",
    "tests_passing": "tests",
    "tests_passing_per_patch": "tests_per_patch",
    "empty_patches": "empty_patches",
    "tool_success": "tool_success",
}
"""Measures of `report.analysis` by reported name."""


def load_hello_settings(words: Sequence[str] = (), *, resume: bool = False) -> tuple[Config, RunFolder]:
    """Settings and folder of ``crrl hello WORDS``, under a free name (``hello-2``) unless one is given.

    With `resume`, the run is that of the first word, else of ``run.name``, else ``hello``. Raises `UsageError` for a
    missing or unexpected run folder, and as `load_config`.
    """
    if words and "=" not in words[0]:
        if not resume:
            raise UsageError(
                f"{words[0]!r} is not KEY=VALUE",
                fix=f"crrl hello --resume {shlex.quote(words[0])}, to continue a run, or settings, such as run.steps=2",
            )
        if not RunFolder(Path(words[0])).config.is_file():
            suggestion = suggest_run(Path(words[0])) or f"crrl hello run.name={Path(words[0]).name} begins one"
            raise UsageError(f"there is no run {words[0]}", fix=suggestion)
        config = configs.load_config(words[0], words[1:])
        return config, life_cycle.find_resumed_folder(words[0], config)
    config = configs.load_config("hello", words)
    folder = life_cycle.locate_run_folder(config)
    if resume:  # with the run's own settings, as `crrl train FOLDER --resume`
        return (configs.load_config(folder.path, words) if folder.config.is_file() else config), folder
    if any(override.startswith("run.name=") for override in words):
        return config, folder
    name = life_cycle.find_free_folder(folder.path).name
    if name != config.run.name:
        print(
            replace_crrl(f"new run {name}; crrl hello --resume {shlex.quote(str(folder.path))} continues the old one"),
            file=sys.stderr,
        )
    config = configs.load_config("hello", [*words, f"run.name={name}"])
    return config, life_cycle.locate_run_folder(config)


def run_hello(words: Sequence[str] = (), *, resume: bool = False, as_json: bool = False) -> str:
    """Run `crrl hello WORDS`; return the text to print. Raises as `load_hello_settings` and `command.run_training`."""
    config, folder = load_hello_settings(words, resume=resume)
    describe_episode = FirstEpisodes()
    if resume and folder.log.is_file():
        for episode in logged_episodes(folder.records()):
            describe_episode(episode)  # not shown again: the stopped process has shown it
    asyncio.run(
        command.run_training(
            config, resume=resume, folder=folder, show=describe_episode, resume_command="crrl hello --resume {run}"
        )
    )
    report = compare_first_and_last(folder, config)
    if as_json:
        return json.dumps(report)
    return format_training(report, {"crrl config qwen3-0.6b": "the settings that train a real model on one GPU"})


def format_training(report: Mapping[str, Any], next_commands: Mapping[str, str]) -> str:
    """Format a finished training: rewards, table, the result in a sentence, and what to do next."""
    parts = (
        draw_reward_bars(open_run(Path(report["run"]))),
        format_hello(report),
        "",
        format_headline(report),
        *list_next_commands(report["run"], next_commands),
    )
    return "\n".join(parts)


def compare_first_and_last(folder: RunFolder, config: Config) -> dict[str, Any]:
    """Compare evaluations before the first and after the last step, paired by task, clustered by function.

    Slices of ``eval``, and further evaluations, are nested below their names. Adds counts, seed and seconds.
    """
    report: dict[str, Any] = {}
    evaluated: list[Episode] = []
    for name in config.eval.each:
        before, after = (list(folder.episodes(f"{name}-{step:05d}")) for step in (0, config.run.steps))
        if not before or not after:  # switched off, or without tasks on this machine, as the run reported
            continue
        evaluated += before + after
        whole, *slices = compare_slices(before, after)
        changes: dict[str, Any] = _list_changes(whole)
        # of the slices, only issues that quote the broken line, and those that do not
        changes |= {
            each.slice.replace(" ", "_"): _list_changes(each) for each in slices if each.slice in QUOTES.values()
        }
        report |= changes if name == "eval" else {name: changes}
    trained = tokens = 0
    for episode in folder.episodes("train-*"):  # one at a time: a long run's turns do not fit in memory
        trained += 1
        tokens += episode.sampled
    report |= {
        "tasks": len({episode.task_id for episode in evaluated if episode.phase == "eval"}),
        "episodes": trained + len(evaluated),
        "tokens": tokens + sum(episode.sampled for episode in evaluated),
        "run": str(folder.path),
        "seed": config.run.seed,
    }
    if used := sum_usage(record for record, _ in Tail(folder.log).records("start", "used")):
        report |= {"wall_s": round(used.seconds, 1), "cpu_s": round(used.cpu_seconds, 1)}
    return report


def _list_changes(comparison: MeasureChanges) -> dict[str, dict[str, Any]]:
    """Means over tasks that have the measure on both sides, and their differences."""
    shown = {name: comparison.changes[measure] for name, measure in MEASURES.items() if measure in comparison.changes}
    return {
        name: {
            "before": pairs.early.value,
            "after": pairs.late.value,
            "delta": pairs.change.value,
            "ci95": [pairs.change.low, pairs.change.high],
        }
        for name, pairs in shown.items()
    }


def format_hello(report: Mapping[str, Any]) -> str:
    """Format the report as a table."""
    lines = [f"{'':<26}{'before':>8}{'after':>8}   change, with its 95 % interval", *_format_tables("", report)]
    if "tests_passing_per_patch" in report:
        lines += ["", "per patch: on the tasks with a patch both before and after"]
    lines += [
        "",
        f"{format_count(report['tasks'], 'held-out task')}, {format_count(report['episodes'], 'episode')}, "
        f"{format_count(report['tokens'], 'sampled token')}, "
        + (f"{report['wall_s']:.0f} s ({report['cpu_s']:.0f} CPU-s), " if "wall_s" in report else "")
        + f"seed {report['seed']}",
        f"run folder: {report['run']}",
    ]
    return "\n".join(lines)


_MAX_BARS = 10
_BAR_COLUMNS = 40  # length of a bar for a reward of 1


def draw_reward_bars(run: RunFolder) -> str:
    """Draw mean rewards of training episodes as bars; empty without steps."""
    rewards = [(line["step"], line["reward"]) for line in run.metrics() if line.get("reward") is not None]
    steps_per_bar = max(1, math.ceil(len(rewards) / _MAX_BARS))
    lines = []
    for first in range(0, len(rewards), steps_per_bar):
        steps, values = zip(*rewards[first : first + steps_per_bar], strict=True)
        name = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
        mean = fmean(values)
        lines.append(f"{name:<14}{mean:.3f}  {'#' * round(mean * _BAR_COLUMNS)}".rstrip())
    return "\n".join(["reward of the episodes that were trained on", *lines, ""] if lines else [])


def format_headline(report: Mapping[str, Any]) -> str:
    """Format the result in a sentence."""
    changes = report.get("tests_passing") or report.get("reward")
    if changes is None:
        return f"{format_count(report['episodes'], 'episode')}; nothing was evaluated both before and after"
    outcome = "held-out bugs repaired (tests pass)" if "tests_passing" in report else "reward on held-out bugs"
    low, high = ("unknown" if bound is None else f"{100 * bound:+.0f}" for bound in changes["ci95"])
    return (
        f"{outcome}: {changes['before']:.0%} -> {changes['after']:.0%}, "
        f"{100 * changes['delta']:+.0f} points [95 % interval {low} to {high}]"
    )


def list_next_commands(run: str | Path, others: Mapping[str, str]) -> list[str]:
    """Commands to continue with: the report of `run`, and `others`."""
    command = f"crrl report {shlex.quote(str(run))}"
    return format_next_commands(
        {command: "curves and intervals, every episode token by token (live: --serve)", **others}
    )


def _format_tables(title: str, report: Mapping[str, Any]) -> Iterator[str]:
    if title:
        yield title
    for name in MEASURES:
        if (row := report.get(name)) is not None:
            delta = Interval(row["delta"], *row["ci95"])
            yield f"{name.replace('_', ' '):<26}{row['before']:>8.3f}{row['after']:>8.3f}   {delta}"
    for name, inner in report.items():
        if isinstance(inner, Mapping) and not MEASURES.keys().isdisjoint(inner):
            yield ""
            yield from _format_tables(", ".join(filter(None, (title, name.replace("_", " ")))), inner)


class FirstEpisodes:
    """Shows two episodes: the first with a patch, and the first of training whose patch passes its tests."""

    def __init__(self) -> None:
        self._awaits_first = self._awaits_repaired = True

    def __call__(self, episode: Episode) -> str:
        """Format `episode`, or return an empty text if it is not shown."""
        if episode.ending is Ending.VOID or not episode.patch:
            return ""
        if self._awaits_repaired and episode.phase == "train" and any(score.passed for score in episode.scores):
            self._awaits_repaired = self._awaits_first = False
            return format_episode("the first bug that is repaired in training", episode)
        if self._awaits_first:
            self._awaits_first = False
            return format_episode("an episode, before any training", episode)
        return ""


def format_episode(title: str, episode: Episode) -> str:
    """Format an episode below `title`, safe to print."""
    messages = episode.turns[0].messages if episode.turns else ()
    issue = next((each.get("content") for each in messages if each.get("role") == "user"), "")
    patch_lines = episode.patch.decode(errors="replace").splitlines()
    changed = "\n".join(line for line in patch_lines if line.startswith(("+", "-")))
    scores = ", ".join(f"{score.name} {score.value:.2f}" for score in episode.scores if score.weight)
    lines = [f"{title} ({printable(episode.task_id)})", f"issue{indent_value(cut_text(issue))}"]
    for call in episode.tool_calls:
        lines.append(format_call(call.name, call.arguments).plain + ("" if call.ok else "  (failed)"))
    lines += [f"diff{indent_value(cut_text(changed))}", f"reward {episode.reward:.2f} ({scores})"]
    return "\n".join(lines)
