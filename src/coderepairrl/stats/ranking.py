"""How well a value ranks right above wrong, over all attempts and among attempts at one task."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from coderepairrl.stats.intervals import Interval

_DRAWS = 2_000

Array = NDArray[np.float64]


class Ranking:
    """The area under the ROC curve (AUC) of `values` for `outcomes`: overall, and within clusters that have both.

    An AUC is the probability that a right attempt is valued above a wrong one, ties counting half. Within clusters it
    is the mean over those clusters. Intervals come from resampling whole clusters; two rankings of the same attempts
    draw the same clusters, so their differences are paired.

    >>> ranking = Ranking([0.9, 0.2, 0.4, 0.1], [True, False, True, False], "aabb")
    >>> ranking.overall, ranking.within
    (1.0, 1.0)
    """

    def __init__(self, values: Sequence[float], outcomes: Sequence[bool], clusters: Sequence[Hashable]) -> None:
        names = {name: at for at, name in enumerate(dict.fromkeys(clusters))}
        self._cluster = np.array([names[name] for name in clusters])
        self._size = len(names)
        self._level = np.unique(np.array(values, dtype=float), return_inverse=True)[1]
        self._right = np.array(outcomes, dtype=float)
        if not 0 < self._right.sum() < len(self._right):
            raise ValueError("a ranking needs right and wrong attempts")
        each = [
            auc(self._level[mask], self._right[mask], np.ones(mask.sum()))
            for mask in (self._cluster == at for at in range(self._size))
            if 0 < self._right[mask].sum() < mask.sum()
        ]
        self._each = np.full(self._size, np.nan)
        self._each[self.mixed] = each

    @property
    def mixed(self) -> NDArray[np.intp]:
        """Clusters with right and wrong attempts."""
        right = np.bincount(self._cluster, self._right, self._size)
        return np.flatnonzero((right > 0) & (right < np.bincount(self._cluster, minlength=self._size)))

    @property
    def overall(self) -> float:
        """AUC over all attempts."""
        return auc(self._level, self._right, np.ones(len(self._right)))

    @property
    def within(self) -> float:
        """Mean AUC over clusters with both outcomes; NaN if there is none."""
        return float(np.mean(self._each[self.mixed])) if len(self.mixed) else float("nan")

    def draws(self, seed: int = 0) -> tuple[Array, Array]:
        """Both AUCs of resampled clusters."""
        rng = np.random.default_rng(seed)
        overall, within = np.empty(_DRAWS), np.empty(_DRAWS)
        mixed = self.mixed
        for at in range(_DRAWS):
            counts = np.bincount(rng.integers(0, self._size, self._size), minlength=self._size).astype(float)
            overall[at] = auc(self._level, self._right, counts[self._cluster])
            weight = counts[mixed]
            within[at] = (weight @ self._each[mixed]) / weight.sum() if weight.any() else np.nan
        return overall, within


def auc(levels: NDArray[np.intp], right: Array, weights: Array) -> float:
    """Weighted AUC of values given as the ranks of their distinct levels; NaN if all attempts end alike."""
    good = np.bincount(levels, weights * right)
    bad = np.bincount(levels, weights * (1 - right))
    pairs = good.sum() * bad.sum()
    return float(good @ (np.cumsum(bad) - bad / 2) / pairs) if pairs else float("nan")


def interval(value: float, draws: Array) -> Interval:
    """`value` with the middle 95 % of `draws`; no interval where these are all equal (one cluster, or no error)."""
    low, high = np.nanquantile(draws, (0.025, 0.975))
    return Interval(value, float(low), float(high)) if high > low else Interval(value, None, None)


def rank_correlation(values: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Spearman's correlation of values and outcomes, ties at their mean rank; NaN if either never varies.

    >>> rank_correlation([0.1, 0.2, 0.9], [False, False, True])
    0.8660254037844387
    """
    ranks = []
    for side in (values, outcomes):
        _, level, counts = np.unique(np.array(side, dtype=float), return_inverse=True, return_counts=True)
        rank = (np.cumsum(counts) - (counts - 1) / 2)[level]
        ranks.append(rank - rank.mean())
    norm = float(np.sqrt((ranks[0] @ ranks[0]) * (ranks[1] @ ranks[1])))
    return float(ranks[0] @ ranks[1]) / norm if norm else float("nan")
