"""A figure of the thesis: drawing, caption and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coderepairrl.report.plots import Panel, draw_figure

Drawing = Callable[[bool], str]
"""Draws an SVG; a standalone one (True) has style and background."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Figure or table; `missing` says why there is nothing to show."""

    name: str
    """Name of its files."""
    title: str
    caption: str = ""
    """What was counted, how much of it, and what the intervals are."""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    """Numbers, as in the CSV."""
    drawing: Drawing | None = None
    """None: a table."""
    missing: str = ""


def draw_panels(*panels: Panel) -> Drawing:
    """Drawing of `panels`, two to a row."""
    return lambda standalone: draw_figure(panels, columns=2, standalone=standalone)
