"""Research questions RQ0 to RQ3 of the thesis, answered from run folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from coderepairrl.printable import format_count
from coderepairrl.report.charts import EMA_ALPHA
from coderepairrl.report.plots.panels import choose_alpha, ema
from coderepairrl.report.thesis.attempts import END_SHARE, ThesisRun, select_trained, split_ends
from coderepairrl.report.thesis.marks import Figure
from coderepairrl.report.thesis.success import choose_evaluation, compare_ends, list_estimates
from coderepairrl.report.verdict import describe_results
from coderepairrl.stats import Interval, mean_interval
from coderepairrl.stats.measures import fit_one_line
from coderepairrl.stats.paired import adjust_holm, bootstrap, divide
from coderepairrl.stats.power import ALPHA

_MAX_COMMANDS = 3
"""Most commands that an answer names: of those used more, and of those used less."""
_LONGEST_NAME = 24
_NEAR_PEAK = 0.1
"""Share of the peak that a plateau may lose."""
_TIERS = {"completed": "Tier 1, operates: ", "ended by itself": "", "resolved": "Tier 2, repairs: "}
"""Measures of RQ2, with the words before their verdicts."""
_FEWEST_CLUSTERS = 5
"""Fewest clusters for a bootstrap interval; for a difference, on each side."""
Side = Sequence[tuple[Hashable, float]]
"""Pairs of cluster and value, early or late."""


class Finding(NamedTuple):
    """Number behind an answer."""

    quantity: str
    interval: Interval
    n: int
    unit: str
    p: float | None = None


Answer = tuple[str, Sequence[Finding]]


def make_question_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make the answers of the runs that trained, and a table of their numbers."""
    trained = select_trained(runs)
    answers = [(run.name, question, answer(run)) for run in trained for question, answer in _QUESTIONS.items()]
    caption = (
        f"Brackets are 95 % intervals. Early and late: the first and last {100 * END_SHARE:g} % of the steps. "
        "Intervals of slopes and of differences between early and late: bootstrap of tasks, or of blocks of adjacent "
        "steps (block length: the cube root of the number of early steps), if there are at least "
        f"{_FEWEST_CLUSTERS} (for differences, on each side). Evaluations are paired by task; p: sign flips. Calls "
        "within the limit: those of attempts that the limit did not end."
    )
    rows = [(run, question, text) for run, question, (text, _) in answers]
    more = f"{caption} The next table has all numbers, with n."
    yield Figure("questions", "Research questions", more, ("run", "question", "answer"), rows)
    numbers = [
        (run, question[:3], finding.quantity, *finding.interval, finding.n, finding.unit, finding.p)
        for run, question, (_, findings) in answers
        for finding in findings
    ]
    heads = ("run", "question", "quantity", "value", "low", "high", "n", "unit", "p")
    missing = "" if numbers else "no answer is known"
    yield Figure("question-numbers", "Numbers behind the answers", caption, heads, numbers, missing=missing)


# -- intervals


def compare_sides(quantity: str, unit: str, sides: Sequence[Side], *, share: bool = False) -> list[Finding]:
    """Compare early and late means, with intervals over clusters; empty without values on a side."""
    early, late = sides
    if not early or not late:
        return []
    # columns: early values and their number, late values and their number; `bootstrap` passes the mean of each
    columns = zip(*((value, 1, 0, 0) for _, value in early), *((0, 0, value, 1) for _, value in late), strict=True)
    clusters = [cluster for cluster, _ in (*early, *late)]
    change = bootstrap([*columns], clusters, lambda m: divide(m[2], m[3]) - divide(m[0], m[1]))
    assert change is not None  # both sides have values
    if min(len({cluster for cluster, _ in side}) for side in sides) < _FEWEST_CLUSTERS:
        change = Interval(change.value, None, None)
    means = [mean_interval([value for _, value in side], [c for c, _ in side], share=share) for side in sides]
    numbers = zip(("early", "late", "late - early"), (*means, change), (early, late, clusters), strict=True)
    return [Finding(f"{quantity}, {end}", interval, len(values), unit) for end, interval, values in numbers]


def estimate_slope(points: Sequence[tuple[int, float]], clusters: Sequence[Hashable]) -> Interval:
    """Estimate the least-squares slope per 100 steps of points (step, value), with its interval."""
    x, y = np.array(points, dtype=float).T
    x = (x - x.mean()) / 100
    columns = [column.tolist() for column in (x, y, x * y, x * x)]
    # covariance of x and y, divided by the variance of x
    slope = bootstrap(columns, clusters, lambda m: divide(m[2] - m[0] * m[1], m[3] - m[0] ** 2))
    assert slope is not None  # steps differ
    return slope if len({*clusters}) >= _FEWEST_CLUSTERS else Interval(slope.value, None, None)


def _describe_change(change: Interval, p: float = 0.0) -> str:
    if change.low is None:
        return "too few for an interval"
    differs = p <= ALPHA and (change.is_all_above(0) or change.is_all_below(0))
    return ("rose" if change.value > 0 else "fell") if differs else "no difference shown"


# -- answers


def answer_rq0(run: ThesisRun) -> Answer:
    """Trend of the reward and its deviation, plateau or decline, and order of the evaluations."""
    findings: list[Finding] = []
    trends = []
    for measure in ("reward", "reward_std"):
        points = [(step["step"], step[measure]) for step in run.report.steps if step.get(measure) is not None]
        if len(points) < 2:
            return f"Not known: fewer than two steps with {measure}.", findings
        count = max(1, round(END_SHARE * len(points)))
        blocks = [at // round(count ** (1 / 3)) for at in range(len(points))]
        slope = estimate_slope(points, blocks)
        trends.append(_describe_change(slope))
        findings.append(Finding(f"slope of {measure} per 100 steps", slope, len(points), "steps"))
        values = [(block, value) for block, (_, value) in zip(blocks, points, strict=True)]
        findings += compare_sides(measure, "steps", (values[:count], values[-count:]))
    text = f"Trend of the reward over steps: {trends[0]}; of its deviation within groups: {trends[1]}"
    return f"{text}. {_describe_peak(run)}. {_describe_order(run)}.", findings


def _describe_peak(run: ThesisRun) -> str:
    rewards = {step["step"]: step["reward"] for step in run.report.steps if step.get("reward") is not None}
    alpha = choose_alpha(len(rewards), EMA_ALPHA)
    pairs = zip(ema([*rewards.values()], alpha), rewards, strict=True)
    smooth = [(value, step) for value, step in pairs if value is not None]
    (peak, step), (last, _) = max(smooth), smooth[-1]
    ending = "a decline" if last < peak - _NEAR_PEAK * abs(peak) else "a plateau" if last < peak else "the peak"
    return f"The reward's EMA ({alpha:.2g}) peaked in step {step} at {peak:.3g} and ended at {last:.3g}: {ending}"


def _describe_order(run: ThesisRun) -> str:
    name, measure = choose_evaluation([run])
    means = [estimate.value for estimate in list_estimates(run, [measure]) if estimate.evaluation == name]
    if len(means) < 2:
        return "Whether evaluations rise steadily is not known: fewer than two"
    falls = sum(later < earlier for earlier, later in pairwise(means))
    order = f"fell {format_count(falls, 'time')}" if falls else "never fell"
    return f"Over n = {len(means)} evaluations {measure} {order}"


def answer_rq1(run: ThesisRun) -> Answer:
    """Success of calls (learning to act), calls per attempt (learning to be selective), and commands.

    Success leaves out the attempts that the limit of calls ended.
    """
    ends = split_ends(run)
    sides = [[attempt for attempt in side if attempt.calls_known] for side in (ends.early, ends.late)]
    calls = [[(attempt, call) for attempt in side for call in attempt.calls] for side in sides]
    if not all(calls):
        return f"Not known: {ends.missing or 'no tool calls early or late'}.", []
    counts = [[(attempt.task, float(len(attempt.calls))) for attempt in side] for side in sides]
    findings = compare_sides("calls per attempt", "attempts", counts)
    text = f"Learning to be selective, calls per attempt: {_describe_change(findings[-1].interval)}."
    oks = [[(attempt.task, float(call.ok)) for attempt, call in side if attempt.reason != "calls"] for side in calls]
    quantity = "success of calls within the limit"
    if successes := compare_sides(quantity, "calls", oks, share=True):
        text = f"Learning to act, {quantity}: {_describe_change(successes[-1].interval)}. {text}"
    findings += successes
    early, late = (Counter(call.command for _, call in side) for side in calls)
    changes = sorted((late[name] / late.total() - early[name] / early.total(), name) for name in early | late)
    for verb, sign in (("rose", 1), ("fell", -1)):
        names = [name for change, name in changes[::-sign] if sign * change > 0][:_MAX_COMMANDS]
        listed = [f"{fit_one_line(name, _LONGEST_NAME)} ({early[name]}, {late[name]})" for name in names]
        text += f" Share in calls (early {early.total():,}, late {late.total():,}) {verb} most: "
        text += f"{', '.join(listed) or 'none'}."
        for name in names:
            uses = [[(attempt.task, float(call.command == name)) for attempt, call in side] for side in calls]
            findings += compare_sides(f"share of {fit_one_line(name, _LONGEST_NAME)}", "calls", uses, share=True)[2:]
    return text, findings


def answer_rq2(run: ThesisRun) -> Answer:
    """Whether the policy operates the harness (tier 1), and whether it repairs (tier 2), last against first."""
    by_step = run.report.evaluated.get(choose_evaluation([run])[0], {})
    texts, findings = [], list[Finding]()
    for measure, tier in _TIERS.items():
        comparisons = compare_ends(by_step, measure)
        verdicts = describe_results(comparisons).verdicts
        texts.append(f"{tier}{verdicts[0] if verdicts else 'not known, no test ran.'}")
        for pair in comparisons:
            findings += [
                Finding(f"{measure}, {pair.before}", pair.early, pair.tasks, "tasks"),
                Finding(f"{measure}, {pair.after}", pair.late, pair.tasks, "tasks"),
                Finding(f"{measure}, {pair.after} - {pair.before}", pair.change, pair.tasks, "tasks", pair.p),
            ]
    return (" ".join(texts) if findings else "Not known: fewer than two evaluations of the same tasks."), findings


def answer_rq3(run: ThesisRun) -> Answer:
    """Changes by language: of tasks that training repeated, and of evaluations."""
    text, findings = "", list[Finding]()
    parts = [part for part in (*run.report.repeated, *run.report.comparisons) if part.slice.startswith("language ")]
    for before, after in dict.fromkeys((part.before, part.after) for part in parts):
        for measure in ("reward", "tests"):
            changes = [
                (part.slice.partition(" ")[2], part.changes[measure])
                for part in parts
                if part.after == after and measure in part.changes
            ]
            claims = []
            for (language, change), p in zip(changes, adjust_holm([change.p for _, change in changes]), strict=True):
                quantity = f"{measure} in {language}, {after} - {before}"
                findings.append(Finding(quantity, change.change, change.tasks, "tasks", p))
                claims.append(f"{language} {_describe_change(change.change, p)}")
            text += f"{measure.capitalize()}, {after} against {before}: {', '.join(claims)}. " if claims else ""
    if not findings:
        return "Not known: no tasks of several languages were attempted twice, in training or in evaluations.", []
    return f"{text}p: corrected for the languages (Holm).", findings


_QUESTIONS: Mapping[str, Callable[[ThesisRun], Answer]] = {
    "RQ0: does training converge?": answer_rq0,
    "RQ1: does the policy adapt to its harness?": answer_rq1,
    "RQ2: does success verified by tests improve?": answer_rq2,
    "RQ3: do all languages improve?": answer_rq3,
}
