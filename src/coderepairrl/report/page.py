"""Page of a report: verdict, table, charts, and links to every episode. Needs no script and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from coderepairrl.printable import format_count
from coderepairrl.report import plots
from coderepairrl.report.analysis import (
    ACTIVITIES,
    LESS_IS_BETTER,
    SECONDARY,
    Evaluation,
    MeasureChanges,
    Report,
    compare_runs,
    list_differences,
    readable_name,
)
from coderepairrl.report.answers import list_confusion_columns
from coderepairrl.report.charts import is_whole_reward, make_sections
from coderepairrl.report.comparison import compare_episodes
from coderepairrl.report.kit import MINUS, PageContext, render_page
from coderepairrl.report.verdict import describe_results, format_rate
from coderepairrl.stats.intervals import Interval
from coderepairrl.stats.measures import COUNTS, Pairs
from coderepairrl.types import Episode

_HEADLINES = ("tests", "reward")  # a verdict is about the first of these that was measured
_AGAIN = "Training tasks visited again, first and last time"


class Cell(NamedTuple):
    """Measure in a comparison; None: undefined."""

    early: Interval | None
    late: Interval | None
    change: Pairs | None
    drawn: Markup  # drawing of the change's interval, or a gap


class ChangeTable(NamedTuple):
    """Comparisons by column, one row per measure."""

    title: str
    heads: list[MeasureChanges]
    names: list[str]  # runs of the columns
    rows: list[tuple[str, str, list[Cell]]]  # measure, its name for readers, a cell per column
    coloured: bool = True  # whether heads have the colours of runs


class LabelTable(NamedTuple):
    """Labels in an evaluation, by kind (`report.answers.summarise_answers`)."""

    run: str
    evaluation: Evaluation
    kind: str
    numbers: Mapping[str, Any]
    columns: list[str]


EvaluationColumn = tuple[str, Evaluation, str]
"""Run, evaluation, and source of its tasks."""


def render_report(reports: Sequence[Report], folders: Sequence[str], context: PageContext) -> str:
    """Render the report of runs; unless standalone, with links to the pages in their `folders`."""
    first, *others = reports
    held_out = [(report.name, each) for report in reports for each in report.comparisons if not each.slice]
    again = [(report.name, each) for report in reports for each in report.repeated if not each.slice]
    between = [(f"{other.name} {MINUS} {first.name}", each) for other in others for each in compare_runs(first, other)]
    tables = [
        _make_changes_table(title, named, reports)
        for title, named in (
            ("Held-out tasks, before and after", held_out),
            (_AGAIN, again),
            ("Between runs, on the tasks that both were evaluated on last", between),
        )
        if named
    ]
    if between:
        tables[-1] = tables[-1]._replace(coloured=False)
    return render_page(
        "report.html.j2",
        context,
        reports=reports,
        folders=folders,
        verdicts=[*map(_describe_level, reports), *_list_verdicts(reports)],
        tables=tables,
        evaluations=_make_evaluation_table(reports),
        slices=_make_slice_tables(reports),
        labelled=[
            LabelTable(report.name, each, kind, numbers, list_confusion_columns(numbers["confusion"]))
            for report in reports
            for each in {each.name: each for each in report.evaluations}.values()
            for kind, numbers in each.answers.items()
        ],
        sections=[
            (title, [Markup(plots.draw_figure([p])) for p in panels]) for title, panels in make_sections(reports)
        ],
        ledgers=[_list_ledger_shares(report) for report in reports],
        accounts=[_list_account_shares(report.account) for report in reports],
        differences=list_differences(reports) if len(reports) > 1 else {},
    )


def _describe_level(report: Report) -> str:
    """Describe the last evaluation if there is no comparison."""
    each = report.evaluations[-1] if report.evaluations and not report.comparisons else None
    measure = next((name for name in _HEADLINES if each and name in each.values), "")
    if each is None or not measure:
        return ""
    level = format_rate(each.values[measure], measure != "reward")
    where = f"{each.name} after step {each.step}, {format_count(each.tasks, 'task')}"
    return f"{report.name}: {readable_name(measure)} {level}, {where}."


def _list_verdicts(reports: Sequence[Report]) -> list[str]:
    """List what `crrl compare` says of first and last evaluations, and of different runs' last ones."""
    first, *others = reports
    pairs: list[tuple[str, Mapping[str, Sequence[Episode]]]] = []
    for report in reports:
        for name, by_step in report.evaluated.items():
            steps = sorted({min(by_step), max(by_step)})
            title = f"{report.name}, {name}" if others else name
            pairs.append((title, {f"step {step}": by_step[step] for step in steps}))
    for other in others:
        pairs += [
            (name, {first.name: first.last[name], other.name: other.last[name]})
            for name in first.last
            if name in other.last
        ]
    verdicts = []
    for title, episodes in pairs:
        compared = filter(None, (compare_episodes(episodes, measure) for measure in _HEADLINES))
        for each in next(compared, []):
            early, late = (format_rate(side, each.share) for side in (each.early, each.late))
            claims = " ".join(describe_results([each]).verdicts)
            verdicts.append(f"{title}: {each.metric} {early} ({each.before}), {late} ({each.after}); {claims}")
    return verdicts


def _make_evaluation_table(
    reports: Sequence[Report],
) -> list[tuple[list[EvaluationColumn], list[tuple[str, str, list[Interval | None]]]]]:
    """List last evaluations by column; none if a comparison of steps shows them all."""
    heads = []
    for report in reports:
        last = {each.name: each for each in report.evaluations}
        compared = {each.name for each in report.evaluations if last[each.name] is not each}  # in several steps
        if len(last) > 1 or last.keys() - compared:
            for each in last.values():
                keys = (f"eval.also.{each.name}.source", "eval.source", "tasks.source")
                source = next(filter(None, map(report.config.get, keys)), "")
                heads.append((report.name, each, str(source)))
    measures = dict.fromkeys(measure for _, each, _ in heads for measure in each.values)
    rows = [
        (measure, readable_name(measure), [each.values.get(measure) for _, each, _ in heads]) for measure in measures
    ]
    return [(heads, rows)] if heads else []


def _make_slice_tables(reports: Sequence[Report]) -> list[ChangeTable]:
    tables = []
    for title, columns in (
        ("Before and after", [(report.name, each) for report in reports for each in report.comparisons]),
        (_AGAIN, [(report.name, each) for report in reports for each in report.repeated]),
    ):
        for kind in dict.fromkeys(each.slice for _, each in columns if each.slice):
            named = [(name, each) for name, each in columns if each.slice == kind]
            table = _make_changes_table(f"{title}, {kind} only", named, reports)
            tables.append(table._replace(rows=[row for row in table.rows if row[0] not in SECONDARY]))
    return tables


def _make_changes_table(
    title: str, named: Sequence[tuple[str, MeasureChanges]], reports: Sequence[Report]
) -> ChangeTable:
    comparisons = [comparison for _, comparison in named]
    measures = dict.fromkeys(measure for each in comparisons for measure in (*each.early, *each.late))
    if all(is_whole_reward(report, score) for report in reports for score in report.scores[:1]):
        for score in {report.scores[0] for report in reports if report.scores}:
            measures.pop(score, None)  # the reward's row shows it
    changes = [pairs.change for each in comparisons for measure, pairs in each.changes.items() if measure not in COUNTS]
    reach = max((abs(end or 0) for change in changes for end in change), default=0.0)  # one axis for all drawings
    rows = [
        (measure, readable_name(measure), [_make_change_cell(each, measure, reach) for each in comparisons])
        for measure in measures
    ]
    return ChangeTable(title, comparisons, [name for name, _ in named], rows)


def _make_change_cell(comparison: MeasureChanges, measure: str, reach: float) -> Cell:
    change, drawn = comparison.changes.get(measure), Markup('<i class="gap"></i>')
    if change is not None and measure not in COUNTS and reach > 0:
        drawn = Markup(plots.draw_forest(*change.change, reach, better="less" if measure in LESS_IS_BETTER else "more"))
    return Cell(comparison.early.get(measure), comparison.late.get(measure), change, drawn)


def _list_ledger_shares(report: Report) -> list[tuple[str, float, float, int]]:
    total = sum(report.ledger.values())
    return [
        (name, report.ledger[name], report.ledger[name] / total, colour)
        for colour, name in enumerate(ACTIVITIES)
        if total and report.ledger[name] > 0
    ]


def _list_account_shares(account: Mapping[str, Any]) -> list[tuple[str, str, int, float]]:
    parts = [("trained", "", account["trained"])]
    parts += [(state, reason, n) for state in ("masked", "dropped") for reason, n in account[state].items()]
    total = account["sampled"]
    return [(state, reason, tokens, tokens / total) for state, reason, tokens in parts if tokens]
