"""Reports of runs: pages, JSON, figures as SVG and PDF, numbers as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coderepairrl.report.analysis import Report, compare_runs
from coderepairrl.report.charts import make_sections
from coderepairrl.report.plots import convert_to_pdf, draw_figure
from coderepairrl.report.plots.panels import Panel
from coderepairrl.report.site import Site, write_page

__all__ = ["Site", "export_figures"]
Row = Sequence[Any]


def export_figures(reports: Sequence[Report], folder: Path) -> None:
    """Write ``NUMBER-TITLE.svg``, ``.pdf``, ``.csv`` per figure, ``evaluations.csv`` and ``comparisons.csv``.

    Replaces an earlier export to `folder`. Raises `UsageError`, and `PrerequisiteError` without svglib.
    """
    replace_figure_files(folder, ".figures", _render_figure_files(reports))


def replace_figure_files(folder: Path, listing: str, files: Iterable[tuple[str, str | bytes]]) -> None:
    """Write `files` (name, content) to `folder`; delete files of the last export that are not among them.

    The file `listing` keeps the exported names: no other file is deleted. Raises `UsageError`.
    """
    names = [write_page(folder / name, content).name for name, content in files]
    list_file = folder / listing
    exported = list_file.read_text("utf-8").split() if list_file.is_file() else []
    for name in {*exported} - {*names}:
        (folder / Path(name).name).unlink(missing_ok=True)  # an edited list deletes nothing outside
    write_page(list_file, "\n".join(names) + "\n")


def _render_figure_files(reports: Sequence[Report]) -> Iterator[tuple[str, bytes]]:
    panels = [panel for _, panels in make_sections(reports) for panel in panels]
    panels = [panel for panel in panels if any(series.points for series in panel.series)]
    for number, panel in enumerate(panels, 1):
        slug = re.sub(r"[^a-z0-9]+", "-", panel.title.lower()).strip("-")[:60]
        name = f"{number:02d}-{slug}"
        svg = draw_figure([panel], standalone=True)
        yield f"{name}.pdf", convert_to_pdf(svg)  # before the SVG: without svglib no file is written
        yield f"{name}.svg", svg.encode()
        yield f"{name}.csv", format_csv(("curve", panel.x_label, "value", "low", "high"), _list_curve_rows(panel))
    heads: Row = ("run", "evaluation", "step", "episodes", "tasks", "void", "measure", "value", "low", "high")
    yield "evaluations.csv", format_csv(heads, _list_evaluation_rows(reports))
    sides = [f"{side}{end}" for side in ("before", "after", "change") for end in ("", "_low", "_high")]
    heads = ("run", "before", "after", "tasks of", "measure", *sides, "p", "tasks", "better", "worse")
    yield "comparisons.csv", format_csv(heads, _list_comparison_rows(reports))


def _list_curve_rows(panel: Panel) -> Iterator[Row]:
    for series in panel.series:
        ends = zip(series.low, series.high, strict=True) if series.low else ((None, None),) * len(series.x)
        for x, y, (low, high) in zip(series.x, series.y, ends, strict=True):
            yield series.name or panel.title, x, y, low, high


def _list_evaluation_rows(reports: Sequence[Report]) -> Iterator[Row]:
    for report in reports:
        for each in report.evaluations:
            for measure, value in each.values.items():
                counts = (each.episodes, each.tasks, each.void)
                yield report.name, each.name, each.step, *counts, measure, *value


def _list_comparison_rows(reports: Sequence[Report]) -> Iterator[Row]:
    named = [(report.name, each) for report in reports for each in (*report.comparisons, *report.repeated)]
    for other in reports[1:]:
        named += [(f"{other.name} - {reports[0].name}", each) for each in compare_runs(reports[0], other)]
    no_interval = (None, None, None)
    for name, each in named:
        for measure in dict.fromkeys((*each.early, *each.late)):
            change = each.changes.get(measure)
            means = *each.early.get(measure, no_interval), *each.late.get(measure, no_interval)
            statistics = (*change.change, change.p, change.tasks, change.better, change.worse) if change else ()
            yield name, each.before, each.after, each.slice or "all", measure, *means, *statistics


def format_csv(heads: Row, rows: Iterable[Row]) -> bytes:
    """Format as CSV; quotes texts that a spreadsheet would run as formulas."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([_escape_formula(value) for value in row] for row in rows)
    return text.getvalue().encode(errors="replace")


def _escape_formula(value: Any) -> Any:
    # tools and tasks have names that a model chose
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
