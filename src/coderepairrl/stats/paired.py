"""Two policies on the same tasks: McNemar's test, Holm's correction, bootstrap, Cohen's d.

McNemar 1947: Psychometrika 12, 153. Fagerland, Lydersen, Laake 2013 (mid-p): BMC Med. Res. Methodol. 13, 91.
Holm 1979: Scand. J. Stat. 6, 65.

Cohen's d: 0.2 is called small, 0.5 medium, 0.8 large (Cohen 1988, "Statistical Power Analysis"). Clusters are
drawn with replacement, with all attempts of both policies. The interval is the expanded percentile one (Hesterberg
2015, Am. Stat. 69, 371): the plain one is too narrow for few clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coderepairrl.stats.intervals import Interval, student_quantile, t_probability


class McNemar(NamedTuple):
    """Tasks by who solved them, and two-sided p-values of `only_before` against `only_after`."""

    both: int
    only_before: int
    only_after: int
    neither: int
    exact: float
    """Binomial test, conservative."""
    mid_p: float
    """With half of the observed probability: closer to the nominal level."""


def mcnemar_test(before: Sequence[bool], after: Sequence[bool]) -> McNemar:
    """McNemar's test of solved tasks, one attempt each."""
    pairs = list(zip(before, after, strict=True))
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    exact, mid_p = mcnemar_p(lost, gained)
    return McNemar(pairs.count((True, True)), lost, gained, pairs.count((False, False)), exact, mid_p)


def mcnemar_p(lost: int, gained: int) -> tuple[float, float]:
    """Exact and mid-p value for numbers of tasks solved by one policy only."""
    from scipy import special

    fewer, differ = min(lost, gained), lost + gained
    tail = float(special.bdtr(fewer, differ, 0.5))
    observed = math.comb(differ, fewer) / 2**differ
    return min(1.0, 2 * tail), min(1.0, 2 * tail - observed)


def adjust_holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values. Raises ValueError outside [0, 1]."""
    if not all(0 <= each <= 1 for each in p):
        raise ValueError("p-values are from 0 to 1")
    adjusted, worst = [0.0] * len(p), 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        worst = max(worst, min(1.0, (len(p) - rank) * p[at]))
        adjusted[at] = worst
    return adjusted


Array = NDArray[np.float64]

_DRAWS = 2_000
_ROUNDING = 1e-12


def bootstrap(
    columns: Sequence[Sequence[float]], clusters: Sequence[Hashable], statistic: Callable[[Array], Array]
) -> Interval | None:
    """`statistic` of the means of `columns` (rows are tasks), with its clustered bootstrap interval.

    `statistic` maps means, ``(columns, draws)``, to one value per draw, or NaN. None if undefined; no interval for
    fewer than 2 clusters, or equal draws.
    """
    table = np.array(columns, dtype=float)
    names = {name: at for at, name in enumerate(dict.fromkeys(clusters))}
    rows = np.vstack([table, np.ones(len(clusters))])  # the ones count tasks
    sums = np.zeros((len(rows), len(names)))
    np.add.at(sums.T, [names[name] for name in clusters], rows.T)
    value = float(statistic(_compute_drawn_means(sums, np.ones((1, len(names)))))[0])
    if not math.isfinite(value):
        return None
    if len(names) < 2:
        return Interval(value, None, None)
    draws = statistic(_compute_drawn_means(sums, _draw_clusters(len(names))))
    tail = _expand_tail(len(names))
    low, high = np.quantile(draws[np.isfinite(draws)], (tail, 1 - tail))
    if high - low <= _ROUNDING * max(1.0, abs(value)):
        return Interval(value, None, None)
    return Interval(value, float(low), float(high))


def divide(numerator: Array, denominator: Array) -> Array:
    """Divide elementwise; NaN, which `bootstrap` leaves out, where `denominator` is 0 up to rounding."""
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > _ROUNDING)


def _draw_clusters(clusters: int) -> Array:
    """Number of draws of each cluster, ``(draws, clusters)``."""
    picked = np.random.default_rng(0).integers(0, clusters, (_DRAWS, clusters))
    picked += np.arange(_DRAWS)[:, None] * clusters  # a range of numbers for each draw, to count all at once
    return np.bincount(picked.ravel(), minlength=_DRAWS * clusters).reshape(_DRAWS, clusters).astype(float)


def _compute_drawn_means(sums: Array, counts: Array) -> Array:
    # the last row of `sums` counts the tasks of each cluster
    drawn = sums @ counts.T
    return np.asarray(drawn[:-1] / drawn[-1])


def _expand_tail(clusters: int) -> float:
    """Tail probability of Hesterberg's interval."""
    quantile = student_quantile(clusters - 1, 0.025)
    return t_probability(quantile * math.sqrt(clusters / (clusters - 1)), None)


def bootstrap_difference(before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable]) -> Interval:
    """Mean of ``after - before`` over tasks, with its bootstrap interval."""
    interval = bootstrap([before, after], clusters, lambda means: means[1] - means[0])
    assert interval is not None  # a difference of means is a number
    return interval


def cohens_d(before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable]) -> Interval | None:
    """Cohen's d; None for a single task, or without variance."""
    size = len(clusters)
    if size < 2:
        return None
    centre = (sum(before) + sum(after)) / (2 * size)  # far from 0, rounding would lose variance
    early, late = np.array(before, dtype=float) - centre, np.array(after, dtype=float) - centre

    def statistic(means: Array) -> Array:
        first, last, first_square, last_square = means
        variance = (first_square - first**2 + last_square - last**2) / 2 * size / (size - 1)
        is_positive = variance > _ROUNDING * (first_square + last_square)
        return np.asarray(np.where(is_positive, (last - first) / np.sqrt(np.where(is_positive, variance, 1.0)), np.nan))

    return bootstrap([early.tolist(), late.tolist(), (early**2).tolist(), (late**2).tolist()], clusters, statistic)
