"""Intervals for means, proportions and paired differences, clustered where attempts share a task (REQUIREMENTS E6)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_DRAWS = 2_000
_FLIPS, _EXACT = 10_000, 12


class Interval(NamedTuple):
    """An estimate with its 95 % interval.

    >>> str(Interval(0.5, 0.4, 0.6))
    '0.500 [0.400, 0.600]'
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap_mean(values: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0) -> Interval:
    """Mean of `values`, percentile interval by resampling whole `clusters` (one label per value).

    Raises ValueError without values.
    """
    sums, counts = _by_cluster(values, clusters)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(sums), size=(_DRAWS, len(sums)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))


def paired_difference(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0
) -> Interval:
    """Mean of ``after - before`` over pairs, clustered as in `bootstrap_mean`. Raises ValueError on unequal lengths."""
    differences = [late - early for early, late in zip(before, after, strict=True)]
    return bootstrap_mean(differences, clusters, seed=seed)


def sign_flip_test(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0
) -> float:
    """Two-sided p-value of the paired permutation test: could ``after - before`` as well have the other sign?

    Whole `clusters` change sign together: all of their ``2^n`` combinations up to 12 clusters, else 10,000 random
    ones. Raises ValueError without values or on unequal lengths.

    >>> sign_flip_test([0, 0, 0], [1, 1, 1], "abc"), sign_flip_test([0, 1], [1, 0], "ab")
    (0.25, 1.0)
    """
    differences = [late - early for early, late in zip(before, after, strict=True)]
    sums, _ = _by_cluster(differences, clusters)
    if len(sums) <= _EXACT:
        bits = np.arange(1 << len(sums))[:, None] >> np.arange(len(sums)) & 1
        extreme, drawn = 0, len(bits)
    else:
        bits = np.random.default_rng(seed).integers(0, 2, size=(_FLIPS, len(sums)))
        extreme, drawn = 1, len(bits) + 1  # the observed signs are one of the possible draws
    flipped = np.abs((1 - 2 * bits) @ sums)
    return float((extreme + np.count_nonzero(flipped >= abs(sums.sum()) - 1e-9)) / drawn)


def wilson(successes: int, trials: int) -> Interval:
    """Wilson score interval of a proportion.

    >>> str(wilson(36, 500))
    '0.072 [0.052, 0.098]'
    """
    if trials == 0:
        raise ValueError("a proportion of no trials has no interval")
    z, p = 1.959963984540054, successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return Interval(p, centre - half, centre + half)


def _by_cluster(
    values: Sequence[float], clusters: Sequence[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if not values:
        raise ValueError("a mean of no values has no interval")
    rows: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        rows.setdefault(cluster, []).append(value)
    return np.array([sum(row) for row in rows.values()]), np.array([len(row) for row in rows.values()], dtype=float)
