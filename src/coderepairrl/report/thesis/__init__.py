"""Figures and tables of the thesis, computed from run folders: SVG, PDF and CSV, and one page with their captions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path

from markupsafe import Markup

from coderepairrl.report import format_csv, replace_figure_files
from coderepairrl.report.kit import PageContext, render_page
from coderepairrl.report.plots import convert_to_pdf
from coderepairrl.report.site import Site, write_page
from coderepairrl.report.thesis.attempts import (
    ATTEMPT_COLUMNS,
    CALL_COLUMNS,
    ThesisRun,
    list_attempt_rows,
    list_call_rows,
    read_attempts,
)
from coderepairrl.report.thesis.exploits import make_exploit_figures
from coderepairrl.report.thesis.flow import CALLS, make_flow_figures
from coderepairrl.report.thesis.languages import make_language_figures
from coderepairrl.report.thesis.marks import Figure
from coderepairrl.report.thesis.questions import make_question_figures
from coderepairrl.report.thesis.success import make_success_figures
from coderepairrl.report.thesis.tasks import make_task_figures

__all__ = ["CALLS", "make_figures", "write_thesis"]

_SCALE = 130
"""Greatest width of a drawing on the page, in per cent of its own width."""


def write_thesis(site: Site, folder: Path, commands: Collection[str] = (), calls: int = CALLS) -> Path:
    """Write ``index.html``, ``FIGURE.svg``, ``.pdf`` and ``.csv``, ``attempts.csv`` and ``calls.csv`` in `folder`.

    `commands` and `calls` are for `make_flow_figures`. Return the page, which says why figures are missing. Figures of
    an earlier report in `folder` are deleted. Raises `UsageError`, and `PrerequisiteError` without svglib.
    """
    runs = [read_attempts(*pair) for pair in zip(site.runs.values(), site.reports(), strict=True)]
    figures = make_figures(runs, commands, calls)
    files = chain.from_iterable(_render_files(figure) for figure in figures if not figure.missing)
    replace_figure_files(folder, ".thesis-figures", files)
    write_page(folder / "attempts.csv", format_csv(ATTEMPT_COLUMNS, list_attempt_rows(runs)))
    write_page(folder / "calls.csv", format_csv(CALL_COLUMNS, list_call_rows(runs)))
    drawings, reports = [(figure, *_draw_for_page(figure)) for figure in figures], [run.report for run in runs]
    page = render_page("thesis.html.j2", PageContext(), reports=reports, figures=drawings)
    return write_page(folder / "index.html", page)


def make_figures(runs: Sequence[ThesisRun], commands: Collection[str] = (), calls: int = CALLS) -> list[Figure]:
    """Make all figures and tables, in the order of the page."""
    return [
        *make_question_figures(runs),
        *make_success_figures(runs),
        *make_flow_figures(runs, commands, calls),
        *make_language_figures(runs),
        *make_task_figures(runs),
        *make_exploit_figures(runs),
    ]


def _draw_for_page(figure: Figure) -> tuple[Markup, int]:
    """Drawing for the page, empty for a table, and its greatest width in pixels."""
    svg = figure.drawing(False) if figure.drawing and not figure.missing else ""
    width = re.search(r'viewBox="0 0 (\d+)', svg)
    return Markup(svg), _SCALE * int(width[1]) // 100 if width else 0


def _render_files(figure: Figure) -> Iterator[tuple[str, str | bytes]]:
    if figure.drawing is not None:
        svg = figure.drawing(True)
        yield f"{figure.name}.pdf", convert_to_pdf(svg)  # before the SVG: without svglib no file is written
        yield f"{figure.name}.svg", svg
    yield f"{figure.name}.csv", format_csv(figure.heads, figure.rows)
