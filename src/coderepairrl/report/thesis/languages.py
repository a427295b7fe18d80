"""Languages of attempts: reward at the first and second visit of tasks and over the steps, and how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from coderepairrl.report.plots.panels import COLOURS
from coderepairrl.report.thesis.attempts import Attempt, ThesisRun, split_ends
from coderepairrl.report.thesis.marks import (
    Figure,
    Mark,
    average_steps,
    average_tasks,
    count_shares,
    describe_ends,
    describe_size,
    draw_panels,
    make_bar_panel,
    make_curve_panel,
    make_each,
)
from coderepairrl.stats.measures import Pairs, measure_interval

_ALL, _UNKNOWN = "all", "unknown"
_FEWEST_TASKS = 2


def make_language_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make the figures about languages."""
    yield from make_each(runs, _compare_visits, _describe_languages)


def _compare_visits(run: ThesisRun) -> Figure:
    name, title = "language-visits", "Reward by language, first and second visit"
    second = [each for each in run.attempts if each.visit == 2]
    repeated = {each.task for each in second}
    if len(repeated) < _FEWEST_TASKS:
        return Figure(name, title, missing="fewer than two tasks were visited twice")
    first = [each for each in run.attempts if each.visit == 1 and each.task in repeated]
    early, late = first[: len(first) // 2], second[len(second) - len(second) // 2 :]
    same = _average_languages("same tasks", {"first visit": first, "second visit": second})
    changes = [_pair_tasks(first, second, str(mark.at)) for mark in same if mark.series == "first visit"]
    halves = {"first half of first visits": early, "last half of second visits": late}
    different = _average_languages("different tasks", halves)
    both = len({each.task for each in early} & {each.task for each in late})
    caption = (
        "Tasks that were visited twice; means over their mean rewards, 95 % intervals by task. Same tasks: "
        f"{describe_size(first)} at the first visit and {describe_size(second)} at the second; changes are paired. "
        f"Different tasks: first half of the attempts at first visits, {describe_size(early)}, and last half of those "
        f"at second visits, {describe_size(late)}; the tasks differ ({both:,} are in both), as may their difficulty. "
        f"Languages with fewer than {_FEWEST_TASKS} tasks, or after the {COLOURS} with most, are only in all. Tasks: "
        + ", ".join(f"{mark.at} {mark.n:,}" for mark in changes)
    )
    panels = [make_bar_panel(marks, "rows", "reward") for marks in (same, changes, different)]
    return Figure(name, title, f"{caption}.", Mark._fields, [*same, *changes, *different], draw_panels(*panels))


def _average_languages(panel: str, sides: Mapping[str, Sequence[Attempt]]) -> list[Mark]:
    """Mean reward of all tasks, and of the languages with enough of them on each side."""
    tasks = [
        Counter(name for _, name in {(each.task, _name_language(each)) for each in side}) for side in sides.values()
    ]
    enough = [name for name in sorted(tasks[0]) if min(side[name] for side in tasks) >= _FEWEST_TASKS]
    enough.sort(key=lambda name: -sum(side[name] for side in tasks))
    marks = []
    for language in (_ALL, *enough[:COLOURS]):
        for series, side in sides.items():
            means = average_tasks(_keep_language(side, language))
            interval = measure_interval("reward", [*means.values()], [*means])
            marks.append(Mark(panel, series, language, len(means), *interval))
    return marks


def _pair_tasks(first: Sequence[Attempt], second: Sequence[Attempt], language: str) -> Mark:
    before, after = (average_tasks(_keep_language(side, language)) for side in (first, second))
    tasks = [task for task in before if task in after]
    pairs = Pairs("reward", tasks, [before[task] for task in tasks], [after[task] for task in tasks], tasks)
    return Mark("change, task by task", "second minus first", language, len(tasks), *pairs.change)


def _describe_languages(run: ThesisRun) -> Figure:
    name, title = "languages", "Languages of the attempts, and their reward over the steps"
    counts, ends = Counter(map(_name_language, run.attempts)), split_ends(run)
    if ends.missing or len(counts) < 2:
        return Figure(name, title, missing=ends.missing or f"all attempts are in one language, {next(iter(counts))}")
    languages = [language for language, _ in counts.most_common(COLOURS)]
    sides = {"early": ends.early, "late": ends.late}
    found = {series: [(each.task, _name_language(each)) for each in side] for series, side in sides.items()}
    shares = count_shares("share of the attempts", found, languages)
    curves = {
        language: [(each.step, each.reward) for each in _keep_language(run.attempts, language)]
        for language in languages
    }
    rewards = average_steps("mean reward of a step's attempts", curves)
    others = counts.total() - sum(counts[language] for language in languages)
    caption = (
        f"Shares of {describe_ends(ends)}; 95 % intervals by task. Rewards are means of few attempts each (n in the "
        "CSV), so they have no intervals. Attempts of all steps: "
        + ", ".join(f"{language} {counts[language]:,}" for language in languages)
        + (f", other languages {others:,}." if others else ".")
    )
    panels = make_bar_panel(shares, "rows"), make_curve_panel(rewards)
    return Figure(name, title, caption, Mark._fields, [*shares, *rewards], draw_panels(*panels))


def _keep_language(attempts: Sequence[Attempt], language: str) -> list[Attempt]:
    return [each for each in attempts if language in (_ALL, _name_language(each))]


def _name_language(attempt: Attempt) -> str:
    return attempt.language or _UNKNOWN
