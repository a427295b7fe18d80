"""An estimate and its interval on a line, for a cell of a table."""

from __future__ import annotations

from typing import Literal


def forest(
    value: float,
    low: float | None,
    high: float | None,
    reach: float,
    *,
    better: Literal["more", "less"] = "more",
    width: int = 150,
    height: int = 18,
) -> str:
    """A dot with whiskers (unless their ends are None) on an axis from ``-reach`` to ``+reach``, zero marked.

    Coloured by what the whole interval says: `better`, worse, or (zero is in it) neither.
    Raises ValueError unless `reach` > 0.
    """
    if reach <= 0:
        raise ValueError("reach must be positive")

    def x(number: float) -> float:
        inside = max(-reach, min(reach, number))
        return round(6 + (width - 12) * (inside / reach + 1) / 2, 1)

    middle, mood, whisker, ends = height / 2, "neither", "", "too few for a 95 % interval"
    if low is not None and high is not None:
        good = low > 0 if better == "more" else high < 0
        mood = "neither" if low <= 0 <= high else "better" if good else "worse"
        whisker = f'<path class="whisker" d="M{x(low)} {middle}H{x(high)}"/>'
        ends = f"95 % interval {low:+.3f} to {high:+.3f}"
    return (
        f'<svg class="forest {mood}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{value:+.3f}, {ends}">'
        f'<path class="zero" d="M{x(0)} 0V{height}"/>'
        f'{whisker}<circle cx="{x(value)}" cy="{middle}" r="3.5"/></svg>'
    )
