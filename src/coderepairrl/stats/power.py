"""Power of comparisons: the smallest detectable difference, and the tasks needed.

A paired comparison of n tasks tests the mean of their differences D at a two-sided level of 5 %. Power is that of the
normal approximation, with variance E[D²] under the null hypothesis, else E[D²] - effect²: with one attempt per task,
Connor's formula for McNemar's test (1987, Biometrics 43, 207).

The design effect is the variance of whole clusters over that of independent tasks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from coderepairrl.stats.intervals import Interval, estimate_mean, find_end, mean_interval, student_quantile

ALPHA, POWER = 0.05, 0.8
_LEAST = 6
"""Fewest tasks for a two-sided exact test, if all change for the better: 2 * 0.5 ** 6 < 0.05."""


def needed_tasks(
    effect: float, square: float, *, power: float = POWER, design: float = 1.0, freedom: int | None = None
) -> float:
    """Tasks that show a mean difference of `effect`, given the mean `square` of a task's difference (E[D²]).

    `design` is the design effect; with `freedom` quantiles are Student's.
    """
    level, miss = _quantiles(power, freedom)
    square = max(square, effect)
    return design * max(_LEAST, ((level * math.sqrt(square) + miss * math.sqrt(square - effect**2)) / effect) ** 2)


def smallest_detectable(
    tasks: float, square: float, *, power: float = POWER, design: float = 1.0, freedom: int | None = None
) -> float | None:
    """Smallest mean difference of shares that `tasks` tasks would have shown, if any."""

    def is_shown(effect: float) -> bool:
        return needed_tasks(effect, square, power=power, design=design, freedom=freedom) <= tasks

    return find_end(is_shown, 1.0, 0.0) if is_shown(1.0) else None


def smallest_detectable_interval(variance: float, freedom: float, *, power: float = POWER) -> Interval:
    """Smallest detectable difference of means, given its `variance`, with the variance's interval (chi-squared)."""
    from scipy import special

    seen = sum(_quantiles(power, freedom)) * math.sqrt(variance)
    # special.chdtri is of the upper tail
    low, high = (seen * math.sqrt(freedom / special.chdtri(freedom, tail)) for tail in (0.025, 0.975))
    return Interval(seen, float(low), float(high))


def _quantiles(power: float, freedom: float | None) -> tuple[float, float]:
    return student_quantile(freedom, 1 - ALPHA / 2), student_quantile(freedom, power)


class Spread(NamedTuple):
    """Variation over tasks of differences between two policies."""

    square: Interval
    """Mean square of a task's difference, E[D²]."""
    design: float


def spread_of_shares(before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable]) -> Spread:
    """Spread of shares by task. Raises ValueError without tasks."""
    gains = [late - early for early, late in zip(before, after, strict=True)]
    gain_estimate = estimate_mean(gains, clusters)
    independent = math.fsum((gain - gain_estimate.mean) ** 2 for gain in gains) / len(gains) ** 2
    # equal differences show no effect of clusters: each cluster is one observation, as for intervals
    design = gain_estimate.variance / independent if gain_estimate.variance else len(gains) / gain_estimate.clusters
    square = mean_interval([gain * gain for gain in gains], clusters, share=True)
    return Spread(square, design)
