"""Comparisons as sentences and tables, every number with interval and method."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.printable import counted
from coderepairrl.report import published
from coderepairrl.report.comparison import (
    Comparison,
    PlanTable,
    Question,
    Unpaired,
    compare,
    compare_counts,
    counted_only,
    notes,
    plan_sample_size,
    settings_that_differ,
)
from coderepairrl.report.foreign import RESOLVED
from coderepairrl.report.outcomes import Counts, Outcomes, read_outcomes
from coderepairrl.report.reading import as_json
from coderepairrl.stats import TOO_FEW, Interval
from coderepairrl.stats.power import ALPHA

_UNDEFINED = "undefined: nothing varies"
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    char: "\\" + char for char in "&%$#_{}"
}


@dataclass(frozen=True, slots=True)
class Table:
    """Table of text; the first column names rows."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Result:
    """Verdicts, tables and notes to print."""

    verdicts: Sequence[str]
    tables: Sequence[Table]
    notes: Sequence[str]
    numbers: Mapping[str, Any]


def result(
    found: Sequence[Comparison | Unpaired],
    planned: PlanTable | None = None,
    settings: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    notes: Sequence[str] = (),
) -> Result:
    """Describe comparisons, a plan, and differing settings."""
    verdicts, tables = [describe_comparison(each) for each in found], [_comparison_table(each) for each in found]
    for each in found:
        if isinstance(each, Comparison) and each.pass_at:
            verdicts.append(boundary(each))
            tables.append(_curves(each))
        if isinstance(each, Comparison) and each.parts:
            tables.append(_slices_table(each))
        if isinstance(each, Comparison) and each.labels:
            tables.append(_labels(each))
    if planned:
        verdicts += [] if found else [_plan_sentence(planned)]
        tables.append(_plan_table(planned))
    if settings:
        names = [side if isinstance(side, str) else side.name for each in found for side in (each.before, each.after)]
        heads = list(dict.fromkeys(names))
        rows = [(key, *("-" if value is None else str(value) for value in row)) for key, row in settings.items()]
        tables.append(Table("what differs in their settings", ("setting", *heads), rows))
    numbers = {
        "verdicts": verdicts,
        "comparisons": [_verdict_as_json(each) for each in found],
        "plan": as_json(planned),
        "settings": as_json(settings),
        "notes": list(notes),
    }
    return Result(verdicts, tables, notes, numbers)


def render(result: Result, form: str) -> str:
    """Format as ``text``, ``markdown``, ``latex`` or ``json``. Raises KeyError."""
    return FORMATS[form](result)


# -- the command


def answer(policies: Sequence[str], question: Question) -> Result:
    """Answer `crrl compare`. Raises `UsageError` for inadmissible comparisons."""
    if not question.published:
        return _compare_runs(policies, question)
    listed, lines = _published(), list(published.read_published().values())
    measured = _compare_runs(policies, question) if policies or question.plan is not None else Result([], [], [], {})
    numbers = {**measured.numbers, "published": as_json(lines)}
    return Result(
        measured.verdicts, [*measured.tables, listed], [*dict.fromkeys([*measured.notes, _OF_OTHERS])], numbers
    )


_OF_OTHERS = (
    "Published numbers were not run here, and compare neither with each other nor with ours: scaffolds, limits, "
    "sampling and dates differ. Intervals are Wilson's, as if of one attempt at each of independent tasks."
)


def _published() -> Table:
    heads = ("name", "system", "scaffold", "benchmark", "value", "what it is", "source")
    rows = [
        (
            f"{published.PREFIX}{each.name}",
            each.system,
            each.scaffold,
            f"{each.benchmark}, n = {each.tasks}",
            str(each.interval) if each.interval else f"similarity {each.similarity}, interval unknown",
            each.how,
            each.source,
        )
        for each in published.read_published().values()
    ]
    return Table(published.MARK, heads, rows)


def _compare_runs(policies: Sequence[str], question: Question) -> Result:
    if not ALPHA < question.power < 1:
        raise UsageError(f"a power of {question.power:g} is none", fix="it is above 0.05 and below 1: --power 0.8")
    if question.plan is not None and not 0 < question.plan <= 100:
        raise UsageError(f"{question.plan:g} points cannot be planned for", fix="more than 0 and at most 100: --plan 3")
    if question.discordance is not None and question.plan is None:
        raise UsageError("--discordance is of a plan", fix="say how many points are to be shown: --plan 3")
    if question.cluster not in ("repository", "task"):
        raise UsageError(f"no clusters are called {question.cluster!r}", fix="--cluster repository, or --cluster task")
    if question.margin is not None and question.margin <= 0:
        raise UsageError(f"a margin of {question.margin:g} is none", fix="two policies within 3 points: --margin 3")
    if question.tasks is not None and question.metric != RESOLVED:
        raise UsageError(
            f"--tasks says which tasks are unresolved, and nothing of {question.metric!r}", fix="leave out --tasks"
        )
    comparisons: list[Comparison | Unpaired] = []
    settings, remarks = {}, list[str]()
    if len(policies) == 1 or (not policies and (question.plan is None or question.discordance is None)):
        raise UsageError(
            "a comparison takes two policies",
            fix="crrl compare A B; without any a plan takes a discordance: crrl compare --plan 3 --discordance 0.13",
        )
    if policies:
        read = [read_outcomes(source, question.metric, question.tasks) for source in policies]
        outcomes = [each for each in read if isinstance(each, Outcomes)]
        if len(outcomes) == len(read):
            compared = compare(outcomes, question)
            comparisons += compared
            settings, remarks = settings_that_differ(outcomes), notes(outcomes, compared)
        else:
            comparisons += _counts(question, read)
            remarks += [_OF_OTHERS] if any(each.startswith(published.PREFIX) for each in policies) else []
    planned = None
    if question.plan is not None:
        first = comparisons[0] if comparisons else None
        if question.discordance is None and not isinstance(first, Comparison):
            raise UsageError("counts do not say how often policies differ", fix="assume it: --discordance 0.13")
        measured = question.discordance is None and isinstance(first, Comparison)
        by = first if measured and isinstance(first, Comparison) else float(question.discordance or 0)
        planned = plan_sample_size(question.plan / 100, by, question.power)
    return result(comparisons, planned, settings, remarks)


def _counts(question: Question, read: Sequence[Outcomes | Counts]) -> list[Unpaired]:
    if question.metric != RESOLVED or question.margin is not None or question.pass_at or question.pairs:
        raise UsageError(
            "a count says how many tasks are resolved, and nothing else",
            fix="leave out --metric, --margin, --pass-at and --all-pairs, or name what says which tasks are",
        )
    first, *further = (each if isinstance(each, Counts) else counted_only(each) for each in read)
    return [compare_counts(first, other, question.power) for other in further]


# -- sentences


def describe_comparison(found: Comparison | Unpaired) -> str:
    """Describe a comparison in a sentence."""
    return _unpaired_verdict(found) if isinstance(found, Unpaired) else _paired_verdict(found)


def _paired_verdict(found: Comparison) -> str:
    gap = f"{found.after} - {found.before} = {signed(found.change, found.share)} on {found.metric}"
    small = ""
    if found.equivalence and found.equivalence.p <= ALPHA:
        margin = _amount(found.equivalence.margin, found.share)
        small = f", and it is smaller than {margin} (two one-sided tests, {p_text(found.equivalence.p)})"
    if found.claimed:
        side = "above" if found.change.value > 0 else "below"
        return f"{found.after} is {side} {found.before}: {gap}, {p_text(found.adjusted)}{_corrected(found)}{small}."
    if small:
        return f"{found.after} and {found.before} are equivalent: {gap}{small}."
    if found.change.low is None:
        return (
            f"Nothing can be claimed: {gap}; {counted(found.clusters, 'cluster')} of tasks is too few for an interval."
        )
    doubt = ""
    if found.excludes_none:
        doubt = f"; the interval leaves out 0, but the permutation test does not reject ({p_text(found.adjusted)})"
    if found.unit != "tasks" and found.p_tasks <= ALPHA:
        where = f"beyond these {counted(found.tasks, 'task')}"
        return (
            f"No difference can be claimed {where}, for other repositories: {gap}{doubt}; on these tasks themselves "
            f"there is one (sign flips of tasks, {p_text(found.p_tasks)}{_corrected(found)}); {_seen(found)}."
        )
    return f"No difference can be claimed: {gap}{doubt}; {_seen(found)}."


def _corrected(found: Comparison) -> str:
    return f" (corrected for {found.comparisons} comparisons)" if found.comparisons > 1 else ""


def _seen(found: Comparison) -> str:
    tasks = counted(found.tasks, "task")
    if found.smallest_shown is None:
        return f"no difference, however large, could have been claimed of {tasks}"
    return f"the smallest difference that {tasks} could have shown is {least(found.smallest_shown, found.share)}"


def _unpaired_verdict(found: Unpaired) -> str:
    difference = (
        f"{found.after.name} - {found.before.name} = {signed(found.change, True)} however the tasks overlap, "
        f"p from {found.p[0]:.3g} to {found.p[1]:.3g}"
    )
    if found.claimed:
        return f"A difference can be claimed: {difference}."
    could = (
        f"no difference, however large, could have been claimed of {found.before.tasks} tasks"
        if found.seen is None
        else f"the smallest difference that {found.before.tasks} tasks could have shown is "
        f"{_ends(*found.seen, True)} points, by the overlap"
    )
    if found.p[0] <= ALPHA:
        return f"Whether there is a difference depends on which tasks were solved: {difference}; {could}."
    return f"No difference can be claimed: {difference}; {could}."


def boundary(found: Comparison) -> str:
    """Describe pass@k: new skills, or the old ones more reliably."""
    first, last = found.pass_at[0], found.pass_at[-1]
    few, many = (f"{signed(each.change, True)} at k = {each.k}" for each in (first, last))
    if len(found.pass_at) == 1:
        return f"pass@{first.k}: {found.after} - {found.before} = {signed(first.change, True)}."
    if last.change.above(0):
        claim = f"{found.after} solves within {last.k} attempts what {found.before} does not"
    elif last.change.below(0):
        claim = f"{found.before} solves within {last.k} attempts what {found.after} does not"
    elif first.change.above(0):
        claim = (
            f"{found.after} is surer in a single attempt, and no new skill is shown"
            if first.k == 1
            else "no new skill is shown"
        )
    else:
        claim = "no new skill is shown"
    return f"pass@k: {claim}: {few}, {many}."


def _plan_sentence(planned: PlanTable) -> str:
    row = planned.tasks[0]
    return (
        f"To show {_amount(planned.effect, True)} with a power of {planned.power:.0%} takes "
        f"{_tasks(row)} tasks with {counted(row.attempts, 'attempt')} at each."
    )


# -- tables


def _comparison_table(found: Comparison | Unpaired) -> Table:
    if isinstance(found, Unpaired):
        title = f"resolved: {found.before.tasks} tasks, of which nobody says who solved which"
        rows = _unpaired_rows(found)
    else:
        title, rows = _title(found), _verdict_rows(found)
    return Table(title, ("", "value [95 % interval]", "method"), rows)


def _title(found: Comparison) -> str:
    fewest, most = sorted(found.attempts)
    attempts = counted(fewest, "attempt") if fewest == most else f"{fewest} and {most} attempts"
    clusters = f" in {found.clusters} repositories" if found.unit == "repositories" else ""
    return f"{found.metric}: {counted(found.tasks, 'task')}{clusters}, {attempts} at each"


def _verdict_rows(found: Comparison) -> list[tuple[str, str, str]]:
    share, unit = found.share, found.unit
    score = f"of {found.clusters} {unit}, Student's t" if found.clusters > 1 else "none: one cluster"
    of_rate, of_change = ("Wilson's score interval ", "Tango's score interval ") if share else ("", "")
    rows = [
        (found.before, rate(found.early, share), of_rate + score),
        (found.after, rate(found.late, share), of_rate + score),
        ("difference", signed(found.change, share), of_change + score),
        ("difference", signed(found.bootstrap, share), f"paired bootstrap of {unit}, expanded percentiles"),
        (
            "Cohen's d",
            _UNDEFINED if found.d is None else found.d.text("+.2f"),
            f"pooled deviation; bootstrap of {unit}",
        ),
    ]
    if found.h is not None:
        rows.append(("Cohen's h", found.h.text("+.2f"), f"bootstrap of {unit}"))
    rows.append(("p", p_value(found.p), f"sign flips of {unit}, two-sided"))
    if found.comparisons > 1:
        rows.append(("p, corrected", p_value(found.adjusted), f"Holm, {found.comparisons} comparisons"))
    if unit != "tasks":
        rows.append(("p, of these tasks", p_value(found.p_tasks), "sign flips of tasks, two-sided" + _corrected(found)))
    if found.mcnemar:
        table = found.mcnemar
        who = f"{table.both} both, {table.only_before} {found.before} alone, {table.only_after} {found.after} alone"
        rows += [
            ("p, McNemar exact", p_value(table.exact), f"{who}, {table.neither} neither"),
            ("p, McNemar mid-p", p_value(table.mid_p), "of the same"),
        ]
    rows.append(_seen_row(found))
    if found.equivalence:
        margin = _amount(found.equivalence.margin, share)
        inner = found.equivalence.interval
        ends = TOO_FEW if inner.low is None or inner.high is None else _ends(inner.low, inner.high, share)
        rows.append((f"p, within {margin}", p_value(found.equivalence.p), f"two one-sided tests; 90 % interval {ends}"))
    return rows


def _seen_row(found: Comparison) -> tuple[str, str, str]:
    method = f"power {found.power:.0%}, two-sided 5 %"
    if found.spread:
        method += f"; Connor 1987, design effect {found.spread.design:.2f}; interval from that of the discordance"
    else:
        method += "; Student's t; interval from that of the variance"
    smallest = found.smallest_shown
    return ("smallest to be shown", "none" if smallest is None else least(smallest, found.share), method)


def _unpaired_rows(found: Unpaired) -> list[tuple[str, str, str]]:
    overlaps = "of all overlaps"
    return [
        (found.before.name, rate(found.early, True), "Wilson's score interval"),
        (found.after.name, rate(found.late, True), "Wilson's score interval"),
        ("difference", signed(found.change, True), f"Tango's score interval, least and greatest end {overlaps}"),
        ("p, McNemar exact", f"{found.p[0]:.3g} to {found.p[1]:.3g}", f"least and greatest {overlaps}"),
        (
            "smallest to be shown",
            "none" if found.seen is None else f"{_ends(*found.seen, True)} points",
            f"power {found.power:.0%}, two-sided 5 %; Connor 1987; least and greatest {overlaps}",
        ),
    ]


def _curves(found: Comparison) -> Table:
    rows = [
        (str(each.k), rate(each.before, True), rate(each.after, True), signed(each.change, True))
        for each in found.pass_at
    ]
    title = f"pass@k, unbiased (Chen et al. 2021); score intervals of {found.clusters} {found.unit}, pointwise"
    return Table(title, ("k", found.before, found.after, "difference"), rows)


def _slices_table(found: Comparison) -> Table:
    rows = [
        (
            part.name,
            str(part.tasks),
            rate(part.early, found.share),
            rate(part.late, found.share),
            signed(part.change, found.share),
            p_value(part.p),
        )
        for part in found.parts
    ]
    title = f"parts of the tasks; p of sign flips, corrected for {len(rows)} parts (Holm)"
    return Table(title, ("part", "tasks", found.before, found.after, "difference", "p, corrected"), rows)


def _labels(found: Comparison) -> Table:
    rows = [
        (each.kind, str(each.tasks), *(rate(side, True) for side in (each.early, each.late)),
         signed(each.change, True), signed(each.accuracy, True))
        for each in found.labels
    ]  # fmt: skip
    title = "labels by kind of task: macro-F1 in hundredths, bootstrap of whole clusters"
    heads = ("kind", "tasks", found.before, found.after, "difference of macro-F1", "difference of accuracy")
    return Table(title, heads, rows)


def _plan_table(planned: PlanTable) -> Table:
    square = planned.discordance
    seen = f"{100 * square.value:.1f} %" if planned.given == "assumed" else rate(square, True)
    title = (
        f"to show {_amount(planned.effect, True)} with power {planned.power:.0%}, two-sided 5 % (Connor 1987): "
        f"discordance {seen} {planned.given}, design effect {planned.design_effect:.2f}"
    )
    rows = [(str(row.attempts), _tasks(row), _plan_method(row)) for row in planned.tasks]
    return Table(title, ("attempts per task", "tasks", "method"), rows)


def _tasks(row: Any) -> str:
    if row.low == row.high:
        return f"{row.high:,}"
    if row.value is None:
        return f"{row.low:,} to {row.high:,}"
    return f"{row.value:,} [{row.low:,}, {row.high:,}]"


def _plan_method(row: Any) -> str:
    if row.value is None and row.low != row.high:
        return "a range: one attempt per task does not tell chance from skill"
    if row.low == row.high:
        return "by what is assumed, or the least for any two policies that differ so much"
    return "from the 95 % interval of the discordance"


# -- numbers


def _amount(value: float, share: bool) -> str:
    return f"{100 * value:.3g} points" if share else f"{value:.3g}"


def _ends(low: float, high: float, share: bool) -> str:
    return f"[{100 * low:.1f}, {100 * high:.1f}]" if share else f"[{low:.3g}, {high:.3g}]"


def _bracket(found: Interval, share: bool) -> str:
    return f"[{TOO_FEW}]" if found.low is None or found.high is None else _ends(found.low, found.high, share)


def rate(interval: Interval, share: bool) -> str:
    """Mean with interval; a `share` in per cent."""
    return (
        f"{100 * interval.value:.1f} % {_bracket(interval, share)}"
        if share
        else f"{interval.value:.3g} {_bracket(interval, share)}"
    )


def signed(interval: Interval, share: bool) -> str:
    """Difference with interval; a `share` in points."""
    if share:
        return f"{100 * interval.value + 0.0:+.1f} points {_bracket(interval, share)}"
    return f"{interval.value + 0.0:+.3g} {_bracket(interval, share)}"


def least(interval: Interval, share: bool) -> str:
    """Smallest detectable difference; without an interval, for any discordance."""
    if not share:
        return f"{interval.value:.3g} {_bracket(interval, False)}"
    ends = "whatever the discordance" if interval.low is None else _bracket(interval, True)
    return f"{100 * interval.value:.1f} points {ends}"


def p_value(p: float) -> str:
    """P-value with two digits, or "< 0.0001"."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def p_text(p: float) -> str:
    """P-value with its sign.

    >>> p_text(0.0321), p_text(1e-9)
    ('p = 0.032', 'p < 0.0001')
    """
    return f"p {p_value(p)}" if p < 1e-4 else f"p = {p_value(p)}"


def _verdict_as_json(found: Comparison | Unpaired) -> dict[str, Any]:
    data: dict[str, Any] = as_json(found) | {"claimed": found.claimed}
    if isinstance(found, Unpaired):
        data |= {"before": found.before.name, "after": found.after.name, "tasks": found.before.tasks}
        return data | {"p_of_overlaps": data.pop("p"), "smallest_shown_of_overlaps": data.pop("seen")}
    data |= {"design_effect": found.spread and found.spread.design}
    data |= {"discordance": found.spread and as_json(found.spread.square)}
    del data["spread"]
    if found.equivalence:
        data["equivalence"]["interval90"] = data["equivalence"].pop("interval")
    return data | {"methods": {f"{name}, {value}": method for name, value, method in _verdict_rows(found)}}


# -- formats


def _as_text_table(result: Result) -> str:
    parts = ["\n".join(result.verdicts)]
    for table in result.tables:
        widths = [max(map(len, column)) for column in zip(table.heads, *table.rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (table.heads, *table.rows)
        ]
        parts.append("\n".join([table.title, *(f"  {line}" for line in lines)]))
    return "\n\n".join([*parts, *(["\n".join(result.notes)] if result.notes else [])])


def _markdown(result: Result) -> str:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    parts = [*result.verdicts]
    for table in result.tables:
        parts += [
            f"**{table.title}**",
            "\n".join([row(table.heads), "|---" * len(table.heads) + "|", *map(row, table.rows)]),
        ]
    return "\n\n".join([*parts, *result.notes])


def _latex(result: Result) -> str:
    # needs the package booktabs alone
    parts = [escape(each) for each in result.verdicts]
    for table in result.tables:
        lines = [" & ".join(map(escape, row)) + r" \\" for row in (table.heads, *table.rows)]
        head = [r"\begin{table}", rf"\caption{{{escape(table.title)}}}"]
        head += [rf"\begin{{tabular}}{{{'l' * len(table.heads)}}}", r"\toprule", lines[0], r"\midrule"]
        parts.append("\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}", r"\end{table}"]))
    return "\n\n".join([*parts, *map(escape, result.notes)])


def escape(text: str) -> str:
    """Escape `text` for LaTeX."""
    plain = "".join(_LATEX.get(char, char) for char in text).replace("< 0", r"$<$ 0")
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", plain)  # a minus, no hyphen


FORMATS: Mapping[str, Callable[[Result], str]] = {
    "text": _as_text_table,
    "markdown": _markdown,
    "latex": _latex,
    "json": lambda result: json.dumps(result.numbers, allow_nan=False),
}
