"""Reward by language: first against second visit of the same tasks, and over the steps; how many attempts each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from coderepairrl.report.plots.panels import COLOURS
from coderepairrl.report.thesis.attempts import Attempt, ThesisRun, split_ends
from coderepairrl.report.thesis.figure import Figure, draw_panels
from coderepairrl.report.thesis.marks import (
    Mark,
    average_steps,
    average_tasks,
    choose_curve_alpha,
    count_shares,
    describe_ends,
    describe_size,
    make_bar_panel,
    make_curve_panel,
    make_each,
)
from coderepairrl.stats.measures import Pairs, measure_interval

ALL, UNKNOWN = "all", "unknown"
FEWEST_TASKS = 2
"""Tasks of a language, at each visit, for an interval."""
_NO_SECOND_VISIT = "fewer than two tasks were visited twice"


def make_language_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make the figures about languages."""
    yield from make_each(runs, _compare_visits, _compare_disjoint_visits, _describe_languages)


def _compare_visits(run: ThesisRun) -> Figure:
    name, title = "language-visits", "Reward by language, first and second visit of the same tasks"
    first, second = _list_repeated(run)
    if len({each.task for each in second}) < FEWEST_TASKS:
        return Figure(name, title, missing=_NO_SECOND_VISIT)
    rewards, changes = [], []
    for language in _choose_languages(first, second):
        before, after = (average_tasks(_keep_language(side, language)) for side in (first, second))
        tasks = list(before)
        pairs = Pairs("reward", tasks, [*before.values()], [after[task] for task in tasks], tasks)
        for series, interval in (("first visit", pairs.early), ("second visit", pairs.late)):
            rewards.append(Mark("mean reward", series, language, len(tasks), *interval))
        changes.append(Mark("change, task by task", "second minus first", language, len(tasks), *pairs.change))
    caption = (
        f"First visit: {describe_size(first)}. Second visit of the same tasks: {describe_size(second)}. A mean is over "
        f"the tasks' mean rewards; 95 % intervals by task, those of changes from pairs. {_count_tasks(rewards)}"
    )
    return _draw_rows(name, title, caption, rewards, changes)


def _compare_disjoint_visits(run: ThesisRun) -> Figure:
    name, title = "language-visits-disjoint", "Reward by language, first and second visit, different tasks"
    first, second = _list_repeated(run)
    if len({each.task for each in second}) < FEWEST_TASKS:
        return Figure(name, title, missing=_NO_SECOND_VISIT)
    early, late = first[: len(first) // 2], second[len(second) - len(second) // 2 :]
    marks = []
    for language in _choose_languages(early, late):
        for series, side in (("first half of first visits", early), ("last half of second visits", late)):
            means = average_tasks(_keep_language(side, language))
            marks.append(
                Mark(
                    "mean reward",
                    series,
                    language,
                    len(means),
                    *measure_interval("reward", [*means.values()], [*means]),
                )
            )
    both = len({each.task for each in early} & {each.task for each in late})
    caption = (
        f"Of tasks that were visited twice: first half of the attempts at the first visit, {describe_size(early)}, and "
        f"last half of those at the second visit, {describe_size(late)}. The tasks differ ({both:,} are in both), so a "
        "difference can be theirs. A mean is over the tasks' mean rewards, with its own 95 % interval by task. "
        f"{_count_tasks(marks)}"
    )
    return _draw_rows(name, title, caption, marks)


def _describe_languages(run: ThesisRun) -> Figure:
    name, title = "languages", "Languages of the attempts, and their reward over the steps"
    counts = Counter(map(_name_language, run.attempts))
    ends = split_ends(run)
    if ends.missing or len(counts) < 2:
        return Figure(
            name, title, missing=ends.missing or f"all attempts are at tasks in one language, {next(iter(counts))}"
        )
    languages = [language for language, _ in counts.most_common(COLOURS)]
    sides = {"early": ends.early, "late": ends.late}
    pairs = {series: [(_name_language(each), each.task) for each in side] for series, side in sides.items()}
    shares = count_shares("share of the attempts", pairs, languages)
    curves = {language: _keep_language(run.attempts, language) for language in languages}
    rewards = average_steps("mean reward of a step's attempts", curves, lambda attempt: attempt.reward)
    listed = ", ".join(f"{language} {counts[language]:,}" for language in languages)
    others = counts.total() - sum(counts[language] for language in languages)
    caption = (
        f"Shares in {describe_ends(ends)}; 95 % intervals by task. Rewards are means of few attempts each (n in the "
        f"CSV), so they have no intervals. All attempts: {listed}"
        + (f", other languages {others:,}." if others else ".")
    )
    panels = make_bar_panel(shares, "rows"), make_curve_panel(rewards, choose_curve_alpha(curves))
    return Figure(name, title, caption, Mark._fields, [*shares, *rewards], draw_panels(*panels))


def _list_repeated(run: ThesisRun) -> tuple[Sequence[Attempt], Sequence[Attempt]]:
    """First and second visits of the tasks that were visited twice."""
    first, second = ([each for each in run.attempts if each.visit == visit] for visit in (1, 2))
    tasks = {each.task for each in second}
    return [each for each in first if each.task in tasks], second


def _choose_languages(*sides: Sequence[Attempt]) -> list[str]:
    """All, and the most frequent languages with enough tasks on each side."""
    tasks = [Counter(name for _, name in {(each.task, _name_language(each)) for each in side}) for side in sides]
    enough = {name for name in tasks[0] if min(side[name] for side in tasks) >= FEWEST_TASKS}
    return [ALL, *sorted(enough, key=lambda name: (-sum(side[name] for side in tasks), name))[:COLOURS]]


def _keep_language(attempts: Sequence[Attempt], language: str) -> list[Attempt]:
    return [each for each in attempts if language in (ALL, _name_language(each))]


def _name_language(attempt: Attempt) -> str:
    return attempt.language or UNKNOWN


def _count_tasks(marks: Sequence[Mark]) -> str:
    """Sentence with each language's number of tasks."""
    counts: dict[str, dict[str, None]] = {}
    for mark in marks:
        counts.setdefault(str(mark.at), {})[f"{mark.n:,}"] = None
    listed = ", ".join(f"{language} {' and '.join(numbers)}" for language, numbers in counts.items())
    rest = (
        f"Other languages, of fewer than {FEWEST_TASKS} tasks or after the {COLOURS} with the most, count only in all."
    )
    return f"Tasks: {listed}. {rest}"


def _draw_rows(name: str, title: str, caption: str, *panels: Sequence[Mark]) -> Figure:
    rows = [mark for marks in panels for mark in marks]
    drawing = draw_panels(*(make_bar_panel(marks, "rows", "reward") for marks in panels))
    return Figure(name, title, caption, Mark._fields, rows, drawing)
