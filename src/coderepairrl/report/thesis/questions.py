"""Research questions RQ0 to RQ3 of the thesis, answered from run folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from coderepairrl.report import published
from coderepairrl.report.charts import OTHER
from coderepairrl.report.comparison import compare_counts
from coderepairrl.report.outcomes import PublishedCount
from coderepairrl.report.plots import choose_alpha, ema
from coderepairrl.report.rows import file_name
from coderepairrl.report.thesis.attempts import END_SHARE, ThesisRun, split_ends
from coderepairrl.report.thesis.figure import Figure, draw_panels
from coderepairrl.report.thesis.success import (
    choose_measure,
    compare_ends,
    list_estimates,
    list_evaluations,
    make_rows_panel,
)
from coderepairrl.report.verdict import describe_results, format_p_equation
from coderepairrl.stats import Interval, mean_interval
from coderepairrl.stats.measures import fit_one_line
from coderepairrl.stats.paired import Array, adjust_holm, bootstrap
from coderepairrl.stats.power import ALPHA

_COMMANDS = 4
"""Commands in the figure that rise most, and that fall most."""
_NEAR = 0.1
"""Share of the peak that a plateau may lose."""
_TIERS = {"completed": "Tier 1, operates: ", "ended by itself": "", "resolved": "Tier 2, repairs: "}
Side = Sequence[tuple[Hashable, Sequence[float]]]
"""Cluster and values of each unit."""


class Finding(NamedTuple):
    """Number behind an answer."""

    quantity: str
    interval: Interval
    n: int
    unit: str
    p: float | None = None

    def __str__(self) -> str:
        p = "" if self.p is None else f", {format_p_equation(self.p)}"
        return f"{self.quantity}: {self.interval.text('.3g')} (n = {self.n:,} {self.unit}{p})"


Answer = tuple[str, Sequence[Finding]]


def make_question_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make the answers, a table of their numbers, and the commands of RQ1."""
    answers = [(run.name, question, answer(run)) for run in runs for question, answer in _QUESTIONS.items()]
    answers.append(("the thesis, as published", [*_QUESTIONS][2], answer_published()))
    caption = (
        "Brackets are 95 % intervals; n is beside each number. Steps: bootstrap of blocks of adjacent steps. Early and "
        f"late attempts, of the first and last {END_SHARE:.0%} of the steps: bootstrap of tasks. Evaluations: "
        "paired by task, p of sign flips."
    )
    rows = [(run, question, text, "; ".join(map(str, findings))) for run, question, (text, findings) in answers]
    yield Figure("questions", "Research questions", caption, ("run", "question", "answer", "numbers"), rows)
    numbers = [
        (run, question[:3], each.quantity, *each.interval, each.n, each.unit, each.p)
        for run, question, (_, findings) in answers
        for each in findings
    ]
    heads = ("run", "question", "quantity", "value", "low", "high", "n", "unit", "p")
    yield Figure("question-numbers", "Numbers behind the answers", caption, heads, numbers)
    for run in runs:
        yield _make_command_figure(run, len(runs) > 1)


# -- intervals


def compare_sides(quantity: str, unit: str, early: Side, late: Side, *, share: bool = False) -> list[Finding]:
    """Early mean, late mean and their difference, with intervals from whole clusters; none without values on a side."""
    values, clusters = (
        [[v for _, each in side for v in each] for side in (early, late)],
        [c for c, _ in (*early, *late)],
    )
    if not all(values):
        return []
    rows = [(sum(each), len(each), 0, 0) for _, each in early] + [(0, 0, sum(each), len(each)) for _, each in late]
    change = bootstrap([*zip(*rows, strict=True)], clusters, lambda m: _divide(m[2], m[3]) - _divide(m[0], m[1]))
    assert change is not None  # both sides have values
    intervals = [
        mean_interval(side_values, [cluster for cluster, each in side for _ in each], share=share)
        for side_values, side in zip(values, (early, late), strict=True)
    ]
    counts = [*map(len, values), len(values[0]) + len(values[1])]
    ends = zip(("early", "late", "late - early"), (*intervals, change), counts, strict=True)
    return [Finding(f"{quantity}, {end}", interval, count, unit) for end, interval, count in ends]


def estimate_slope(points: Sequence[tuple[int, float]], clusters: Sequence[Hashable]) -> Interval:
    """Least-squares slope per 100 steps of points (step, value), with its interval."""
    x, y = np.array(points, dtype=float).T
    x = (x - x.mean()) / 100
    columns = [column.tolist() for column in (x, y, x * y, x * x)]
    slope = bootstrap(columns, clusters, lambda m: _divide(m[2] - m[0] * m[1], m[3] - m[0] ** 2))
    assert slope is not None  # steps differ
    return slope


def _divide(numerator: Array, denominator: Array) -> Array:
    # a draw without a unit of one side, or with a single step, says nothing
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 1e-12)


def _describe_change(change: Interval) -> str:
    if change.low is None:
        return "has too little data for an interval"
    return "rose" if change.above(0) else "fell" if change.is_all_below(0) else "shows no difference"


# -- answers


def answer_rq0(run: ThesisRun) -> Answer:
    """Trend of the reward and its deviation, plateau or decline, and order of the evaluations."""
    findings: list[Finding] = []
    for measure in ("reward", "reward_std"):
        points = [(step["step"], step[measure]) for step in run.report.steps if step.get(measure) is not None]
        if len(points) < 2:
            return f"Not known: fewer than two steps with {measure}.", findings
        blocks = [at // max(1, round(len(points) ** (1 / 3))) for at in range(len(points))]
        count = max(1, round(END_SHARE * len(points)))
        units = [(block, [value]) for block, (_, value) in zip(blocks, points, strict=True)]
        slope = Finding(f"slope of {measure} per 100 steps", estimate_slope(points, blocks), len(points), "steps")
        findings += [slope, *compare_sides(measure, "steps", units[:count], units[-count:])]
    reward, spread = (_describe_change(each.interval) for each in findings[::4])
    text = f"Over the steps the reward {reward}, its deviation within groups {spread}"
    return f"{text}; {_describe_peak(run)}. {_describe_order(run)}.", findings


def _describe_peak(run: ThesisRun) -> str:
    rewards = {step["step"]: step["reward"] for step in run.report.steps if step.get("reward") is not None}
    alpha = choose_alpha(len(rewards), OTHER)
    smooth = [
        (value, step) for value, step in zip(ema([*rewards.values()], alpha), rewards, strict=True) if value is not None
    ]
    (peak, step), (last, _) = max(smooth), smooth[-1]
    ending = "a decline" if last < peak - _NEAR * abs(peak) else "a plateau" if last < peak else "the peak"
    return f"its EMA ({alpha:.2g}) peaked in step {step} at {peak:.3g} and ended at {last:.3g}, {ending}"


def _describe_order(run: ThesisRun) -> str:
    measure, name = choose_measure([run]), next(iter(list_evaluations(run)), "")
    means = [row[-3] for row in list_estimates(run, [measure]) if row[1] == name]
    if len(means) < 2:
        return "Whether evaluations are monotone is not known: fewer than two"
    falls = sum(later < earlier for earlier, later in pairwise(means))
    return f"Over n = {len(means)} evaluations {measure} " + (
        f"fell {falls} of {len(means) - 1} times" if falls else "never fell"
    )


def answer_rq1(run: ThesisRun) -> Answer:
    """Success of calls while calls remain (learning to act), calls per attempt (to be selective), and commands."""
    ends, commands = split_ends(run), _count_commands(run)
    if not commands:
        return f"Not known: {ends.missing or 'no tool calls early or late'}.", []
    sides = [[each for each in side if each.calls_known] for side in (ends.early, ends.late)]
    acting, fewer = (
        [[(each.task, measure(each)) for each in side if keep(each)] for side in sides]
        for measure, keep in (
            (lambda each: [float(call.ok) for call in each.calls], lambda each: each.reason != "calls"),
            (lambda each: [float(len(each.calls))], lambda each: True),
        )
    )
    success = compare_sides("success of calls while calls remain", "calls", *acting, share=True)
    calls = compare_sides("calls per attempt", "attempts", *fewer)
    text = [
        f"{start} {_describe_change(found[2].interval) if found else 'is not known'}."
        for start, found in (
            ("Learning to act: success of calls, in attempts that no limit of calls ended,", success),
            ("Learning to be selective: calls per attempt", calls),
        )
    ]
    totals = [sum(counts) for counts in list(zip(*commands, strict=True))[1:]]
    for (name, early, late), word in ((commands[0], "rises"), (commands[-1], "falls")):
        shares = f"{early} of {totals[0]:,} calls early, {late} of {totals[1]:,} late"
        text.append(f"The share of {fit_one_line(name, 24)} {word} most: {shares}.")
    return " ".join(text), [*success, *calls]


def _count_commands(run: ThesisRun) -> list[tuple[str, int, int]]:
    """Commands with early and late calls, from the greatest rise of their share; none if one end has no calls."""
    ends = split_ends(run)
    early, late = (Counter(call.command for each in side for call in each.calls) for side in (ends.early, ends.late))
    if not early or not late:
        return []
    rises = {name: late[name] / late.total() - early[name] / early.total() for name in sorted(early | late)}
    return [(name, early[name], late[name]) for name in sorted(rises, key=lambda name: -rises[name])]


def answer_rq2(run: ThesisRun) -> Answer:
    """Whether the policy operates the harness (tier 1), and whether it repairs (tier 2), last against first."""
    by_step, texts, findings = next(iter(list_evaluations(run).values()), {}), [], list[Finding]()
    for measure, tier in _TIERS.items():
        compared = compare_ends(by_step, measure) if len(by_step) > 1 else []
        for each in compared:
            texts.append(f"{tier}{describe_results([each]).verdicts[0]}")
            sides = ((each.before, each.early, None), (each.after, each.late, None))
            sides += ((f"{each.after} - {each.before}", each.change, each.p),)
            sides += (("smallest difference to be shown", each.smallest_shown, None),) if each.smallest_shown else ()
            findings += [Finding(f"{measure}, {name}", value, each.tasks, "tasks", p) for name, value, p in sides]
        if not compared and measure == "resolved" and texts:
            texts.append(f"{tier}not known, no test ran.")
    return " ".join(texts) or "Not known: fewer than two evaluations of the same tasks.", findings


def answer_published() -> Answer:
    """Tier 2 of RQ2 from the counts that the thesis published."""
    numbers = [published.find_percentage(name) for name in ("thesis-base", "thesis-rl")]
    compared = compare_counts(*(PublishedCount(each.name, each.solved or 0, each.tasks) for each in numbers))
    sides = (("thesis-base", compared.early, None), ("thesis-rl", compared.late, None))
    sides += (("thesis-rl - thesis-base, however the tasks overlap", compared.change, compared.p[0]),)
    findings = [Finding(f"resolved, {name}", value, compared.after.tasks, "tasks", p) for name, value, p in sides]
    return f"{_TIERS['resolved']}{describe_results([compared]).verdicts[0]}", findings


def answer_rq3(run: ThesisRun) -> Answer:
    """Changes by language: tasks that training met again, and evaluations."""
    texts, findings = [], []
    for comparisons, measures in ((run.report.repeated, ["reward"]), (run.report.comparisons, ["tests", "reward"])):
        slices = [each for each in comparisons if each.slice.startswith("language ") and each.changes]
        for before, after in dict.fromkeys((each.before, each.after) for each in slices):
            changes = {each.slice.partition(" ")[2]: each.changes for each in slices if each.after == after}
            measure = next(name for name in measures if all(name in each for each in changes.values()))
            adjusted = adjust_holm([each[measure].p for each in changes.values()])
            words = dict[str, list[str]]()
            for (language, each), p in zip(changes.items(), adjusted, strict=True):
                change, tasks = each[measure].change, each[measure].tasks
                findings.append(Finding(f"{measure} in {language}, {after} - {before}", change, tasks, "tasks", p))
                word = _describe_change(change) if p <= ALPHA or change.low is None else "shows no difference"
                words.setdefault(word, []).append(language)
            shown = ", ".join(f"{word} in {' and '.join(languages)}" for word, languages in words.items())
            texts.append(f"{after} against {before}: {measure} {shown}.")
    if not findings:
        return "Not known: no tasks of several languages were met twice, in training or in evaluations.", []
    return f"{' '.join(texts)} p: corrected for the languages (Holm).", findings


_QUESTIONS: Mapping[str, Callable[[ThesisRun], Answer]] = {
    "RQ0: does training converge?": answer_rq0,
    "RQ1: does the policy adapt to its harness?": answer_rq1,
    "RQ2: does success verified by tests improve?": answer_rq2,
    "RQ3: do all languages improve?": answer_rq3,
}


def _make_command_figure(run: ThesisRun, several: bool) -> Figure:
    name, title = (f"-{file_name(run.name)}", f" · {run.name}") if several else ("", "")
    figure = Figure(f"rq1-commands{name}", f"RQ1: commands whose share changes most{title}")
    ends, commands = split_ends(run), _count_commands(run)
    if not commands:
        return replace(figure, missing=ends.missing or "no tool calls early or late")
    chosen, rows = list(dict.fromkeys([*commands[:_COMMANDS], *commands[-_COMMANDS:]])), []
    for command, *counts in chosen:
        early, late = (
            [(each.task, [float(call.command == command) for call in each.calls]) for each in side]
            for side in (ends.early, ends.late)
        )
        found = compare_sides(command, "calls", early, late, share=True)
        for end, count, each in zip(("early", "late"), counts, found, strict=False):
            rows.append((run.name, command, end, count, each.n, *each.interval))
    sides = {end: [Interval(*row[-3:]) for row in rows if row[2] == end] for end in ("early", "late")}
    caption = (
        f"Shares in the calls of the first and last {ends.steps} steps, greatest rise first; n = {rows[0][4]} and "
        f"{rows[1][4]} calls, 95 % intervals clustered by task. A command is a line's first word, or the tool's name."
    )
    drawing = draw_panels(make_rows_panel("share in calls", [each[0] for each in chosen], sides))
    heads = ("run", "command", "end", "count", "calls", "share", "low", "high")
    return replace(figure, caption=caption, heads=heads, rows=rows, drawing=drawing)
