"""Research questions RQ0 to RQ3 of the thesis, answered from run folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from coderepairrl.report.charts import OTHER
from coderepairrl.report.plots import choose_alpha, ema
from coderepairrl.report.thesis.attempts import END_SHARE, ThesisRun, split_ends
from coderepairrl.report.thesis.marks import Figure
from coderepairrl.report.thesis.success import choose_measure, compare_ends, list_estimates
from coderepairrl.report.verdict import describe_results
from coderepairrl.stats import Interval, mean_interval
from coderepairrl.stats.measures import fit_one_line
from coderepairrl.stats.paired import Array, adjust_holm, bootstrap
from coderepairrl.stats.power import ALPHA

_COMMANDS = 3
"""Commands that are named among those that rise most, and fall most."""
_NEAR = 0.1
"""Share of the peak that a plateau may lose."""
_TIERS = {"completed": "Tier 1, operates: ", "ended by itself": "", "resolved": "Tier 2, repairs: "}
_FEWEST = 5
"""Clusters on a side, of which a bootstrap has an interval."""
Side = Sequence[tuple[Hashable, float]]
"""Values with their clusters."""


class Finding(NamedTuple):
    """Number behind an answer."""

    quantity: str
    interval: Interval
    n: int
    unit: str
    p: float | None = None


Answer = tuple[str, Sequence[Finding]]


def make_question_figures(runs: Sequence[ThesisRun]) -> Iterator[Figure]:
    """Make the answers, and a table of their numbers."""
    answers = [(run.name, question, answer(run)) for run in runs for question, answer in _QUESTIONS.items()]
    caption = (
        "Brackets are 95 % intervals. Early and late: first and last "
        f"{END_SHARE:.0%} of the steps. Slopes and differences of these: bootstrap of tasks, or of blocks of adjacent "
        f"steps (cube root of {END_SHARE:.0%} of them), from {_FEWEST} on a side. Evaluations: paired by task; p: sign "
        "flips."
    )
    rows = [(run, question, text) for run, question, (text, _) in answers]
    first = f"All numbers, with n, are in the next table. {caption}"
    yield Figure("questions", "Research questions", first, ("run", "question", "answer"), rows)
    numbers = [
        (run, question[:3], each.quantity, *each.interval, each.n, each.unit, each.p)
        for run, question, (_, findings) in answers
        for each in findings
    ]
    heads = ("run", "question", "quantity", "value", "low", "high", "n", "unit", "p")
    missing = "" if numbers else "no answer is known"
    yield Figure("question-numbers", "Numbers behind the answers", caption, heads, numbers, missing=missing)


# -- intervals


def compare_sides(quantity: str, unit: str, sides: Sequence[Side], *, share: bool = False) -> list[Finding]:
    """Early and late mean and their difference, with intervals from whole clusters; none without values on a side."""
    early, late = sides
    if not early or not late:
        return []
    columns = zip(*((value, 1, 0, 0) for _, value in early), *((0, 0, value, 1) for _, value in late), strict=True)
    clusters = [cluster for cluster, _ in (*early, *late)]
    change = bootstrap([*columns], clusters, lambda m: _divide(m[2], m[3]) - _divide(m[0], m[1]))
    assert change is not None  # both sides have values
    if min(len({cluster for cluster, _ in side}) for side in sides) < _FEWEST:
        change = Interval(change.value, None, None)
    means = [mean_interval([value for _, value in side], [c for c, _ in side], share=share) for side in sides]
    numbers = zip(("early", "late", "late - early"), (*means, change), (early, late, clusters), strict=True)
    return [Finding(f"{quantity}, {end}", interval, len(values), unit) for end, interval, values in numbers]


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


def _describe_change(change: Interval, p: float = 0.0) -> str:
    if change.low is None:
        return "too few for an interval"
    shown = p <= ALPHA and (change.above(0) or change.is_all_below(0))
    return ("rose" if change.value > 0 else "fell") if shown else "no difference shown"


# -- answers


def answer_rq0(run: ThesisRun) -> Answer:
    """Trend of the reward and its deviation, plateau or decline, and order of the evaluations."""
    findings: list[Finding] = []
    for measure in ("reward", "reward_std"):
        points = [(step["step"], step[measure]) for step in run.report.steps if step.get(measure) is not None]
        if len(points) < 2:
            return f"Not known: fewer than two steps with {measure}.", findings
        count = max(1, round(END_SHARE * len(points)))
        blocks = [at // round(count ** (1 / 3)) for at in range(len(points))]
        slope = Finding(f"slope of {measure} per 100 steps", estimate_slope(points, blocks), len(points), "steps")
        units = [(block, value) for block, (_, value) in zip(blocks, points, strict=True)]
        findings += [slope, *compare_sides(measure, "steps", (units[:count], units[-count:]))]
    reward, spread = (_describe_change(each.interval) for each in findings[::4])
    text = f"Trend of the reward over steps: {reward}; of its deviation within groups: {spread}"
    return f"{text}. {_describe_peak(run)}. {_describe_order(run)}.", findings


def _describe_peak(run: ThesisRun) -> str:
    rewards = {step["step"]: step["reward"] for step in run.report.steps if step.get("reward") is not None}
    alpha = choose_alpha(len(rewards), OTHER)
    pairs = zip(ema([*rewards.values()], alpha), rewards, strict=True)
    smooth = [(value, step) for value, step in pairs if value is not None]
    (peak, step), (last, _) = max(smooth), smooth[-1]
    ending = "a decline" if last < peak - _NEAR * abs(peak) else "a plateau" if last < peak else "the peak"
    return f"The reward's EMA ({alpha:.2g}) peaked in step {step} at {peak:.3g} and ended at {last:.3g}: {ending}"


def _describe_order(run: ThesisRun) -> str:
    measure, name = choose_measure([run]), next(iter(run.report.evaluated), "")
    means = [row[-3] for row in list_estimates(run, [measure]) if row[1] == name]
    if len(means) < 2:
        return "Whether evaluations are monotone is not known: fewer than two"
    falls = sum(later < earlier for earlier, later in pairwise(means))
    order = f"fell {falls} times" if falls else "never fell"
    return f"Over n = {len(means)} evaluations {measure} {order}"


def answer_rq1(run: ThesisRun) -> Answer:
    """Success of calls while calls remain (learning to act), calls per attempt (to be selective), and commands."""
    ends = split_ends(run)
    sides = [[each for each in side if each.calls_known] for side in (ends.early, ends.late)]
    made = [[(each, call) for each in side for call in each.calls] for side in sides]
    if not all(made):
        return f"Not known: {ends.missing or 'no tool calls early or late'}.", []
    success = [[(each.task, float(call.ok)) for each, call in side if each.reason != "calls"] for side in made]
    calls = [[(each.task, float(len(each.calls))) for each in side] for side in sides]
    findings = compare_sides("calls per attempt", "attempts", calls)
    text = f"Learning to be selective, calls per attempt: {_describe_change(findings[-1].interval)}."
    if found := compare_sides("success of calls while calls remain", "calls", success, share=True):
        text = f"Learning to act, success of calls while calls remain: {_describe_change(found[-1].interval)}. {text}"
    findings += found
    early, late = (Counter(call.command for _, call in side) for side in made)
    rises = sorted((late[name] / late.total() - early[name] / early.total(), name) for name in early | late)
    for word, sign in (("rises", 1), ("falls", -1)):
        names = [name for rise, name in rises[::-sign] if sign * rise > 0][:_COMMANDS]
        shown = [f"{fit_one_line(name, 24)} ({early[name]} calls early, {late[name]} late)" for name in names]
        text += f" Share in {early.total():,} and {late.total():,} calls {word} most: {', '.join(shown) or 'none'}."
        for name in names:
            used = [[(each.task, float(call.command == name)) for each, call in side] for side in made]
            findings += compare_sides(f"share of {fit_one_line(name, 24)}", "calls", used, share=True)[2:]
    return text, findings


def answer_rq2(run: ThesisRun) -> Answer:
    """Whether the policy operates the harness (tier 1), and whether it repairs (tier 2), last against first."""
    by_step = next(iter(run.report.evaluated.values()), {})
    tiers = {measure: each for measure in _TIERS for each in compare_ends(by_step, measure)}
    if not tiers:
        return "Not known: fewer than two evaluations of the same tasks.", []
    text, findings = "", list[Finding]()
    for measure, tier in _TIERS.items():
        verdicts = describe_results([tiers[measure]] if measure in tiers else []).verdicts
        text += f" {tier}{verdicts[0] if verdicts else 'not known, no test ran.'}"
    for measure, each in tiers.items():
        findings += [
            Finding(f"{measure}, {each.before}", each.early, each.tasks, "tasks"),
            Finding(f"{measure}, {each.after}", each.late, each.tasks, "tasks"),
            Finding(f"{measure}, {each.after} - {each.before}", each.change, each.tasks, "tasks", each.p),
        ]
    return text.strip(), findings


def answer_rq3(run: ThesisRun) -> Answer:
    """Changes by language: tasks that training met again, and evaluations."""
    text, findings = "", list[Finding]()
    slices = [each for each in (*run.report.repeated, *run.report.comparisons) if each.slice.startswith("language ")]
    for before, after in dict.fromkeys((each.before, each.after) for each in slices):
        for measure in ("reward", "tests"):
            changes = [
                (each.slice.partition(" ")[2], each.changes[measure])
                for each in slices
                if each.after == after and measure in each.changes
            ]
            claims = []
            for (language, change), p in zip(changes, adjust_holm([each.p for _, each in changes]), strict=True):
                quantity = f"{measure} in {language}, {after} - {before}"
                findings.append(Finding(quantity, change.change, change.tasks, "tasks", p))
                claims.append(f"{language} {_describe_change(change.change, p)}")
            text += f"{measure.capitalize()}, {after} against {before}: {', '.join(claims)}. " if claims else ""
    if not findings:
        return "Not known: no tasks of several languages were met twice, in training or in evaluations.", []
    return f"{text}p: corrected for the languages (Holm).", findings


_QUESTIONS: Mapping[str, Callable[[ThesisRun], Answer]] = {
    "RQ0: does training converge?": answer_rq0,
    "RQ1: does the policy adapt to its harness?": answer_rq1,
    "RQ2: does success verified by tests improve?": answer_rq2,
    "RQ3: do all languages improve?": answer_rq3,
}
