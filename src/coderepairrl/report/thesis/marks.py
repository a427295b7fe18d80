"""Figures of the thesis, made of marks: numbers that panels draw and CSV files export."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

from coderepairrl.printable import format_count
from coderepairrl.report.charts import EMA_ALPHA, MAX_RAW_CURVES, describe_smoothing
from coderepairrl.report.plots import draw_figure
from coderepairrl.report.plots.panels import Panel, Series, choose_alpha, choose_ticks, ema
from coderepairrl.report.rows import file_name
from coderepairrl.report.thesis.attempts import Attempt, Ends, ThesisRun, select_trained
from coderepairrl.stats import mean_interval
from coderepairrl.stats.intervals import is_share

Item = TypeVar("Item")
Key = TypeVar("Key")
Value = tuple[str, str, str, float]
"""Series, label of a bar, task, and a number to average."""
_BINS = 12
"""Approximate number of bins in a histogram."""

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
    """None for a table."""
    missing: str = ""


def draw_panels(*panels: Panel) -> Drawing:
    """Drawing of `panels`, two to a row."""
    return lambda standalone: draw_figure(panels, columns=2, standalone=standalone)


class Mark(NamedTuple):
    """Number that a panel shows, with its 95 % interval."""

    panel: str
    series: str
    at: str | float
    """Label of a bar, or x of a point."""
    n: int
    """Attempts, or tasks, that the value is computed from."""
    value: float
    low: float | None = None
    high: float | None = None
    smoothed: float | None = None
    """Moving average, in curves over steps."""


def make_per_run(runs: Sequence[ThesisRun], *makers: Callable[[ThesisRun], Figure]) -> Iterator[Figure]:
    """Make each figure for each run that trained; figures of several runs are named after them."""
    trained = select_trained(runs)
    for make in makers:
        for run in trained:
            figure = make(run)
            if len(trained) > 1:
                name, title = f"{figure.name}-{file_name(run.name)}", f"{figure.title} · {run.name}"
                figure = replace(figure, name=name, title=title)
            yield figure


def group_items(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by key, in their order."""
    groups: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def average_rewards(attempts: Iterable[Attempt], key: Callable[[Attempt], Key]) -> dict[Key, float]:
    """Average rewards by key."""
    groups = group_items(attempts, key)
    return {name: fmean(attempt.reward for attempt in group) for name, group in groups.items()}


def average_tasks(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Average rewards by task."""
    return average_rewards(attempts, lambda attempt: attempt.task)


def describe_size(attempts: Sequence[Attempt]) -> str:
    """Count attempts and their tasks, in words."""
    tasks = {attempt.task for attempt in attempts}
    return f"{format_count(len(attempts), 'attempt')} at {format_count(len(tasks), 'task')}"


def describe_ends(ends: Ends) -> str:
    """Describe early and late parts by steps, attempts and tasks."""
    steps, early, late = format_count(ends.steps, "step"), describe_size(ends.early), describe_size(ends.late)
    return f"early (the first {steps}: {early}) and late (the last {steps}: {late})"


def average_values(panel: str, values: Iterable[Value]) -> list[Mark]:
    """Average the values of each series and label, with intervals clustered by task."""
    marks = []
    for (series, label), group in group_items(values, lambda value: value[:2]).items():
        tasks, numbers = zip(*(value[2:] for value in group), strict=True)
        interval = mean_interval(numbers, tasks, share=is_share(numbers))
        marks.append(Mark(panel, series, label, len(group), *interval))
    return marks


def measure_shares(panel: str, sides: Mapping[str, Collection[tuple[str, str]]], labels: Iterable[str]) -> list[Mark]:
    """Measure the share of each label among the pairs (task, label) of each series."""
    values = [
        (series, label, task, float(other == label))
        for label in labels
        for series, pairs in sides.items()
        for task, other in pairs
    ]
    return average_values(panel, values)


def measure_bins(panel: str, sides: Mapping[str, Collection[tuple[str, float]]]) -> list[Mark]:
    """Measure the share of each bin, with round edges, among the pairs (task, value) of each series."""
    values = [value for pairs in sides.values() for _, value in pairs]
    edges = choose_ticks(min(values), max(values), _BINS)
    labels = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]

    def find_bin(value: float) -> str:
        number = bisect_right(edges, round(value, 9)) - 1  # a mean's rounding must not move it to another bin
        return labels[min(max(number, 0), len(labels) - 1)]

    binned = {series: [(task, find_bin(value)) for task, value in pairs] for series, pairs in sides.items()}
    return measure_shares(panel, binned, labels)


def average_steps(panel: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> list[Mark]:
    """Average the values of each series at each step, and smooth the means as reports do."""
    alpha = choose_alpha(len({step for points in curves.values() for step, _ in points}), EMA_ALPHA)
    marks = []
    for series, points in curves.items():
        by_step = sorted(group_items(points, lambda point: point[0]).items())
        means = [fmean(value for _, value in group) for _, group in by_step]
        for (step, group), mean, smooth in zip(by_step, means, ema(means, alpha), strict=True):
            marks.append(Mark(panel, series, step, len(group), mean, smoothed=smooth))
    return marks


def make_bar_panel(marks: Sequence[Mark], kind: Literal["bars", "rows"], x_label: str = "") -> Panel:
    """Draw bars side by side, with whiskers; vertical bars are bins, named by their lower edge."""
    places = list(dict.fromkeys(mark.at for mark in marks))
    series = []
    for colour, (name, group) in enumerate(group_items(marks, lambda mark: mark.series).items()):
        xs, values = [places.index(mark.at) for mark in group], [mark.value for mark in group]
        lows, highs = [mark.low for mark in group], [mark.high for mark in group]
        series.append(Series(name, xs, values, colour, low=lows, high=highs))
    labels = [str(place).partition(" to ")[0] if kind == "bars" else str(place) for place in places]
    if len(series) == 1:
        labels = [f"{label}, n = {mark.n:,}" for label, mark in zip(labels, marks, strict=True)]
    return Panel(marks[0].panel, series, x_label, kind=kind, labels=labels)


def make_curve_panel(marks: Sequence[Mark]) -> Panel:
    """Draw curves over steps, raw and smoothed; more than `MAX_RAW_CURVES` are only smoothed."""
    curves = group_items(marks, lambda mark: mark.series)
    alpha = choose_alpha(len({mark.at for mark in marks}), EMA_ALPHA)
    series = []
    for colour, (name, curve) in enumerate(curves.items()):
        steps = [float(mark.at) for mark in curve]
        if len(curves) > MAX_RAW_CURVES:
            series.append(Series(name, steps, [mark.smoothed for mark in curve], colour))
        else:
            series.append(Series(name, steps, [mark.value for mark in curve], colour, alpha))
    return Panel(marks[0].panel, series, note=describe_smoothing(alpha))
