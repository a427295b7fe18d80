"""Panels, series and style of a figure; its ticks and numbers; thinning and smoothing of curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

COLOURS = 9
LETTER = 6.0
"""Mean width of a letter at 11 px."""
Point = tuple[float, float]

_BUCKETS = 300  # of a curve, about one per pixel
_TINY = 1e-300
"""Smaller values count as 0: a fifth of their difference may underflow."""
_SKIPPED_SHARE = 0.005
# minimum of alpha times the number of points: on short curves an EMA averages over about a twentieth of them
_ALPHA_TIMES_POINTS = 20.0
_EQUAL = 1e-9
"""Values with a smaller relative difference count as equal: too few floats are between them for ticks."""

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
.plot .bar-whisker { stroke: var(--plot-ink); stroke-width: 1.5; fill: none; }
.plot .flow { fill-opacity: .35; stroke: none; }
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
    """Curve; None in `y` is a gap. With `alpha` its EMA is drawn over it; with `low` and `high` points have intervals.

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
    """Whether the legend names it."""
    joined: bool = True
    """Whether a line joins the points."""
    floor: Sequence[float] = ()
    """Where bars begin; default 0."""

    @property
    def points(self) -> list[Point]:
        """Points with a finite value."""
        return [(float(x), y) for x, y in zip(self.x, self.y, strict=True) if y is not None and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Horizontal line in a series' colour, or grey (None)."""

    name: str
    value: float
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes with series. The y axis always covers the values in `include`.

    Kind ``stack`` draws stacked bars; ``bars`` (vertical) and ``rows`` (horizontal) draw bars side by side at `labels`.
    """

    title: str
    series: Sequence[Series]
    x_label: str = "step"
    note: str = ""
    baselines: Sequence[Baseline] = ()
    include: Sequence[float] = (0.0,)
    kind: Literal["line", "stack", "bars", "rows"] = "line"
    labels: Sequence[str] = ()
    """Names of the bars at x = 0, 1, ..."""
    missing: str = "not measured"


def colour_variable(colour: int | None) -> str:
    """CSS colour by number, repeated after `COLOURS`; grey for None."""
    return "var(--plot-soft)" if colour is None else f"var(--c{colour % COLOURS})"


# -- numbers


def choose_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Choose about `about` round numbers (1, 2 or 5 times a power of ten) that cover `low` to `high`.

    >>> choose_ticks(0.0, 0.73)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    >>> choose_ticks(3, 3), choose_ticks(0, 0)
    ([2.0, 2.5, 3.0, 3.5, 4.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    size = max(abs(low), abs(high))
    if size < _TINY:
        low, high = 0.0, 1.0  # draws a constant zero at the bottom, not in the middle
    elif high - low < _EQUAL * size:
        pad = abs(low) / 2 or 1.0
        pad = 10.0 ** math.floor(math.log10(pad))
        low, high = low - pad, high + pad
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(index * step, digits) + 0.0 for index in range(first, last + 1)]


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits; thousands as k, M, G.

    >>> [format_number(v) for v in (0.0, 0.12345, 12.0, 1234.5, 3.2e6, 0.00002)]
    ['0', '0.123', '12', '1.23k', '3.2M', '2e−5']
    >>> format_number(-0.5)
    '−0.5'
    """
    if not math.isfinite(value):
        return "\N{EN DASH}"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * (1 - 0.5 * 10.0**-digits):
            return _minus(f"{value / limit:.{digits}g}") + unit
    mantissa, e, exponent = f"{value:.{digits}g}".partition("e")
    return _minus(mantissa) + (e and f"e{_minus(str(int(exponent)))}")


def _minus(text: str) -> str:
    return "\N{MINUS SIGN}" + text[1:] if text.startswith("-") else text


def format_tick(value: float, step: float) -> str:
    """Format a tick, with as many decimals as `step` needs.

    >>> format_tick(0.5, 0.25), format_tick(2000, 500), format_tick(-1.0, 1.0)
    ('0.50', '2k', '−1')
    """
    if abs(value) >= 1000 or (0 < abs(step) < 1e-4):
        return format_number(value)
    decimals = next((count for count in range(5) if abs(round(step, count) - step) < 1e-9), 5)
    return _minus(f"{value:.{decimals}f}")


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Keep the lowest and highest point of each of 300 buckets."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    size = math.ceil(len(points) / _BUCKETS)
    extremes: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        low, high = min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])
        extremes += sorted({low, high})
    return extremes


def ema(values: Sequence[float | None], alpha: float) -> list[float | None]:
    """Exponential moving average ``s_t = alpha x_t + (1 - alpha) s_{t-1}``; gaps stay.

    Skips the first 0.5 %, which would bias it for a long time.

    >>> ema([0.0, 1.0, None, 1.0], 0.5)
    [0.0, 0.5, None, 0.75]
    """
    smooth: list[float | None] = []
    state: float | None = None
    for at, value in enumerate(values):
        if value is None or at < int(_SKIPPED_SHARE * len(values)):
            smooth.append(None)
            continue
        state = value if state is None else alpha * value + (1 - alpha) * state
        smooth.append(state)
    return smooth


def choose_alpha(points: int, default: float) -> float:
    """Choose alpha: `default` (.01 for rewards, .05 for tools) for thousands of points, more for fewer points.

    >>> choose_alpha(5_000, 0.01), choose_alpha(50, 0.01), choose_alpha(5, 0.01)
    (0.01, 0.4, 1.0)
    """
    return min(1.0, max(default, _ALPHA_TIMES_POINTS / max(points, 1)))
