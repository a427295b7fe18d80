"""Self-contained HTML page of reports: no script, no network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment
from markupsafe import Markup

from coderepairrl.printable import visible
from coderepairrl.processes.meter import Used, as_words
from coderepairrl.report import plots
from coderepairrl.report.analysis import Change, Comparison, Evaluation, Report, compare_runs, differences
from coderepairrl.report.answers import given_labels
from coderepairrl.report.charts import is_reward, sections
from coderepairrl.report.ledger import ACTIVITIES
from coderepairrl.report.names import LESS_IS_BETTER, SECONDARY, spoken
from coderepairrl.report.view.text import templates
from coderepairrl.stats import COUNTS, TOO_FEW, Interval

_NONE, _MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


class _Links:
    """Links to pages of `crrl view`; empty if missing."""

    def __init__(self, run: Path, at: Path | None) -> None:
        pages = sorted((run / "report" / "view").glob("*/index.html"))
        self._folder = pages[0].parent if len(pages) == 1 and at is not None else None
        self._at = at

    def index(self) -> str:
        return self._to("index.html")

    def episode(self, name: str) -> str:
        return "" if "/" in name else self._to(f"episode/{name}.html")

    def _to(self, page: str) -> str:
        if self._folder is None or self._at is None or not (self._folder / page).is_file():
            return ""
        return quote(Path(os.path.relpath(self._folder / page, self._at)).as_posix())


class Cell(NamedTuple):
    """Measure in a comparison."""

    early: Interval | None
    late: Interval | None
    change: Change | None
    drawn: Markup


class Table(NamedTuple):
    """Comparisons by column, one row per measure."""

    title: str
    heads: list[Comparison]
    names: list[str]
    rows: list[tuple[str, str, list[Cell]]]
    coloured: bool = True


def render(reports: Sequence[Report], at: Path | None = None) -> str:
    """Render the page of runs, linked to `crrl view` pages if its folder `at` is given."""
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            reports=reports,
            tables=_tables(reports),
            evaluations=_evaluations(reports),
            slices=_slices(reports),
            labelled=_labelled(reports),
            links=[_Links(Path(report.path), at) for report in reports],
            sections=[(title, [Markup(plots.figure([p])) for p in panels]) for title, panels in sections(reports)],
            ledgers=[_ledger(report) for report in reports],
            accounts=[_account(report.account) for report in reports],
            differences=differences(reports) if len(reports) > 1 else {},
            style=Markup(plots.STYLE),
        )
    )


_AGAIN = "Training tasks that came again, first and last time"

Evaluated = tuple[str, Evaluation, str]
"""Run, evaluation, and source of its tasks."""


def _evaluations(
    reports: Sequence[Report],
) -> list[tuple[list[Evaluated], list[tuple[str, str, list[Interval | None]]]]]:
    """Last evaluations by column, where no comparison of steps shows them."""
    heads = []
    for report in reports:
        last = {each.name: each for each in report.evaluations}
        compared = {each.name for each in report.evaluations if last[each.name] is not each}
        if len(last) > 1 or last.keys() - compared:
            heads += [(report.name, each, _source(report, each.name)) for each in last.values()]
    measures = dict.fromkeys(measure for _, each, _ in heads for measure in each.values)
    rows = [(measure, spoken(measure), [each.values.get(measure) for _, each, _ in heads]) for measure in measures]
    return [(heads, rows)] if heads else []


def _source(report: Report, evaluation: str) -> str:
    also = report.config.get(f"eval.also.{evaluation}.source")
    return str(also or report.config.get("eval.source") or report.config.get("tasks.source") or "")


class Labelled(NamedTuple):
    """Labels in an evaluation, by kind (`report.answers.summary`)."""

    run: str
    evaluation: Evaluation
    kind: str
    numbers: Mapping[str, Any]
    columns: list[str]


def _labelled(reports: Sequence[Report]) -> list[Labelled]:
    return [
        Labelled(report.name, each, kind, numbers, given_labels(numbers["confusion"]))
        for report in reports
        for each in {each.name: each for each in report.evaluations}.values()
        for kind, numbers in each.answers.items()
    ]


def _tables(reports: Sequence[Report]) -> list[Table]:
    tables = []
    wholes = [(r.name, c) for r in reports for c in r.comparisons if not c.slice]
    if wholes:
        tables.append(_table("Held-out tasks, before and after", wholes, reports))
    again = [(r.name, c) for r in reports for c in r.repeated if not c.slice]
    if again:
        tables.append(_table(_AGAIN, again, reports))
    between = [(f"{o.name} {_MINUS} {reports[0].name}", c) for o in reports[1:] for c in compare_runs(reports[0], o)]
    if between:
        table = _table("Between runs, on the tasks that both were evaluated on last", between, reports)
        tables.append(table._replace(coloured=False))
    return tables


def _slices(reports: Sequence[Report]) -> list[Table]:
    tables = []
    for title, columns in (
        ("Before and after", [(r.name, c) for r in reports for c in r.comparisons]),
        (_AGAIN, [(r.name, c) for r in reports for c in r.repeated]),
    ):
        for kind in dict.fromkeys(c.slice for _, c in columns if c.slice):
            named = [(name, c) for name, c in columns if c.slice == kind]
            table = _table(f"{title}, {kind} only", named, reports)
            tables.append(table._replace(rows=[row for row in table.rows if row[0] not in SECONDARY]))
    return tables


def _table(title: str, named: Sequence[tuple[str, Comparison]], reports: Sequence[Report]) -> Table:
    comparisons = [comparison for _, comparison in named]
    measures = dict.fromkeys(m for c in comparisons for m in (*c.early, *c.late))
    if all(is_reward(report, score) for report in reports for score in report.scores[:1]):
        for score in {report.scores[0] for report in reports if report.scores}:
            measures.pop(score, None)  # it is the reward, which stands there already
    reach = max(
        (abs(end or 0) for c in comparisons for m, ch in c.changes.items() if m not in COUNTS for end in ch.change),
        default=0.0,
    )
    rows = []
    for measure in measures:
        cells = [
            Cell(c.early.get(measure), c.late.get(measure), change, _forest(measure, change, reach))
            for c in comparisons
            for change in [c.changes.get(measure)]
        ]
        rows.append((measure, spoken(measure), cells))
    return Table(title, comparisons, [name for name, _ in named], rows)


def _forest(measure: str, change: Change | None, reach: float) -> Markup:
    if change is None or measure in COUNTS or reach <= 0:
        return Markup('<i class="gap"></i>')
    return Markup(plots.forest(*change.change, reach, better="less" if measure in LESS_IS_BETTER else "more"))


def _ledger(report: Report) -> list[tuple[str, float, float, int]]:
    total = sum(report.ledger.values())
    return [
        (name, report.ledger[name], report.ledger[name] / total, colour)
        for colour, name in enumerate(ACTIVITIES)
        if total and report.ledger[name] > 0
    ]


def _account(account: Mapping[str, Any]) -> list[tuple[str, str, int, float]]:
    parts = [("trained", "", account["trained"])]
    parts += [(state, reason, n) for state in ("masked", "dropped") for reason, n in account[state].items()]
    total = account["sampled"]
    return [(state, reason, tokens, tokens / total) for state, reason, tokens in parts if tokens]


def _level(value: Interval | None, digits: int = 3) -> Markup:
    if value is None:
        return Markup("<span class=none>{}</span>").format(_NONE)
    return Markup("{} {}").format(_fixed(value.value, digits), _ends(value, lambda end: _fixed(end, digits)))


def _from_data(value: Mapping[str, Any] | None) -> Markup:
    return _level(None if value is None else Interval(**value))


def _signed(value: Interval) -> Markup:
    return Markup("<b>{}</b> {}").format(_sign(value.value), _ends(value, _sign))


def _ends(value: Interval, written: Callable[[float], str]) -> Markup:
    if value.low is None or value.high is None:
        return Markup("<small>{}</small>").format(TOO_FEW)
    return Markup("<small>[{}, {}]</small>").format(written(value.low), written(value.high))


def _sign(value: float) -> str:
    return ("+" if value >= 0 else "") + _fixed(value)


def _fixed(value: float, digits: int = 3) -> str:
    size = abs(value)
    text = f"{value:.{digits}f}" if size < 10 else f"{value:,.1f}"
    return text.replace("-", _MINUS)


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _plain(value: Any) -> str:
    return _NONE if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


@cache
def _environment() -> Environment:
    return templates(
        "coderepairrl.report",
        visible=lambda value: visible(str(value)),
        plain=_plain,
        level=_level,
        data_level=_from_data,
        signed=_signed,
        seconds=_seconds,
        used=lambda found: as_words(Used(**found)),
        p=_p,
    )
