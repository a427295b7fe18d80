"""Bars side by side, upright or lying, with intervals as whiskers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from coderepairrl.report.plots.panels import Series, colour_variable

_THICKEST = 30.0


def draw_bars(
    visible: Sequence[Series],
    along: Callable[[float], float],
    across: Callable[[float], float],
    pitch: float,
    *,
    lying: bool = False,
) -> str:
    """Draw a bar per finite value of each series.

    `along` maps values, and `across` positions (0, 1, ...), to pixels; `pitch` is the pixels between two positions.
    """
    thick = min(_THICKEST, 0.8 * pitch / len(visible))
    parts = []
    for number, series in enumerate(visible):
        shift = (number - (len(visible) - 1) / 2) * thick
        lows, highs = (ends or (None,) * len(series.x) for ends in (series.low, series.high))
        floors = series.floor or (0.0,) * len(series.x)
        for x, y, floor, low, high in zip(series.x, series.y, floors, lows, highs, strict=True):
            if y is None or not math.isfinite(y):
                continue
            middle = across(x) + shift
            begin, end = sorted((along(floor), along(y)))
            edge, width = round(middle - 0.45 * thick, 1), round(0.9 * thick, 1)
            box = (begin, edge, round(end - begin, 1), width) if lying else (edge, begin, width, round(end - begin, 1))
            size = 'x="{}" y="{}" width="{}" height="{}"'.format(*box)
            parts.append(f'<rect fill="{colour_variable(series.colour)}" {size}/>')
            if low is not None and high is not None:
                start, stop = along(low), along(high)
                line = f"{start} {middle:.1f}H{stop}" if lying else f"{middle:.1f} {start}V{stop}"
                parts.append(f'<path class="bar-whisker" d="M{line}"/>')
    return "".join(parts)
