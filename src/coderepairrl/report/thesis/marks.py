"""Numbers that a figure draws, which are also the rows of its CSV, and the panels made of them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Literal, NamedTuple

from coderepairrl.printable import format_count
from coderepairrl.report.charts import OTHER
from coderepairrl.report.plots import Panel, Series, choose_alpha, ema, format_number
from coderepairrl.report.plots.panels import choose_ticks
from coderepairrl.report.rows import file_name
from coderepairrl.report.thesis.attempts import Attempt, Ends, ThesisRun
from coderepairrl.report.thesis.figure import Figure
from coderepairrl.stats import mean_interval

_BINS = 12
_CROWD = 4


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


def average_tasks(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Mean reward by task."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for each in attempts:
        rewards[each.task].append(each.reward)
    return {task: fmean(own) for task, own in rewards.items()}


def describe_size(attempts: Sequence[Attempt]) -> str:
    """Count attempts and their tasks, in words."""
    tasks = {each.task for each in attempts}
    return f"{format_count(len(attempts), 'attempt')} at {format_count(len(tasks), 'task')}"


def describe_ends(ends: Ends) -> str:
    """Say what early and late are, and how much."""
    early, late = describe_size(ends.early), describe_size(ends.late)
    return f"the first (early: {early}) and last {format_count(ends.steps, 'step')} (late: {late})"


def make_bins(values: Iterable[float]) -> tuple[list[str], Callable[[float], str]]:
    """Names of about 12 bins with round edges, and the function that names a value's bin.

    >>> labels, find = make_bins([0.0, 0.25, 1.0])
    >>> labels[:2], find(0.1), find(1.0)
    (['0 to 0.1', '0.1 to 0.2'], '0.1 to 0.2', '0.9 to 1')
    """
    values = list(values)
    edges = choose_ticks(min(values), max(values), _BINS)
    labels = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]

    def find_bin(value: float) -> str:
        place = bisect_right(edges, round(value, 9)) - 1  # a mean's rounding must not move it to another bin
        return labels[min(max(place, 0), len(labels) - 1)]

    return labels, find_bin


def count_shares(panel: str, sides: Mapping[str, Sequence[tuple[str, str]]], labels: Iterable[str]) -> list[Mark]:
    """Share of each label by series; each observation is a label and its task."""
    marks = []
    for label in labels:
        for series, pairs in sides.items():
            tasks = [task for _, task in pairs]
            share = mean_interval([float(own == label) for own, _ in pairs], tasks, share=True)
            marks.append(Mark(panel, series, label, len(pairs), *share))
    return marks


def average_steps(
    panel: str, curves: Mapping[str, Sequence[Attempt]], measure: Callable[[Attempt], float]
) -> list[Mark]:
    """Mean of a measure by step and series, with the moving average of all reports."""
    alpha = choose_curve_alpha(curves)
    marks = []
    for series, attempts in curves.items():
        values: dict[int, list[float]] = defaultdict(list)
        for each in attempts:
            values[each.step].append(measure(each))
        steps = sorted(values)
        means = [fmean(values[step]) for step in steps]
        marks += [
            Mark(panel, series, step, len(values[step]), mean, smoothed=smooth)
            for step, mean, smooth in zip(steps, means, ema(means, alpha), strict=True)
        ]
    return marks


def choose_curve_alpha(curves: Mapping[str, Sequence[Attempt]]) -> float:
    """Weight of a new step in the moving averages."""
    return choose_alpha(len({each.step for attempts in curves.values() for each in attempts}), OTHER)


def make_bar_panel(marks: Sequence[Mark], kind: Literal["bars", "rows"], x_label: str = "") -> Panel:
    """Bars side by side, with whiskers."""
    labels = [str(at) for at in dict.fromkeys(mark.at for mark in marks)]
    series = [
        Series(
            name,
            [labels.index(str(mark.at)) for mark in own],
            [mark.value for mark in own],
            colour,
            low=[mark.low for mark in own],
            high=[mark.high for mark in own],
        )
        for colour, (name, own) in enumerate(_split_series(marks).items())
    ]
    return Panel(marks[0].panel, series, x_label, kind=kind, labels=labels)


def make_curve_panel(marks: Sequence[Mark], alpha: float) -> Panel:
    """Curves over steps, raw and smooth; many are only smooth."""
    own = _split_series(marks)
    note = f"EMA \N{GREEK SMALL LETTER ALPHA} = {format_number(alpha, 2)}"
    series = []
    for colour, (name, curve) in enumerate(own.items()):
        steps = [float(mark.at) for mark in curve]
        if len(own) > _CROWD:
            series.append(Series(name, steps, [mark.smoothed for mark in curve], colour))
        else:
            series.append(Series(name, steps, [mark.value for mark in curve], colour, alpha))
    return Panel(marks[0].panel, series, note=note if alpha < 1 else "")


def _split_series(marks: Iterable[Mark]) -> dict[str, list[Mark]]:
    series: dict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        series[mark.series].append(mark)
    return series
