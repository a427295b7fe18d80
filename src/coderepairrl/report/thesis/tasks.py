"""Sampled tokens of attempts, and rewards of tasks: distributions, inequality, progress, extremes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from coderepairrl.printable import format_count
from coderepairrl.report.plots.panels import Panel, Series
from coderepairrl.report.thesis.attempts import Attempt, ThesisRun, split_ends
from coderepairrl.report.thesis.marks import (
    Figure,
    Mark,
    average_rewards,
    average_steps,
    average_tasks,
    describe_ends,
    describe_size,
    draw_panels,
    group_items,
    make_bar_panel,
    make_curve_panel,
    make_per_run,
    measure_bins,
    measure_shares,
)
from coderepairrl.stats import wilson_interval
from coderepairrl.stats.intervals import median_interval
from coderepairrl.stats.measures import compare_tasks, measure_interval

_CHANGED, _HIGH = 0.1, 0.5
"""Least change of a mean reward from first to last visit, and least mean reward of a steady high task."""
_KINDS = ("improved", "declined", "steady high", "steady low")
_EXTREME_SHARE = 0.1
"""Share of the tasks that are listed as hardest, and as easiest."""
_MAX_UNSOLVED = 20  # listed tasks


def make_task_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make the figures about tokens and about single tasks."""
    yield from make_per_run(runs, _show_tokens, _show_rewards, _show_progress, _list_extremes)


def _show_tokens(run: ThesisRun) -> Figure:
    name, title, ends = "tokens", "Sampled tokens of an attempt", split_ends(run)
    if ends.missing or not any(attempt.sampled for attempt in run.attempts):
        return Figure(name, title, missing=ends.missing or "no sampled tokens are recorded")
    sides = {end: [(attempt.task, attempt.sampled) for attempt in side] for end, side in ends.sides.items()}
    shares = measure_bins("share of attempts by sampled tokens", sides)
    points = [(attempt.step, float(attempt.sampled)) for attempt in run.attempts]
    curve = average_steps(title.lower(), {"mean of a step's attempts": points})
    medians = []
    for end, pairs in sides.items():
        tasks, tokens = zip(*pairs, strict=True)
        medians.append(f"{end} {median_interval(tokens, tasks).text(',.0f')}")
    caption = (
        f"Shares of attempts, {describe_ends(ends)}; 95 % intervals by task. Medians: {', '.join(medians)}. A point of "
        f"the curve is a mean of few of the {len(run.attempts):,} attempts (n in the CSV), so it has no interval."
    )
    panels = make_bar_panel(shares, "bars", "tokens, lower edge of a bin"), make_curve_panel(curve)
    return Figure(name, title, caption, Mark._fields, [*shares, *curve], draw_panels(*panels))


def _show_rewards(run: ThesisRun) -> Figure:
    name, title, ends = "task-rewards", "Mean reward of a task", split_ends(run)
    if ends.missing:
        return Figure(name, title, missing=ends.missing)
    sides = {end: average_tasks(side).items() for end, side in ends.sides.items()}
    shares = measure_bins("share of tasks by mean reward", sides)
    means = [*average_tasks(run.attempts).values()]
    coefficient = compute_gini(means)
    inequality = "not defined" if coefficient is None else f"{coefficient:.3f}"
    caption = (
        f"Shares of tasks, {describe_ends(ends)}; 95 % intervals by task. Gini coefficient of all tasks' mean rewards, "
        f"over all steps: {inequality} (n = {format_count(len(means), 'task')})."
    )
    drawing = draw_panels(make_bar_panel(shares, "bars", "mean reward, lower edge of a bin"))
    return Figure(name, title, caption, Mark._fields, shares, drawing)


def compute_gini(values: Sequence[float]) -> float | None:
    """Gini coefficient: 0 if all are equal, near 1 if one has everything. None for negative values, or only zeros.

    ``sum((2 i - n - 1) x_i) / (n sum(x))`` of ascending values (Damgaard and Weiner 2000, Ecology 81, 1139).

    >>> compute_gini([2.0, 2.0]), compute_gini([0.0, 0.0, 1.0, 0.0]), compute_gini([-1.0, 2.0])
    (0.0, 0.75, None)
    """
    size, total = len(values), sum(values)
    if min(values) < 0 or total <= 0:
        return None
    return sum((2 * rank - size - 1) * value for rank, value in enumerate(sorted(values), 1)) / (size * total)


def _show_progress(run: ThesisRun) -> Figure:
    name, title = "task-progress", "Progress task by task"
    kinds = {}
    for task, attempts in group_items(run.attempts, lambda attempt: attempt.task).items():
        visits = average_rewards(attempts, lambda attempt: attempt.visit)
        if len(visits) > 1:
            kinds[task] = classify_progress(visits[min(visits)], visits[max(visits)])
    if not kinds:
        return Figure(name, title, missing="no task was visited twice")
    counts = Counter(kinds.values())
    shares = measure_shares("share of the tasks visited again", {"tasks": kinds.items()}, _KINDS)
    points, sentence = _compare_halves(run)
    panels = [make_bar_panel(shares, "rows"), *([_make_point_panel(points)] if points else [])]
    caption = (
        f"{format_count(len(kinds), 'task')} with two visits or more: "
        + ", ".join(f"{kind} {counts[kind]:,}" for kind in _KINDS)
        + f"; 95 % intervals by task. Improved, declined: the mean reward changed by {_CHANGED} or more from first to "
        f"last visit. Steady high: it did not, and the mean of both visits is {_HIGH} or more. {sentence}"
    )
    return Figure(name, title, caption, Mark._fields, [*shares, *points], draw_panels(*panels))


def classify_progress(first: float, last: float) -> str:
    """Classify a task by its mean rewards at the first and last visit.

    >>> classify_progress(0.2, 0.3), classify_progress(0.55, 0.5), classify_progress(0.0, 0.05)
    ('improved', 'steady high', 'steady low')
    """
    change = round(last - first, 9)  # 0.3 - 0.2 is less than 0.1
    if abs(change) >= _CHANGED:
        return "improved" if change > 0 else "declined"
    return "steady high" if (first + last) / 2 >= _HIGH else "steady low"


def _compare_halves(run: ThesisRun) -> tuple[list[Mark], str]:
    """Mark the tasks that have attempts in both halves of the steps, and describe their change in a sentence."""
    steps = sorted({attempt.step for attempt in run.attempts})
    middle = steps[len(steps) // 2]
    first = average_tasks(attempt for attempt in run.attempts if attempt.step < middle)
    last = average_tasks(attempt for attempt in run.attempts if attempt.step >= middle)
    tasks = {task: task for task in first if task in last}
    if not tasks:
        return [], "No task has attempts in both halves of the steps."
    attempts = [attempt for attempt in run.attempts if attempt.task in tasks]
    counts = Counter(attempt.task for attempt in attempts)
    panel = "mean reward, second half of the steps"
    points = [Mark(panel, task, first[task], counts[task], last[task]) for task in tasks]
    change = compare_tasks("reward", first, last, tasks).change.text("+.3f")
    return points, f"Dots: {describe_size(attempts)}, before step {middle} and from it on; paired change {change}."


def _make_point_panel(points: Sequence[Mark]) -> Panel:
    xs, ys = [float(point.at) for point in points], [point.value for point in points]
    diagonal, none = [min(xs + ys), max(xs + ys)], [None] * len(points)
    series = [
        Series("no change", diagonal, diagonal, 8, dashed=True, joined=False),
        Series("task", xs, ys, low=none, high=none, joined=False),
    ]
    return Panel(points[0].panel, series, "mean reward, first half", include=())


class _TaskRow(NamedTuple):
    task: str
    language: str
    attempts: int
    mean_reward: float
    resolved_share: float | None


def _list_extremes(run: ThesisRun) -> Figure:
    name, title = "task-extremes", "Hardest and easiest tasks, and those never solved"
    attempts = group_items(run.attempts, lambda attempt: attempt.task)
    tasks = sorted(map(_describe_task, attempts.values()), key=lambda row: (row.mean_reward, row.task))
    if len(tasks) < 2:
        return Figure(name, title, missing="fewer than two tasks")
    count = max(1, round(_EXTREME_SHARE * len(tasks)))
    tested = [row for row in tasks if row.resolved_share is not None]
    unsolved = sorted((row for row in tested if not row.resolved_share), key=lambda row: -row.attempts)
    kinds = {"hardest": tasks[:count], "easiest": tasks[: -count - 1 : -1], "never solved": unsolved[:_MAX_UNSOLVED]}
    mean = measure_interval("reward", [row.mean_reward for row in tasks], [row.task for row in tasks])
    caption = (
        f"The {100 * _EXTREME_SHARE:g} % of the tasks with the lowest and with the highest mean reward, {count:,} of "
        f"{len(tasks):,} each, partly by chance where attempts are few. Mean of all: {mean}, 95 % interval by task "
        f"({describe_size(run.attempts)}). "
    )
    if tested:
        share = wilson_interval(len(unsolved), len(tested))
        caption += (
            f"Never solved: {len(unsolved):,} of {format_count(len(tested), 'tested task')}, {share} (Wilson's 95 % "
            f"interval); at most {_MAX_UNSOLVED} are listed, those with the most attempts."
        )
    else:
        caption += "No attempt was tested, so which tasks were never solved is unknown."
    rows = [(kind, *row) for kind, selected in kinds.items() for row in selected]
    return Figure(name, title, caption, ("kind", *_TaskRow._fields), rows)


def _describe_task(attempts: Sequence[Attempt]) -> _TaskRow:
    results = [attempt.resolved for attempt in attempts if attempt.resolved is not None]
    mean, first = fmean(attempt.reward for attempt in attempts), attempts[0]
    return _TaskRow(first.task, first.language, len(attempts), mean, fmean(results) if results else None)
