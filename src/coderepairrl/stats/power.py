"""Power of comparisons: the smallest detectable difference, and the tasks and attempts needed.

A paired comparison of n tasks tests the mean of their differences D at a two-sided level of 5 %. Power is that of the
normal approximation, with variance E[D²] in the test, and E[D²] - effect² in the draws: with one attempt per task,
Connor's formula for McNemar's test (1987, Biometrics 43, 207).

The design effect is the variance of whole clusters over that of independent tasks. E[D²] at k attempts is
``between + within / k``: two attempts per task separate these; one gives a range.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from scipy import special

from coderepairrl.stats.intervals import Interval, estimate_mean, mean_interval, student_quantile

ALPHA, POWER = 0.05, 0.8
_LEAST = 6
"""Fewest tasks, all changed for the better, for a two-sided exact test: 2 * 0.5 ** 6 < 0.05."""
_HALVINGS = 80


def needed_tasks(
    effect: float, square: float, *, power: float = POWER, design: float = 1.0, freedom: int | None = None
) -> float:
    """Tasks that show a mean difference of `effect`, given the mean `square` of a task's difference (E[D²]).

    `design` is the design effect; with `freedom` the test is Student's. Raises ValueError out of range.
    """
    if not 0 < effect <= 1:
        raise ValueError(f"an effect to be shown is above 0 and at most 1, not {effect}")
    if not 0 <= square <= 1:
        raise ValueError(f"the mean square of a difference of shares is from 0 to 1, not {square}")
    level, miss = _quantiles(power, freedom)
    square = max(square, effect)
    return design * max(_LEAST, ((level * math.sqrt(square) + miss * math.sqrt(square - effect**2)) / effect) ** 2)


def smallest_detectable(
    tasks: float, square: float, *, power: float = POWER, design: float = 1.0, freedom: int | None = None
) -> float | None:
    """Smallest mean difference of shares that `tasks` tasks would have shown, if any."""
    low, high = 0.0, 1.0
    if needed_tasks(high, square, power=power, design=design, freedom=freedom) > tasks:
        return None
    for _ in range(_HALVINGS):  # the larger the effect, the fewer tasks
        middle = (low + high) / 2
        if middle and needed_tasks(middle, square, power=power, design=design, freedom=freedom) <= tasks:
            high = middle
        else:
            low = middle
    return high


def smallest_detectable_interval(variance: float, freedom: float, *, power: float = POWER) -> Interval:
    """Smallest detectable difference of means, given its `variance`, with the variance's interval (chi-squared)."""
    seen = sum(_quantiles(power, freedom)) * math.sqrt(variance)
    # special.chdtri is of the upper tail
    low, high = (seen * math.sqrt(freedom / special.chdtri(freedom, tail)) for tail in (0.025, 0.975))
    return Interval(seen, float(low), float(high))


def _quantiles(power: float, freedom: float | None) -> tuple[float, float]:
    if not ALPHA < power < 1:
        raise ValueError(f"a power is above {ALPHA} and below 1, not {power}")
    return student_quantile(freedom, 1 - ALPHA / 2), student_quantile(freedom, power)


class Spread(NamedTuple):
    """Variation over tasks of differences between two policies."""

    square: Interval
    design: float
    clusters: int
    attempts: tuple[int, int]
    """Fewest attempts per task, before and after."""
    within: Sequence[float] | None
    """Each task's variance of one attempt, before plus after; None where a side has one attempt."""
    squares: Sequence[float]
    """Each task's D², less its chance part where `within` is known."""
    labels: Sequence[Hashable]

    def at(self, attempts: int) -> Interval:
        """E[D²] for `attempts` per task; `value` is the cautious end with single attempts.

        Raises ValueError if one side's single attempts allow no estimate.
        """
        if attempts < 1:
            raise ValueError(f"attempts per task are at least 1, not {attempts}")
        if self.within is not None:
            each = [square + noise / attempts for square, noise in zip(self.squares, self.within, strict=True)]
            mean = mean_interval(each, self.labels, share=False)
            low, high = (None if end is None else min(1.0, max(0.0, end)) for end in (mean.low, mean.high))
            return Interval(min(1.0, max(0.0, mean.value)), low, high)
        if attempts == 1 == max(self.attempts) or self.square.low is None:
            return self.square
        if max(self.attempts) > 1:
            raise ValueError("where one side has one attempt per task, other numbers of attempts cannot be planned")
        return Interval(self.square.value, self.square.low / attempts, self.square.high)


def spread_of_shares(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], clusters: Sequence[Hashable]
) -> Spread:
    """Spread of shares, values by task and attempt.

    Raises ValueError without tasks, and for a task without an attempt.
    """
    pairs = list(zip(before, after, clusters, strict=True))
    if not pairs or not all(early and late for early, late, _ in pairs):
        raise ValueError("a spread needs tasks, and attempts at each")
    gains = [math.fsum(late) / len(late) - math.fsum(early) / len(early) for early, late, _ in pairs]
    gain_estimate = estimate_mean(gains, clusters)
    independent = math.fsum((gain - gain_estimate.mean) ** 2 for gain in gains) / len(gains) ** 2
    # of equal differences nothing is seen of clusters: each is one observation, as for intervals
    design = gain_estimate.variance / independent if gain_estimate.variance else len(gains) / gain_estimate.clusters
    least = min(len(early) for early, _, _ in pairs), min(len(late) for _, late, _ in pairs)
    squares, within = [gain * gain for gain in gains], None
    if min(least) > 1:
        noise = [(_variance(early), _variance(late)) for early, late, _ in pairs]
        within = [first + last for first, last in noise]
        squares = [
            square - first / len(early) - last / len(late)
            for square, (first, last), (early, late, _) in zip(squares, noise, pairs, strict=True)
        ]
    square = mean_interval([gain * gain for gain in gains], clusters, share=True)
    return Spread(square, design, gain_estimate.clusters, least, within, squares, clusters)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
