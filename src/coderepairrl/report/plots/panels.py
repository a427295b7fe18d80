"""Panels, series and style of a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coderepairrl.report.plots.scale import Point

COLOURS = 9

STYLE = """
:root { --plot-ink: #1f2328; --plot-soft: #6b6f76; --plot-grid: #eceae5; --plot-axis: #c9c5bd; --plot-card: #ffffff;
  --c0: #546cd6; --c1: #d9532c; --c2: #0f9488; --c3: #d99114; --c4: #b24cbe; --c5: #5a963c; --c6: #3b94cd;
  --c7: #c84678; --c8: #787c84; --better: #0f9488; --worse: #d9532c; }
@media (prefers-color-scheme: dark) {
  :root { --plot-ink: #e3e5e8; --plot-soft: #9ba1a9; --plot-grid: #2a2e33; --plot-axis: #4a5058; --plot-card: #1c1f23;
    --c0: #8296f5; --c1: #f07650; --c2: #2dbeac; --c3: #e8aa42; --c4: #cc78d6; --c5: #82c360; --c6: #66b8ec;
    --c7: #ec7ba6; --c8: #8c929b; --better: #2dbeac; --worse: #f07650; }
}
.plot { display: block; width: 100%; height: auto; font-variant-numeric: tabular-nums;
  font-family: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; }
.plot text { fill: var(--plot-soft); font-size: 11px; }
.plot .title { fill: var(--plot-ink); font-size: 13px; font-weight: bold; }
.plot .end { text-anchor: end; } .plot .middle { text-anchor: middle; }
.plot .grid { stroke: var(--plot-grid); fill: none; } .plot .axis { stroke: var(--plot-axis); fill: none; }
.plot .base { stroke-dasharray: 2 4; stroke-width: 1.5; stroke-linecap: round; fill: none; }
.plot .raw { stroke: currentColor; stroke-opacity: .3; fill: none; stroke-width: 1; stroke-linejoin: round; }
.plot .line { stroke: currentColor; fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.plot .dashed { stroke-dasharray: 5 4; }
.plot .whisker { stroke: currentColor; stroke-width: 1.5; fill: none; }
.plot .dot { fill: currentColor; stroke: var(--plot-card); stroke-width: 1.5; }
.plot .zone > rect { fill: transparent; } .plot .tip { visibility: hidden; pointer-events: none; }
.plot .zone:hover .tip { visibility: visible; } .plot .tip path { stroke: var(--plot-axis); }
.plot .tip rect { fill: var(--plot-card); stroke: var(--plot-axis); } .plot .tip text { fill: var(--plot-ink); }
.forest .zero { stroke: var(--plot-axis); }
.forest .whisker { stroke: currentColor; stroke-width: 2.5; stroke-linecap: round; }
.forest circle { fill: currentColor; } .forest { color: var(--plot-soft); vertical-align: middle; }
.forest.better { color: var(--better); } .forest.worse { color: var(--worse); }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """Curve: with `alpha` faint under its bold EMA, with `low` and `high` points with intervals. None is a gap.

    >>> Series("reward", [1, 2], [0.1, None]).points
    [(1.0, 0.1)]
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 0
    alpha: float | None = None
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dashed: bool = False
    listed: bool = True
    """Named in the legend."""

    @property
    def points(self) -> list[Point]:
        """Finite points."""
        return [(float(x), y) for x, y in zip(self.x, self.y, strict=True) if y is not None and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Horizontal line in a series' colour, or grey (None)."""

    name: str
    value: float
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes. The y axis covers `include`; ``stack`` draws stacked bars."""

    title: str
    series: Sequence[Series]
    x_label: str = "step"
    note: str = ""
    baselines: Sequence[Baseline] = ()
    include: Sequence[float] = (0.0,)
    kind: Literal["line", "stack"] = "line"
    missing: str = "not measured"
