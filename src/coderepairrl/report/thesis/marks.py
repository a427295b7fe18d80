"""Figures of the thesis; the numbers that they draw, which are also the rows of their CSV; panels made of these."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

from coderepairrl.printable import format_count
from coderepairrl.report.charts import OTHER
from coderepairrl.report.plots import Panel, Series, choose_alpha, draw_figure, ema, format_number
from coderepairrl.report.plots.panels import choose_ticks
from coderepairrl.report.rows import file_name
from coderepairrl.report.thesis.attempts import Attempt, Ends, ThesisRun
from coderepairrl.stats import mean_interval
from coderepairrl.stats.intervals import is_share

Item = TypeVar("Item")
Key = TypeVar("Key")
Value = tuple[str, str, str, float]
"""Series, label of a bar, task, and a number to average."""
_BINS = 12
_CROWD = 4


Drawing = Callable[[bool], str]
"""Draws an SVG; a standalone one (True) has style and background."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Figure or table; `missing` says why there is nothing to show."""

    name: str
    """Name of its files."""
    title: str
    caption: str = ""
    """What was counted, how much of it, and what the intervals are."""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    """Numbers, as in the CSV."""
    drawing: Drawing | None = None
    """None: a table."""
    missing: str = ""


def draw_panels(*panels: Panel) -> Drawing:
    """Drawing of `panels`, two to a row."""
    return lambda standalone: draw_figure(panels, columns=2, standalone=standalone)


class Mark(NamedTuple):
    """Number at a place of a panel, with its 95 % interval."""

    panel: str
    series: str
    at: str | float
    n: int
    """Attempts, or tasks, that the value is computed from."""
    value: float
    low: float | None = None
    high: float | None = None
    smoothed: float | None = None
    """Moving average, in curves over steps."""


def make_each(runs: Sequence[ThesisRun], *makers: Callable[[ThesisRun], Figure]) -> Iterator[Figure]:
    """Figures of `makers`, one per run each; the names of several runs are in the names of their figures."""
    for make in makers:
        for run in runs:
            figure = make(run)
            if len(runs) > 1:
                name, title = f"{figure.name}-{file_name(run.name)}", f"{figure.title} · {run.name}"
                figure = replace(figure, name=name, title=title)
            yield figure


def group_items(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in their order."""
    groups: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def average_rewards(attempts: Iterable[Attempt], key: Callable[[Attempt], Key]) -> dict[Key, float]:
    """Mean reward by key."""
    return {name: fmean(each.reward for each in own) for name, own in group_items(attempts, key).items()}


def average_tasks(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Mean reward by task."""
    return average_rewards(attempts, lambda each: each.task)


def describe_size(attempts: Sequence[Attempt]) -> str:
    """Count attempts and their tasks, in words."""
    tasks = {each.task for each in attempts}
    return f"{format_count(len(attempts), 'attempt')} at {format_count(len(tasks), 'task')}"


def describe_ends(ends: Ends) -> str:
    """Say what early and late are, and how much."""
    early, late = describe_size(ends.early), describe_size(ends.late)
    return f"the first (early: {early}) and last {format_count(ends.steps, 'step')} (late: {late})"


def average_groups(panel: str, values: Iterable[Value]) -> list[Mark]:
    """Mean by series and label."""
    marks = []
    for (series, label), group in group_items(values, lambda value: value[:2]).items():
        tasks, numbers = zip(*(value[2:] for value in group), strict=True)
        interval = mean_interval(numbers, tasks, share=is_share(numbers))
        marks.append(Mark(panel, series, label, len(group), *interval))
    return marks


def count_shares(panel: str, sides: Mapping[str, Iterable[tuple[str, str]]], labels: Iterable[str]) -> list[Mark]:
    """Share of each label among the pairs of task and label, by series."""
    pairs = {series: list(side) for series, side in sides.items()}
    values = [
        (series, label, task, float(each == label))
        for label in labels
        for series, side in pairs.items()
        for task, each in side
    ]
    return average_groups(panel, values)


def count_bins(panel: str, sides: Mapping[str, Iterable[tuple[str, float]]]) -> list[Mark]:
    """Share of each of about 12 bins, with round edges, among the pairs of task and value, by series."""
    values = [value for side in sides.values() for _, value in side]
    edges = choose_ticks(min(values), max(values), _BINS)
    labels = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]

    def find_bin(value: float) -> str:
        place = bisect_right(edges, round(value, 9)) - 1  # a mean's rounding must not move it to another bin
        return labels[min(max(place, 0), len(labels) - 1)]

    found = {series: [(task, find_bin(value)) for task, value in side] for series, side in sides.items()}
    return count_shares(panel, found, labels)


def average_steps(panel: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> list[Mark]:
    """Mean of the values by step and series, with the moving average of all reports."""
    alpha = _choose_alpha(step for points in curves.values() for step, _ in points)
    marks = []
    for series, points in curves.items():
        by_step = sorted(group_items(points, lambda point: point[0]).items())
        means = [fmean(value for _, value in own) for _, own in by_step]
        for (step, own), mean, smooth in zip(by_step, means, ema(means, alpha), strict=True):
            marks.append(Mark(panel, series, step, len(own), mean, smoothed=smooth))
    return marks


def make_bar_panel(marks: Sequence[Mark], kind: Literal["bars", "rows"], x_label: str = "") -> Panel:
    """Bars side by side, with whiskers; bins are named by their lower edge."""
    places = list(dict.fromkeys(mark.at for mark in marks))
    series = []
    for colour, (name, own) in enumerate(group_items(marks, lambda mark: mark.series).items()):
        *_, ats, _, values, lows, highs, _ = zip(*own, strict=True)
        series.append(Series(name, [places.index(at) for at in ats], values, colour, low=lows, high=highs))
    labels = [str(place).partition(" to ")[0] if kind == "bars" else str(place) for place in places]
    if len(series) == 1:
        labels = [f"{label}, n = {mark.n:,}" for label, mark in zip(labels, marks, strict=True)]
    return Panel(marks[0].panel, series, x_label, kind=kind, labels=labels)


def make_curve_panel(marks: Sequence[Mark]) -> Panel:
    """Curves over steps, raw and smooth; many are only smooth."""
    curves, alpha = group_items(marks, lambda mark: mark.series), _choose_alpha(mark.at for mark in marks)
    note = f"EMA \N{GREEK SMALL LETTER ALPHA} = {format_number(alpha, 2)}"
    series = []
    for colour, (name, curve) in enumerate(curves.items()):
        steps = [float(mark.at) for mark in curve]
        if len(curves) > _CROWD:
            series.append(Series(name, steps, [mark.smoothed for mark in curve], colour))
        else:
            series.append(Series(name, steps, [mark.value for mark in curve], colour, alpha))
    return Panel(marks[0].panel, series, note=note if alpha < 1 else "")


def _choose_alpha(steps: Iterable[object]) -> float:
    return choose_alpha(len(set(steps)), OTHER)
