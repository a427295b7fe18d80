"""Tests of two policies on the same tasks: McNemar's, equivalence, and Holm's correction.

McNemar's tests are about these tasks; `equivalence`, of whole clusters, also about tasks from other repositories.

McNemar 1947: Psychometrika 12, 153. Fagerland, Lydersen, Laake 2013 (mid-p): BMC Med. Res. Methodol. 13, 91. Schuirmann
1987 (two one-sided tests): J. Pharmacokinet. Biopharm. 15, 657. Tango 1998 (paired proportions): Stat. Med. 17, 891.
Holm 1979: Scand. J. Stat. 6, 65.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from scipy import special

from coderepairrl.stats.intervals import Interval, estimate, paired_shares, tango, tango_variance


class McNemar(NamedTuple):
    """Tasks by who solved them, and two-sided p-values of `only_before` against `only_after`."""

    both: int
    only_before: int
    only_after: int
    neither: int
    exact: float
    """Binomial: never rejects too often."""
    mid_p: float
    """With half of the observed probability: nearer to the level."""


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> McNemar:
    """McNemar's test of solved tasks, one attempt each. Raises ValueError without tasks."""
    pairs = [(bool(early), bool(late)) for early, late in zip(before, after, strict=True)]
    if not pairs:
        raise ValueError("no tasks, so there is nothing to test")
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    exact, mid_p = mcnemar_p(lost, gained)
    return McNemar(pairs.count((True, True)), lost, gained, pairs.count((False, False)), exact, mid_p)


def mcnemar_p(lost: int, gained: int) -> tuple[float, float]:
    """Exact and mid-p value for numbers of tasks solved by one policy only."""
    if min(lost, gained) < 0:
        raise ValueError("numbers of tasks are not negative")
    fewer, differ = min(lost, gained), lost + gained
    tail = float(special.bdtr(fewer, differ, 0.5))
    observed = math.comb(differ, fewer) / 2**differ
    return min(1.0, 2 * tail), min(1.0, 2 * tail - observed)


class Equivalence(NamedTuple):
    """Two one-sided tests of a difference within ``(-margin, margin)``."""

    margin: float
    p: float
    """Larger of both p-values: below 0.05 the 90 % interval lies within the margin."""
    interval: Interval


def equivalence(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable], margin: float, *, share: bool
) -> Equivalence | None:
    """Test whether ``|after - before|`` is below `margin`, by Tango's statistic for a `share`, else Student's.

    None with too little data. Raises ValueError for a non-positive margin.
    """
    if not margin > 0:
        raise ValueError(f"a margin of equivalence is positive, not {margin}")
    if share:
        pairs = paired_shares(before, after, clusters)
        if pairs.clusters < 2:
            return None
        mean, freedom = pairs.mean, pairs.freedom

        def statistic(level: float) -> float:
            variance = tango_variance(level, pairs.lost, pairs.gained, pairs.pairs)
            return _ratio(mean - level, math.sqrt(variance / pairs.pairs))

        _, low, high = tango(pairs.lost, pairs.gained, pairs.pairs, _quantile(0.95, freedom))
    else:
        change = estimate([late - early for early, late in zip(before, after, strict=True)], clusters)
        if change.clusters < 2 or change.variance == 0:
            return None
        mean, freedom, error = change.mean, change.clusters - 1, math.sqrt(change.variance)

        def statistic(level: float) -> float:
            return (mean - level) / error

        half = _quantile(0.95, freedom) * error
        low, high = mean - half, mean + half
    p = max(_below(statistic(margin), freedom), _below(-statistic(-margin), freedom))
    return Equivalence(margin, p, Interval(mean, low, high))


def _ratio(distance: float, error: float) -> float:
    # of a margin as wide as differences can be the error is 0
    return distance / error if error else math.copysign(math.inf, distance)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values. Raises ValueError unless probabilities."""
    if not all(0 <= each <= 1 for each in p):
        raise ValueError("p-values are from 0 to 1")
    adjusted, worst = [0.0] * len(p), 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        worst = max(worst, min(1.0, (len(p) - rank) * p[at]))
        adjusted[at] = worst
    return adjusted


def _quantile(probability: float, freedom: int | None) -> float:
    return float(special.ndtri(probability) if freedom is None else special.stdtrit(freedom, probability))


def _below(value: float, freedom: int | None) -> float:
    return float(special.ndtr(value) if freedom is None else special.stdtr(freedom, value))
