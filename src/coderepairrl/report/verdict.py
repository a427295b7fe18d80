"""Comparisons as sentences and tables, every number with interval and method."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.printable import format_count
from coderepairrl.report import published
from coderepairrl.report.analysis import LESS_IS_BETTER
from coderepairrl.report.answers import align_columns
from coderepairrl.report.comparison import (
    Comparison,
    ComparisonOptions,
    UnpairedComparison,
    compare_counts,
    compare_outcomes,
    convert_to_counts,
    find_differing_settings,
    list_caveats,
)
from coderepairrl.report.foreign import RESOLVED
from coderepairrl.report.outcomes import Outcomes, PublishedCount, read_outcomes
from coderepairrl.report.reading import to_plain_data
from coderepairrl.stats.intervals import TOO_FEW, Interval
from coderepairrl.stats.power import ALPHA

_UNDEFINED = "undefined: nothing varies"
_HEADS = ("", "value [95 % interval]", "method")
_SMALLEST = "smallest detectable"
_LATEX_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
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


def describe_results(
    comparisons: Sequence[Comparison | UnpairedComparison],
    settings: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    notes: Sequence[str] = (),
) -> Result:
    """Describe comparisons and differing settings."""
    verdicts, tables = list[str](), list[Table]()
    for each in comparisons:
        if isinstance(each, Comparison):
            verdicts.append(_describe_paired(each))
            tables.append(_make_paired_table(each))
        else:
            verdicts.append(_describe_unpaired(each))
            tables.append(_make_unpaired_table(each))
    for pair in comparisons:  # after the verdicts and tables of all comparisons
        if isinstance(pair, Comparison):
            verdicts += _describe_pass_at_k(pair)
            tables += _make_further_tables(pair)
    if settings:
        sides = [side for each in comparisons for side in (each.before, each.after)]
        names = dict.fromkeys(side if isinstance(side, str) else side.name for side in sides)
        tables.append(make_settings_table("what differs in their settings", names, settings))
    numbers = {
        "verdicts": verdicts,
        "comparisons": [_verdict_as_json(each) for each in comparisons],
        "settings": to_plain_data(settings),
        "notes": list(notes),
    }
    return Result(verdicts, tables, notes, numbers)


def make_settings_table(title: str, names: Iterable[str], settings: Mapping[str, Sequence[object]]) -> Table:
    """Make a table of settings, with a column for each of `names`."""
    rows = [(key, *("-" if value is None else str(value) for value in row)) for key, row in settings.items()]
    return Table(title, ("setting", *names), rows)


def render_result(result: Result, form: str) -> str:
    """Format as ``text``, ``markdown``, ``latex`` or ``json``. Raises KeyError."""
    return FORMATS[form](result)


# -- the command


def answer_comparison(policies: Sequence[str], options: ComparisonOptions) -> Result:
    """Answer `crrl compare`. Raises `UsageError` for inadmissible comparisons."""
    if not options.published:
        return _compare_sources(policies, options)
    measured = _compare_sources(policies, options) if policies else Result([], [], [], {})
    notes = [*dict.fromkeys([*measured.notes, _PUBLISHED_NOTE])]
    numbers = {**measured.numbers, "published": to_plain_data(list(published.read_published().values()))}
    return Result(measured.verdicts, [*measured.tables, _make_published_table()], notes, numbers)


_PUBLISHED_NOTE = (
    "Published numbers were not run here, and compare neither with each other nor with ours: scaffolds, limits, "
    "sampling and dates differ. Intervals are Wilson's, as if of one attempt at each of independent tasks."
)


def _make_published_table() -> Table:
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


def _compare_sources(policies: Sequence[str], options: ComparisonOptions) -> Result:
    if not ALPHA < options.power < 1:
        raise UsageError(f"a power of {options.power:g} is impossible", fix="above 0.05 and below 1: --power 0.8")
    if options.cluster not in ("repository", "task"):
        raise UsageError(f"unknown clusters {options.cluster!r}", fix="--cluster repository, or --cluster task")
    if options.at_least is not None and not 0 <= options.at_least < math.inf:
        raise UsageError(f"a gain of {options.at_least:g} is impossible", fix="0 or more: --at-least 5")
    if options.tasks is not None and options.metric != RESOLVED:
        raise UsageError(f"--tasks lists unresolved tasks, without their {options.metric!r}", fix="leave out --tasks")
    if len(policies) < 2:
        raise UsageError("a comparison takes two policies", fix="crrl compare A B")
    sources = [read_outcomes(policy, options.metric, options.tasks) for policy in policies]
    outcomes = [each for each in sources if isinstance(each, Outcomes)]
    if options.tasks is not None and all(each.limits is not None for each in outcomes):  # runs know their tasks
        raise UsageError("--tasks completes reports and outcome files, and none is compared", fix="leave out --tasks")
    if len(outcomes) == len(sources):
        comparisons = compare_outcomes(outcomes, options)
        return describe_results(comparisons, find_differing_settings(outcomes), list_caveats(outcomes, comparisons))
    if options.metric != RESOLVED or options.at_least is not None or options.pass_at or options.pairs:
        raise UsageError(
            "a count holds only the number of resolved tasks",
            fix="leave out --metric, --at-least, --pass-at and --all-pairs, or name outcomes by task",
        )
    first, *others = (each if isinstance(each, PublishedCount) else convert_to_counts(each) for each in sources)
    are_published = any(each.startswith(published.PREFIX) for each in policies)
    counts = [compare_counts(first, other, options.power) for other in others]
    return describe_results(counts, notes=[_PUBLISHED_NOTE] if are_published else [])


# -- sentences


def _describe_paired(pair: Comparison) -> str:
    verdict = _describe_difference(pair)
    if pair.at_least is None:
        return verdict
    return f"{verdict} {describe_gain(pair.metric, pair.change, pair.at_least, pair.share)}"


def _describe_difference(pair: Comparison) -> str:
    change = format_change(pair.change, pair.share)
    if pair.claimed:
        side = "above" if pair.change.value > 0 else "below"
        p = f"{format_p_equation(pair.adjusted)}{_format_correction(pair)}"
        return f"{pair.after} is {side} {pair.before} on {pair.metric}: {change}, {p}."
    difference = f"{pair.after} - {pair.before} = {change} on {pair.metric}"
    if pair.change.low is None:
        clusters = format_count(pair.clusters, "cluster")
        return f"Nothing can be claimed: {difference}; {clusters} of tasks is too few for an interval."
    smallest = format_smallest_difference(pair.smallest_shown, pair.share) if pair.smallest_shown else ""
    detectable = describe_smallest(smallest, format_count(pair.tasks, "task"))
    if pair.excludes_zero:
        p = format_p_equation(pair.adjusted)
        difference += f"; the interval leaves out 0, but the permutation test does not reject ({p})"
    if pair.unit != "tasks" and pair.p_tasks <= ALPHA:
        p = f"{format_p_equation(pair.p_tasks)}{_format_correction(pair)}"
        return (
            f"No difference can be claimed beyond these {format_count(pair.tasks, 'task')}, for other repositories: "
            f"{difference}; on these tasks themselves there is one (sign flips of tasks, {p}); {detectable}."
        )
    return f"No difference can be claimed: {difference}; {detectable}."


def _format_correction(pair: Comparison) -> str:
    return f" (corrected for {pair.comparisons} comparisons)" if pair.comparisons > 1 else ""


def orient_gain(metric: str, change: Interval) -> Interval:
    """Convert a change to a gain: a decrease, where less is better."""
    if metric.removesuffix("_per_patch") not in LESS_IS_BETTER:
        return change
    low, high = (None if end is None else -end for end in change[1:])
    return Interval(-change.value, high, low)


def describe_gain(metric: str, change: Interval, least: float, share: bool) -> str:
    """Describe whether a gain above `least` is shown: by the whole 95 % interval, so one-sided at 2.5 %.

    >>> describe_gain("resolved", Interval(0.1, 0.06, 0.14), 0.05, share=True)
    'A gain of more than 5 points is shown.'
    >>> describe_gain("limit", Interval(0.1, 0.06, 0.14), 0.05, share=True)
    'A decrease of more than 5 points is ruled out.'
    """
    gain = orient_gain(metric, change)
    state = "shown" if gain.is_all_above(least) else "ruled out" if gain.is_all_below(least) else "not shown"
    return f"A {'gain' if gain is change else 'decrease'} of more than {_format_amount(least, share)} is {state}."


def describe_smallest(smallest: str, sample: str) -> str:
    """Describe the `smallest` difference that `sample` could have shown; empty: none."""
    if not smallest:
        return f"no difference, however large, could have been claimed from {sample}"
    return f"the smallest difference that {sample} could have shown is {smallest}"


def _describe_unpaired(counts: UnpairedComparison) -> str:
    difference = (
        f"{counts.after.name} - {counts.before.name} = {format_change(counts.change, True)} however the tasks overlap, "
        f"p from {counts.p[0]:.3g} to {counts.p[1]:.3g}"
    )
    if counts.claimed:
        return f"A difference can be claimed: {difference}."
    smallest = f"{_format_ends(*counts.smallest_shown, True)} points, by the overlap" if counts.smallest_shown else ""
    detectable = describe_smallest(smallest, f"{counts.before.tasks} tasks")
    if counts.p[0] <= ALPHA:
        return f"Whether there is a difference depends on which tasks were solved: {difference}; {detectable}."
    return f"No difference can be claimed: {difference}; {detectable}."


def _describe_pass_at_k(pair: Comparison) -> list[str]:
    """Describe pass@k: more tasks solved (large k), or the same more reliably (k = 1)."""
    if not pair.pass_at:
        return []
    first, last = pair.pass_at[0], pair.pass_at[-1]
    few, many = (f"{format_change(each.change, True)} at k = {each.k}" for each in (first, last))
    if len(pair.pass_at) == 1:
        return [f"pass@{first.k}: {pair.after} - {pair.before} = {format_change(first.change, True)}."]
    claim = "no new skill is shown"
    if last.change.is_all_above(0):
        claim = f"{pair.after} solves within {last.k} attempts what {pair.before} does not"
    elif last.change.is_all_below(0):
        claim = f"{pair.before} solves within {last.k} attempts what {pair.after} does not"
    elif first.change.is_all_above(0) and first.k == 1:
        claim = f"{pair.after} is more reliable in a single attempt, and {claim}"
    return [f"pass@k: {claim}: {few}, {many}."]


# -- tables


def _make_paired_table(pair: Comparison) -> Table:
    fewest, most = sorted(pair.attempts)
    attempts = format_count(fewest, "attempt") if fewest == most else f"{fewest} and {most} attempts"
    clusters = f" in {pair.clusters} repositories" if pair.unit == "repositories" else ""
    title = f"{pair.metric}: {format_count(pair.tasks, 'task')}{clusters}, {attempts} at each"
    return Table(title, _HEADS, _list_statistics(pair))


def _list_statistics(pair: Comparison) -> list[tuple[str, str, str]]:
    """Names, values with intervals, and methods."""
    unit = pair.unit
    sample = f"of {pair.clusters} {unit}, Student's t" if pair.clusters > 1 else "none: one cluster"
    of_rate, of_change = ("Wilson's score interval ", "Tango's score interval ") if pair.share else ("", "")
    before, after, change = _format_sides(pair.early, pair.late, pair.change, pair.share)
    d = _UNDEFINED if pair.d is None else pair.d.text("+.2f")
    rows = [
        (pair.before, before, of_rate + sample),
        (pair.after, after, of_rate + sample),
        ("difference", change, of_change + sample),
        ("difference", format_change(pair.bootstrap, pair.share), f"paired bootstrap of {unit}, expanded percentiles"),
        ("Cohen's d", d, f"pooled deviation; bootstrap of {unit}"),
        ("p", format_p(pair.p), f"sign flips of {unit}, two-sided"),
    ]
    if pair.comparisons > 1:
        rows.append(("p, corrected", format_p(pair.adjusted), f"Holm, {pair.comparisons} comparisons"))
    if unit != "tasks":
        method = f"sign flips of tasks, two-sided{_format_correction(pair)}"
        rows.append(("p, of these tasks", format_p(pair.p_tasks), method))
    if pair.mcnemar:
        table = pair.mcnemar
        solved = f"{table.both} both, {table.only_before} {pair.before} alone, {table.only_after} {pair.after} alone"
        rows.append(("p, McNemar exact", format_p(table.exact), f"{solved}, {table.neither} neither"))
        rows.append(("p, McNemar mid-p", format_p(table.mid_p), "of the same"))
    method = "Student's t; interval from that of the variance"
    if pair.spread:
        method = f"Connor 1987, design effect {pair.spread.design:.2f}; interval from that of the discordance"
    smallest = "none" if pair.smallest_shown is None else format_smallest_difference(pair.smallest_shown, pair.share)
    rows.append((_SMALLEST, smallest, f"power {pair.power:.0%}, two-sided 5 %; {method}"))
    return rows


def _make_unpaired_table(counts: UnpairedComparison) -> Table:
    before, after, change = _format_sides(counts.early, counts.late, counts.change, True)
    smallest = "none" if counts.smallest_shown is None else f"{_format_ends(*counts.smallest_shown, True)} points"
    least, overlaps = "least and greatest", "of all overlaps"
    rows = [
        (counts.before.name, before, "Wilson's score interval"),
        (counts.after.name, after, "Wilson's score interval"),
        ("difference", change, f"Tango's score interval, {least} end {overlaps}"),
        ("p, McNemar exact", f"{counts.p[0]:.3g} to {counts.p[1]:.3g}", f"{least} {overlaps}"),
        (_SMALLEST, smallest, f"power {counts.power:.0%}, two-sided 5 %; Connor 1987; {least} {overlaps}"),
    ]
    return Table(f"resolved: {counts.before.tasks} tasks; which policy solved which is unknown", _HEADS, rows)


def _make_further_tables(pair: Comparison) -> Iterator[Table]:
    """Make tables of pass@k, parts of the tasks, and labels."""
    sides = (pair.before, pair.after)
    if pair.pass_at:
        title = f"pass@k, unbiased (Chen et al. 2021); score intervals of {pair.clusters} {pair.unit}, pointwise"
        points = [(str(each.k), *_format_sides(each.before, each.after, each.change, True)) for each in pair.pass_at]
        yield Table(title, ("k", *sides, "difference"), points)
    if pair.parts:
        title = f"parts of the tasks; p of sign flips, corrected for {len(pair.parts)} parts (Holm)"
        parts = [
            (
                each.name,
                str(each.tasks),
                *_format_sides(each.early, each.late, each.change, pair.share),
                format_p(each.p),
            )
            for each in pair.parts
        ]
        yield Table(title, ("part", "tasks", *sides, "difference", "p, corrected"), parts)
    if pair.labels:
        title = "labels by kind of task: macro-F1 in hundredths, bootstrap of whole clusters"
        heads = ("kind", "tasks", *sides, "difference of macro-F1", "difference of accuracy")
        kinds = [
            (
                each.kind,
                str(each.tasks),
                *_format_sides(each.early, each.late, each.change, True),
                format_change(each.accuracy, True),
            )
            for each in pair.labels
        ]
        yield Table(title, heads, kinds)


# -- numbers


def _format_amount(value: float, share: bool) -> str:
    return f"{100 * value:.3g} points" if share else f"{value:.3g}"


def _format_ends(low: float, high: float, share: bool) -> str:
    return f"[{100 * low:.1f}, {100 * high:.1f}]" if share else f"[{low:.3g}, {high:.3g}]"


def _format_bracket(interval: Interval, share: bool) -> str:
    return (
        f"[{TOO_FEW}]"
        if interval.low is None or interval.high is None
        else _format_ends(interval.low, interval.high, share)
    )


def format_rate(interval: Interval, share: bool) -> str:
    """Mean with interval; a `share` in per cent."""
    value = f"{100 * interval.value:.1f} %" if share else f"{interval.value:.3g}"
    return f"{value} {_format_bracket(interval, share)}"


def format_change(interval: Interval, share: bool) -> str:
    """Difference with interval; a `share` in points."""
    # + 0.0 makes a negative zero positive
    value = f"{100 * interval.value + 0.0:+.1f} points" if share else f"{interval.value + 0.0:+.3g}"
    return f"{value} {_format_bracket(interval, share)}"


def _format_sides(early: Interval, late: Interval, change: Interval, share: bool) -> tuple[str, str, str]:
    return format_rate(early, share), format_rate(late, share), format_change(change, share)


def format_smallest_difference(interval: Interval, share: bool) -> str:
    """Smallest detectable difference; without an interval, for any discordance."""
    if not share:
        return f"{interval.value:.3g} {_format_bracket(interval, False)}"
    ends = "whatever the discordance" if interval.low is None else _format_bracket(interval, True)
    return f"{100 * interval.value:.1f} points {ends}"


def format_p(p: float) -> str:
    """P-value with two digits, or "< 0.0001"."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def format_p_equation(p: float) -> str:
    """P-value with its sign.

    >>> format_p_equation(0.0321), format_p_equation(1e-9)
    ('p = 0.032', 'p < 0.0001')
    """
    return f"p {format_p(p)}" if p < 1e-4 else f"p = {format_p(p)}"


def _verdict_as_json(comparison: Comparison | UnpairedComparison) -> dict[str, Any]:
    data: dict[str, Any] = to_plain_data(comparison) | {"claimed": comparison.claimed}
    if isinstance(comparison, UnpairedComparison):
        data |= {"before": comparison.before.name, "after": comparison.after.name, "tasks": comparison.before.tasks}
        return data | {"p_of_overlaps": data.pop("p"), "smallest_shown_of_overlaps": data.pop("smallest_shown")}
    data |= {"design_effect": comparison.spread and comparison.spread.design}
    data |= {"discordance": comparison.spread and to_plain_data(comparison.spread.square)}
    del data["spread"]
    return data | {"methods": {f"{name}, {value}": method for name, value, method in _list_statistics(comparison)}}


# -- formats


def _format_text(result: Result) -> str:
    parts = ["\n".join(result.verdicts)] if result.verdicts else []
    for table in result.tables:
        parts.append("\n".join([table.title, *align_columns([table.heads, *table.rows], "  ")]))
    return "\n\n".join([*parts, *(["\n".join(result.notes)] if result.notes else [])])


def _format_markdown(result: Result) -> str:
    def format_row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    parts = [*result.verdicts]
    for table in result.tables:
        parts += [
            f"**{table.title}**",
            "\n".join([format_row(table.heads), "|---" * len(table.heads) + "|", *map(format_row, table.rows)]),
        ]
    return "\n\n".join([*parts, *result.notes])


def _format_latex(result: Result) -> str:
    # needs no package but booktabs
    parts = [escape_latex(each) for each in result.verdicts]
    for table in result.tables:
        lines = [" & ".join(map(escape_latex, row)) + r" \\" for row in (table.heads, *table.rows)]
        head = [r"\begin{table}", rf"\caption{{{escape_latex(table.title)}}}"]
        head += [rf"\begin{{tabular}}{{{'l' * len(table.heads)}}}", r"\toprule", lines[0], r"\midrule"]
        parts.append("\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}", r"\end{table}"]))
    return "\n\n".join([*parts, *map(escape_latex, result.notes)])


def escape_latex(text: str) -> str:
    """Escape `text` for LaTeX."""
    escaped = "".join(_LATEX_ESCAPES.get(char, char) for char in text).replace("< 0", r"$<$ 0")  # of "p < 0.0001"
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)  # before a number: a minus sign, not a hyphen


FORMATS: Mapping[str, Callable[[Result], str]] = {
    "text": _format_text,
    "markdown": _format_markdown,
    "latex": _format_latex,
    "json": lambda result: json.dumps(result.numbers, allow_nan=False),
}
