"""The smoothing rule of all curves."""

from __future__ import annotations

from collections.abc import Sequence

_DROP = 0.005
_WINDOW = 20.0


def ema(values: Sequence[float | None], alpha: float) -> list[float | None]:
    """Exponential moving average ``s_t = alpha x_t + (1 - alpha) s_{t-1}``; a gap stays a gap.

    The first 0.5 % of the points are left out, since a start says little and would pull the average for long.
    Raises ValueError for an `alpha` outside (0, 1].

    >>> ema([0.0, 1.0, None, 1.0], 0.5)
    [0.0, 0.5, None, 0.75]
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is in (0, 1], not {alpha}")
    smooth: list[float | None] = []
    state: float | None = None
    for at, value in enumerate(values):
        if value is None or at < int(_DROP * len(values)):
            smooth.append(None)
            continue
        state = value if state is None else alpha * value + (1 - alpha) * state
        smooth.append(state)
    return smooth


def strength(points: int, rule: float) -> float:
    """The `alpha` for a curve of `points` points where the rule says `rule` (.01 for rewards, .05 for tools).

    The rule was made for thousands of steps; on 60 it would draw the first value all along. So a shorter run gets
    the alpha that keeps the average's span at a tenth of the run, and the rule's own from 2,000 (400) steps on.

    >>> strength(5_000, 0.01), strength(50, 0.01), strength(5, 0.01)
    (0.01, 0.4, 1.0)
    """
    return min(1.0, max(rule, _WINDOW / max(points, 1)))
