"""Bars side by side, vertical or horizontal, with intervals as whiskers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from coderepairrl.report.plots.panels import Series, colour_variable

_MAX_THICKNESS = 30.0


def draw_bars(
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
    thick = min(_MAX_THICKNESS, 0.8 * pitch / len(visible))
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
