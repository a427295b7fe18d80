"""Sampled tokens of attempts, and rewards task by task: distributions, inequality, trajectories, extremes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from coderepairrl.printable import format_count
from coderepairrl.report.plots import Panel, Series
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
    make_bins,
    make_curve_panel,
    make_each,
)
from coderepairrl.stats import wilson_interval
from coderepairrl.stats.intervals import median_interval
from coderepairrl.stats.measures import Pairs, measure_interval

CHANGED, HIGH = 0.1, 0.5
"""Least change of a mean reward between visits, and least mean reward of a steady high task."""
KINDS = ("improved", "declined", "steady high", "steady low")
_EXTREME_SHARE = 0.1
_LONGEST_LIST = 20
_TASK_HEADS = ("task", "language", "attempts", "mean reward")


def make_problem_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make the figures about tokens and about single tasks."""
    yield from make_each(runs, _show_tokens, _show_rewards, _show_progress, _list_extremes, _list_unsolved)


def _show_tokens(run: ThesisRun) -> Figure:
    name, title = "tokens", "Sampled tokens of an attempt"
    ends = split_ends(run)
    if ends.missing or not any(each.sampled for each in run.attempts):
        return Figure(name, title, missing=ends.missing or "no sampled tokens are recorded")
    sides = {"early": ends.early, "late": ends.late}
    labels, find_bin = make_bins(each.sampled for side in sides.values() for each in side)
    pairs = {series: [(find_bin(each.sampled), each.task) for each in side] for series, side in sides.items()}
    shares = count_shares("share of attempts by sampled tokens", pairs, labels)
    curves = {"mean of a step's attempts": run.attempts}
    means = average_steps("sampled tokens of an attempt", curves, lambda attempt: attempt.sampled)
    medians = [
        f"{series} {median_interval([each.sampled for each in side], [each.task for each in side]).text(',.0f')}"
        for series, side in sides.items()
    ]
    caption = (
        f"Shares of {describe_ends(ends)}; 95 % intervals by task. Medians: {', '.join(medians)}. A point of the "
        f"curve is a mean of few of the {len(run.attempts):,} attempts (n in the CSV), so it has no interval."
    )
    panels = make_bar_panel(shares, "bars", "tokens"), make_curve_panel(means, choose_curve_alpha(curves))
    return Figure(name, title, caption, Mark._fields, [*shares, *means], draw_panels(*panels))


def _show_rewards(run: ThesisRun) -> Figure:
    name, title = "task-rewards", "Mean reward of a task"
    ends = split_ends(run)
    if ends.missing:
        return Figure(name, title, missing=ends.missing)
    sides = {"early": average_tasks(ends.early), "late": average_tasks(ends.late)}
    labels, find_bin = make_bins(reward for side in sides.values() for reward in side.values())
    pairs = {series: [(find_bin(reward), task) for task, reward in side.items()] for series, side in sides.items()}
    shares = count_shares("share of tasks by mean reward", pairs, labels)
    means = average_tasks(run.attempts)
    coefficient = compute_gini([*means.values()])
    inequality = "not defined" if coefficient is None else f"{coefficient:.3f}"
    caption = (
        f"Tasks of {describe_ends(ends)}; 95 % intervals by task. Gini coefficient of all tasks' mean rewards, over all "
        f"steps: {inequality} (n = {format_count(len(means), 'task')})."
    )
    drawing = draw_panels(make_bar_panel(shares, "bars", "mean reward"))
    return Figure(name, title, caption, Mark._fields, shares, drawing)


def compute_gini(values: Sequence[float]) -> float | None:
    """Gini coefficient: 0 if all have the same, near 1 if one has all. None for negative values, or only zeros.

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
    visits = _group_visits(run)
    if not visits:
        return Figure(name, title, missing="no task was visited twice")
    kinds = {task: classify_trajectory(rewards[0], rewards[-1]) for task, rewards in visits.items()}
    counts = Counter(kinds.values())
    listed = ", ".join(f"{kind} {counts[kind]:,}" for kind in KINDS)
    shares = count_shares("share of the tasks visited again", {"tasks": [(kinds[task], task) for task in kinds]}, KINDS)
    panels, points, sentence = [make_bar_panel(shares, "rows")], *_compare_halves(run)
    if points:
        panels.append(_make_point_panel(points))
    caption = (
        f"{format_count(len(kinds), 'task')} with two visits or more: {listed}; 95 % intervals by task. Improved and "
        f"declined: by {CHANGED} or more from first to last visit; else steady, high if both are {HIGH} or more on "
        f"average. {sentence}"
    )
    return Figure(name, title, caption, Mark._fields, [*shares, *points], draw_panels(*panels))


def _compare_halves(run: ThesisRun) -> tuple[list[Mark], str]:
    """Tasks that both halves of the steps have, and a sentence about them."""
    steps = sorted({each.step for each in run.attempts})
    middle = steps[len(steps) // 2]
    first, second = (
        average_tasks(each for each in run.attempts if (each.step >= middle) is late) for late in (False, True)
    )
    tasks = [task for task in first if task in second]
    if not tasks:
        return [], "No task has attempts in both halves of the steps."
    attempts = Counter(each.task for each in run.attempts)
    pairs = Pairs("reward", tasks, [first[task] for task in tasks], [second[task] for task in tasks], tasks)
    rows = zip(tasks, pairs.before, pairs.after, strict=True)
    points = [Mark("mean reward, second half of the steps", task, x, attempts[task], y) for task, x, y in rows]
    size = f"{format_count(sum(point.n for point in points), 'attempt')} at {format_count(len(tasks), 'task')}"
    return points, f"Dots: {size}, before and from step {middle} on; mean change {pairs.change.text('+.3f')}, paired."


def _group_visits(run: ThesisRun) -> dict[str, list[float]]:
    """Mean reward of each visit, of tasks with several."""
    rewards: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in run.attempts:
        rewards[each.task][each.visit].append(each.reward)
    return {task: [fmean(own[visit]) for visit in sorted(own)] for task, own in rewards.items() if len(own) > 1}


def classify_trajectory(first: float, last: float) -> str:
    """Kind of a task by its mean rewards at the first and last visit.

    >>> classify_trajectory(0.2, 0.3), classify_trajectory(0.55, 0.5), classify_trajectory(0.0, 0.05)
    ('improved', 'steady high', 'steady low')
    """
    change = round(last - first, 9)  # 0.3 - 0.2 is less than 0.1
    if abs(change) >= CHANGED:
        return "improved" if change > 0 else "declined"
    return "steady high" if (first + last) / 2 >= HIGH else "steady low"


def _make_point_panel(points: Sequence[Mark]) -> Panel:
    xs, ys = [float(point.at) for point in points], [point.value for point in points]
    ends, none = [min(xs + ys), max(xs + ys)], [None] * len(points)
    series = [
        Series("no change", ends, ends, 8, dashed=True, joined=False),
        Series("task", xs, ys, low=none, high=none, joined=False),
    ]
    return Panel(points[0].panel, series, "mean reward, first half", include=())


def _list_extremes(run: ThesisRun) -> Figure:
    name, title = "task-extremes", "Hardest and easiest tasks"
    means = average_tasks(run.attempts)
    if len(means) < 2:
        return Figure(name, title, missing="fewer than two tasks")
    attempts = _group_by_task(run.attempts)
    ranked = sorted(means, key=lambda task: (means[task], task))
    count = max(1, round(_EXTREME_SHARE * len(ranked)))
    chosen = [("hardest", task) for task in ranked[:count]] + [("easiest", task) for task in ranked[: -count - 1 : -1]]
    rows = [(end, *_describe_task(attempts[task]), _share_resolved(attempts[task])) for end, task in chosen]
    caption = (
        f"The {_EXTREME_SHARE:.0%} of the tasks with the lowest and with the highest mean reward, {count:,} of "
        f"{len(ranked):,} each. Mean of all: {measure_interval('reward', [*means.values()], [*means])}, 95 % interval "
        f"by task ({describe_size(run.attempts)}). Of few attempts, extremes are partly chance."
    )
    return Figure(name, title, caption, ("end", *_TASK_HEADS, "resolved share"), rows)


def _list_unsolved(run: ThesisRun) -> Figure:
    name, title = "tasks-never-solved", "Tasks that no attempt solved"
    tested = _group_by_task(each for each in run.attempts if each.resolved is not None)
    if not tested:
        return Figure(name, title, missing="no attempt was tested, so whether one solved its task is unknown")
    unsolved = [own for own in tested.values() if not any(each.resolved for each in own)]
    share = wilson_interval(len(unsolved), len(tested))
    sizes = f"{len(unsolved):,} of {format_count(len(tested), 'tested task')}: {share}, Wilson's 95 % interval"
    if not unsolved:
        return Figure(name, title, missing=f"each task was solved at least once (never solved: {sizes})")
    unsolved.sort(key=lambda own: (-len(own), own[0].task))
    rows = [_describe_task(own) for own in unsolved[:_LONGEST_LIST]]
    listed = f" Listed: the {_LONGEST_LIST} with the most." if len(unsolved) > _LONGEST_LIST else ""
    return Figure(name, title, f"Never solved: {sizes}. Attempts: those that were tested.{listed}", _TASK_HEADS, rows)


def _group_by_task(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    groups: dict[str, list[Attempt]] = defaultdict(list)
    for each in attempts:
        groups[each.task].append(each)
    return groups


def _describe_task(attempts: Sequence[Attempt]) -> tuple[str, str, int, float]:
    """Cells below `_TASK_HEADS`."""
    return attempts[0].task, attempts[0].language, len(attempts), fmean(each.reward for each in attempts)


def _share_resolved(attempts: Iterable[Attempt]) -> float | None:
    results = [each.resolved for each in attempts if each.resolved is not None]
    return fmean(results) if results else None
