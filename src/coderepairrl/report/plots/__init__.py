"""Line charts, stacked bars and intervals as SVG text, for light and dark, without dependencies.

Colours are CSS variables (`STYLE`). Values show on hover, without scripts.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Literal
from xml.etree import ElementTree

from coderepairrl.processes.installs import require_extra
from coderepairrl.report.plots.panels import (
    LETTER,
    STYLE,
    Baseline,
    Panel,
    Point,
    Series,
    choose_ticks,
    colour_variable,
    ema,
    format_number,
    format_tick,
    thin_points,
)

WIDTH, HEIGHT = 460, 274
_LEFT, _RIGHT, _BOTTOM = 48, 16, 38
_MAX_ZONES = 60
"""Most strips of a panel that show values on hover."""
_EMPTY_HEIGHT = 96
"""Height of panels that have nothing to show."""
_MAX_STACK_WIDTH, _MAX_BAR_WIDTH = 36.0, 30.0
_FOREST_WIDTH, _FOREST_HEIGHT = 150, 18
_MAX_ROW_LABEL = 24  # characters
_VARIABLE = re.compile(r"var\((--[\w-]+)\)")  # use of a CSS variable
# colours of the light theme by CSS variable
_LIGHT = dict(re.findall(r"(--[\w-]+): (#\w+);", STYLE.partition("@media")[0]))


@dataclass(frozen=True, slots=True)
class _Frame:
    """Plotting area of a panel: top edge in pixels, range of x, ticks of y; `px` and `py` map values to pixels."""

    top: float
    x: tuple[float, float]
    ys: list[float]

    def px(self, x: float) -> float:
        low, high = self.x
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * ((x - low) / (high - low) if high > low else 0.5), 1)

    def py(self, y: float) -> float:
        low, high = self.ys[0], self.ys[-1]
        return round(self.top + (HEIGHT - _BOTTOM - self.top) * (1 - (y - low) / (high - low)), 1)


def draw_figure(panels: Sequence[Panel], *, columns: int = 1, standalone: bool = False) -> str:
    """Draw `panels`, `columns` to a row; `standalone` adds style and background."""
    columns = min(columns, max(len(panels), 1))
    panel_height = HEIGHT if any(series.points for panel in panels for series in panel.series) else _EMPTY_HEIGHT
    width, height = columns * WIDTH, max(1, math.ceil(len(panels) / columns)) * panel_height
    parts = [
        f'<g transform="translate({at % columns * WIDTH} {at // columns * panel_height})">'
        f"{_draw_panel(panel, not standalone)}</g>"
        for at, panel in enumerate(panels)
    ]
    return wrap_svg("".join(parts), width, height, [panel.title for panel in panels], standalone=standalone)


def wrap_svg(drawn: str, width: int, height: int, titles: Sequence[str], *, standalone: bool) -> str:
    """Wrap the SVG elements `drawn` in a document; `standalone` adds style and background."""
    title = ", ".join(map(escape_label, titles))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width} {height}" role="img" '
    if standalone:
        card = f'<rect width="{width}" height="{height}" rx="10" fill="var(--plot-card)"/>'
        size = f'width="{width}" height="{height}" aria-label="{title}">'
        return f"{head}{size}<style>{STYLE}</style>{card}{drawn}</svg>\n"
    return f'{head}aria-label="{title}">{drawn}</svg>'


def _draw_panel(panel: Panel, hover: bool) -> str:
    visible = [series for series in panel.series if series.points]
    legend, rows = _draw_legend(visible, panel.baselines)
    title = f'<text class="title" x="12" y="20">{escape_label(panel.title)}</text>'
    note = f'<text x="{_LEFT}" y="{HEIGHT - 6}">{escape_label(panel.note)}</text>'
    if not visible:
        return (
            f'{title}<text class="middle" x="{WIDTH / 2}" y="{_EMPTY_HEIGHT - 36}">{escape_label(panel.missing)}</text>'
        )
    if panel.kind == "rows":
        return title + note + legend + _draw_rows(panel, visible, 34 + 16 * rows)
    xs = [x for series in visible for x, _ in series.points]
    pad = 0.0 if panel.kind == "line" else 0.5  # half a bar
    frame = _Frame(34 + 16 * rows, (min(xs) - pad, max(xs) + pad), _choose_value_ticks(panel, visible))
    if panel.kind == "bars":
        bars = _draw_bars(visible, frame.py, frame.px, frame.px(1) - frame.px(0))
        return title + note + legend + _draw_axes(panel, frame) + bars
    drawn = _draw_stack(visible, frame) if panel.kind == "stack" else _draw_curves(visible, frame)
    # hover shows one value per step, and unjoined series have several
    joined = [series for series in visible if series.joined]
    zones = _draw_zones(joined, frame) if hover and joined else ""
    return title + note + legend + _draw_axes(panel, frame) + drawn + zones


def _choose_value_ticks(panel: Panel, visible: Sequence[Series]) -> list[float]:
    values = [*panel.include, *(line.value for line in panel.baselines)]
    if panel.kind == "stack":
        sums: dict[float, float] = defaultdict(float)
        for x, y in (point for series in visible for point in series.points):
            sums[x] += y
        values += sums.values()
    else:
        values += [y for series in visible for _, y in series.points]
        ends = (y for series in visible for y in (*series.floor, *series.low, *series.high))
        values += [y for y in ends if y is not None and math.isfinite(y)]
    return choose_ticks(min(values), max(values))


def _draw_axes(panel: Panel, frame: _Frame) -> str:
    right, bottom, step = WIDTH - _RIGHT, HEIGHT - _BOTTOM, frame.ys[1] - frame.ys[0]
    parts = []
    for y in frame.ys:
        kind = "axis" if y == 0 or (y == 1 and frame.ys[-1] == 1) else "grid"  # 0 % and 100 % stand out
        parts.append(f'<path class="{kind}" d="M{_LEFT} {frame.py(y)}H{right}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{frame.py(y) + 4:g}">{format_tick(y, step)}</text>')
    parts += [
        f'<text class="middle" x="{frame.px(x)}" y="{bottom + 16}">{label}</text>'
        for x, label in _list_x_ticks(panel, frame)
    ]
    parts.append(f'<text class="end" x="{right}" y="{HEIGHT - 6}">{escape_label(panel.x_label)}</text>')
    for line in panel.baselines:
        style = f"stroke:{colour_variable(line.colour)}"
        parts.append(f'<path class="base" style="{style}" d="M{_LEFT} {frame.py(line.value)}H{right}"/>')
    return "".join(parts)


def _list_x_ticks(panel: Panel, frame: _Frame) -> list[tuple[float, str]]:
    low, high = math.ceil(frame.x[0]), math.floor(frame.x[1])
    if panel.labels:  # every n-th, as many as fit
        widest = 10 + LETTER * max(map(len, panel.labels))
        every = math.ceil(len(panel.labels) * widest / (WIDTH - _LEFT - _RIGHT))
        return [(x, escape_label(panel.labels[x])) for x in range(low, high + 1, every)]
    if any(x != int(x) for series in panel.series for x, _ in series.points):  # not steps, which get whole numbers
        return [(x, format_number(x)) for x in choose_ticks(*frame.x, 6) if frame.x[0] <= x <= frame.x[1]]
    ticks = [x for x in choose_ticks(low, high, 6) if low <= x <= high and x == int(x)] if high > low else [low]
    return [(x, format_number(x, 4)) for x in ticks]


def _draw_curves(visible: Sequence[Series], frame: _Frame) -> str:
    # intervals at the same step are drawn next to each other
    intervals = [at for at, series in enumerate(visible) if series.low]
    middle = (len(intervals) - 1) / 2
    shifts = {at: 5 * (number - middle) for number, at in enumerate(intervals)}
    return "".join(_draw_curve(series, frame, shifts.get(at, 0.0)) for at, series in enumerate(visible))


def _draw_curve(series: Series, frame: _Frame, shift: float) -> str:
    css = "dashed " if series.dashed else ""
    if series.low:
        line = _format_path([series.points], frame) if series.joined else ""
        drawn = f'<path class="{css}line" style="stroke-opacity:.55" d="{line}"/>'
        for x, y, low, high in zip(series.x, series.y, series.low, series.high, strict=True):
            if y is not None and math.isfinite(y):
                at = frame.px(x)
                if low is not None and high is not None:
                    drawn += f'<path class="whisker" d="M{at} {frame.py(low)}V{frame.py(high)}"/>'
                drawn += f'<circle class="dot" cx="{at}" cy="{frame.py(y)}" r="4"/>'
    elif series.alpha is None or series.alpha >= 1:
        segments = _split_at_gaps(series)
        drawn = f'<path class="{css}line" d="{_format_path(segments, frame)}"/>'
        for x, y in (segment[0] for segment in segments if len(segment) == 1):
            drawn += f'<circle class="dot" cx="{frame.px(x)}" cy="{frame.py(y)}" r="3"/>'
    else:
        values = [y if y is not None and math.isfinite(y) else None for y in series.y]
        smooth = replace(series, y=ema(values, series.alpha))
        drawn = f'<path class="raw" d="{_format_path(_split_at_gaps(series), frame)}"/>'
        drawn += f'<path class="{css}line" d="{_format_path([smooth.points], frame)}"/>'
    move = f' transform="translate({shift:g} 0)"' if shift else ""
    return f'<g color="{colour_variable(series.colour)}"{move}>{drawn}</g>'


def _draw_stack(visible: Sequence[Series], frame: _Frame) -> str:
    xs = sorted({x for series in visible for x, _ in series.points})
    size = math.ceil(len(xs) / (4 * _MAX_ZONES))  # steps per bar: with many steps, one bar each would be too thin
    values = [dict(series.points) for series in visible]
    parts = []
    for start in range(0, len(xs), size):
        steps = xs[start : start + size]
        middle = (frame.px(steps[0]) + frame.px(steps[-1])) / 2
        half = min(_MAX_STACK_WIDTH, frame.px(steps[-1] + 0.5) - frame.px(steps[0] - 0.5)) / 2
        left, right = middle - half, middle + half
        floor, gap = 0.0, min(2.0, (right - left) * 0.15)
        for series, heights in zip(visible, values, strict=True):
            height = sum(heights.get(x, 0.0) for x in steps) / len(steps)
            if height > 0:
                y, base = frame.py(floor + height), frame.py(floor)
                box = f'x="{left + gap / 2:.1f}" y="{y}" width="{right - left - gap:.1f}" height="{base - y:.1f}"'
                parts.append(f'<rect class="stacked" fill="{colour_variable(series.colour)}" {box}/>')
                floor += height
    return "".join(parts)


def _draw_rows(panel: Panel, visible: Sequence[Series], top: float) -> str:
    ticks = _choose_value_ticks(panel, visible)
    labels = [shorten_label(label, _MAX_ROW_LABEL) for label in panel.labels]
    left, right, bottom = 18 + LETTER * max(map(len, labels)), WIDTH - _RIGHT, HEIGHT - _BOTTOM
    pitch = (bottom - top) / len(labels)

    def px(value: float) -> float:
        return round(left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    def py(position: float) -> float:
        return round(top + (position + 0.5) * pitch, 1)

    parts = []
    for tick in ticks:
        parts.append(f'<path class="{"axis" if tick == 0 else "grid"}" d="M{px(tick)} {top}V{bottom}"/>')
        text = format_tick(tick, ticks[1] - ticks[0])
        parts.append(f'<text class="middle" x="{px(tick)}" y="{bottom + 16}">{text}</text>')
    for at, label in enumerate(labels):
        parts.append(f'<text class="end" x="{left - 8}" y="{py(at) + 4}">{escape_label(label)}</text>')
    parts.append(_draw_bars(visible, px, py, pitch, horizontal=True))
    for line in panel.baselines:
        style = f"stroke:{colour_variable(line.colour)}"
        parts.append(f'<path class="base" style="{style}" d="M{px(line.value)} {top}V{bottom}"/>')
    parts.append(f'<text class="end" x="{right}" y="{HEIGHT - 6}">{escape_label(panel.x_label)}</text>')
    return "".join(parts)


def _draw_bars(
    visible: Sequence[Series],
    map_value: Callable[[float], float],
    map_position: Callable[[float], float],
    pitch: float,
    *,
    horizontal: bool = False,
) -> str:
    """Draw a bar per finite value of each series.

    `map_value` and `map_position` return pixels; positions are 0, 1, ..., `pitch` pixels apart.
    """
    thick = min(_MAX_BAR_WIDTH, 0.8 * pitch / len(visible))
    parts = []
    for number, series in enumerate(visible):
        shift = (number - (len(visible) - 1) / 2) * thick
        lows, highs = (ends or (None,) * len(series.x) for ends in (series.low, series.high))
        floors = series.floor or (0.0,) * len(series.x)
        for x, y, floor, low, high in zip(series.x, series.y, floors, lows, highs, strict=True):
            if y is None or not math.isfinite(y):
                continue
            middle = map_position(x) + shift
            begin, end = sorted((map_value(floor), map_value(y)))
            edge, width = round(middle - 0.45 * thick, 1), round(0.9 * thick, 1)
            box = (
                (begin, edge, round(end - begin, 1), width)
                if horizontal
                else (edge, begin, width, round(end - begin, 1))
            )
            size = 'x="{}" y="{}" width="{}" height="{}"'.format(*box)
            parts.append(f'<rect fill="{colour_variable(series.colour)}" {size}/>')
            if low is not None and high is not None:
                start, stop = map_value(low), map_value(high)
                line = f"{start} {middle:.1f}H{stop}" if horizontal else f"{middle:.1f} {start}V{stop}"
                parts.append(f'<path class="bar-whisker" d="M{line}"/>')
    return "".join(parts)


def _draw_zones(visible: Sequence[Series], frame: _Frame) -> str:
    curves = [(_clean_label(series.name), dict(series.points)) for series in visible]
    xs = sorted({x for _, by_x in curves for x in by_x})
    size = math.ceil(len(xs) / _MAX_ZONES)
    picked = xs[size - 1 :: size]
    bottom = HEIGHT - _BOTTOM
    edges = [_LEFT, *((frame.px(a) + frame.px(b)) / 2 for a, b in pairwise(picked)), WIDTH - _RIGHT]
    parts = []
    for x, (left, right) in zip(picked, pairwise(edges), strict=True):
        lines = [f"step {format_number(x, 5)}"]
        lines += [f"{name} {format_number(by_x[x])}" for name, by_x in curves if x in by_x]
        width = 12 + LETTER * max(map(len, lines))
        at = frame.px(x)
        box = at + 8 if at + 8 + width < WIDTH else at - 8 - width
        texts = "".join(
            f'<text x="{box + 6:.1f}" y="{frame.top + 14 + 14 * row}">{escape(line)}</text>'
            for row, line in enumerate(lines)
        )
        parts.append(
            f'<g class="zone"><rect x="{left:.1f}" y="{frame.top}" width="{right - left:.1f}" '
            f'height="{bottom - frame.top}"/><g class="tip"><path d="M{at} {frame.top}V{bottom}"/>'
            f'<rect x="{box:.1f}" y="{frame.top}" width="{width:.1f}" height="{14 * len(lines) + 6}" rx="4"/>'
            f"{texts}</g></g>"
        )
    return "".join(parts)


def _draw_legend(series: Sequence[Series], baselines: Sequence[Baseline]) -> tuple[str, int]:
    # name, colour, dashes, line width, whether it has dots
    entries: list[tuple[str, int | None, str, float, bool]] = [
        (_clean_label(s.name), s.colour, "5 4" if s.dashed else "none", 1.5 if s.low else 3, bool(s.low))
        for s in series
        if s.name and s.listed
    ]
    entries += [(_clean_label(line.name), line.colour, "2 4", 1.5, False) for line in baselines]
    parts, x, row = [], 12.0, 1
    for name, number, dashes, width, has_dots in entries:
        needed = 26 + LETTER * len(name)
        if x + needed > WIDTH - _RIGHT and x > 12:
            x, row = 12.0, row + 1
        y, colour = 22 + 16 * row, colour_variable(number)
        style = f"stroke:{colour};stroke-width:{width};stroke-dasharray:{dashes}"
        parts.append(f'<path style="{style}" d="M{x:g} {y - 4}h14"/><text x="{x + 19:g}" y="{y}">{escape(name)}</text>')
        if has_dots:
            parts.append(f'<circle class="dot" style="fill:{colour}" cx="{x + 7:g}" cy="{y - 4}" r="4"/>')
        x += needed + 8
    return "".join(parts), row if entries else 0


def _split_at_gaps(series: Series) -> list[list[Point]]:
    """Split `series` into segments of consecutive points; the last may be empty."""
    segments: list[list[Point]] = [[]]
    for x, y in zip(series.x, series.y, strict=True):
        if y is not None and math.isfinite(y):
            segments[-1].append((x, y))
        elif segments[-1]:
            segments.append([])
    return segments


def _format_path(segments: Sequence[Sequence[Point]], frame: _Frame) -> str:
    parts = []
    for segment in segments:
        points = [f"{frame.px(x):g} {frame.py(y):g}" for x, y in thin_points(segment)]
        if len(points) > 1:
            parts.append("M" + "L".join(points))
    return "".join(parts)


def _clean_label(text: str) -> str:
    # names that a model chose may have characters that XML forbids
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)[:80]


def shorten_label(text: str, longest: int) -> str:
    """Cut `text` to `longest` characters, the last of them an ellipsis."""
    return text if len(text) <= longest else text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def escape_label(text: str) -> str:
    """Escape the first 80 characters of `text`, with unprintable ones replaced."""
    return escape(_clean_label(text))


def draw_forest(
    value: float,
    low: float | None,
    high: float | None,
    limit: float,
    *,
    better: Literal["more", "less"] = "more",
) -> str:
    """Draw `value` as a dot, its interval (unless None) as a line, on an axis from ``-limit`` to ``+limit``.

    The colour says whether the whole interval is better, worse, or neither; `better` is the good direction.
    """

    def x(number: float) -> float:
        clipped = max(-limit, min(limit, number))
        return round(6 + (_FOREST_WIDTH - 12) * (clipped / limit + 1) / 2, 1)

    middle, verdict, whisker, interval = _FOREST_HEIGHT / 2, "neither", "", "too few for a 95 % interval"
    if low is not None and high is not None:
        is_better = low > 0 if better == "more" else high < 0
        verdict = "neither" if low <= 0 <= high else "better" if is_better else "worse"
        whisker = f'<path class="whisker" d="M{x(low)} {middle}H{x(high)}"/>'
        interval = f"95 % interval {low:+.3f} to {high:+.3f}"
    return (
        f'<svg class="forest {verdict}" viewBox="0 0 {_FOREST_WIDTH} {_FOREST_HEIGHT}" width="{_FOREST_WIDTH}" '
        f'height="{_FOREST_HEIGHT}" role="img" '
        f'aria-label="{value:+.3f}, {interval}">'
        f'<path class="zero" d="M{x(0)} 0V{_FOREST_HEIGHT}"/>'
        f'{whisker}<circle cx="{x(value)}" cy="{middle}" r="3.5"/></svg>'
    )


def convert_to_pdf(svg: str) -> bytes:
    """Convert a standalone figure to PDF, reproducibly. Raises `PrerequisiteError` without svglib."""
    # svglib ignores CSS variables, and draws fonts given in px at 4/3 of their size
    require_extra("pdf", "a figure as PDF")
    from reportlab.graphics import renderPDF
    from svglib.svglib import svg2rlg

    root = ElementTree.fromstring(svg)
    style, background = root[:2]  # which `wrap_svg` puts first; paper needs no background
    style.text = _resolve_light_colours(STYLE.replace("px;", ";"))
    root.remove(background)
    for element in root.iter():
        element.attrib.update({name: _resolve_light_colours(value) for name, value in element.attrib.items()})
    drawing = svg2rlg(io.BytesIO(ElementTree.tostring(root)))
    page: bytes = renderPDF.drawToString(drawing, invariant=1)
    return page


def _resolve_light_colours(css: str) -> str:
    return _VARIABLE.sub(lambda match: _LIGHT.get(match[1], match[0]), css)
