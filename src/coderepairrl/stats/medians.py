"""Medians with 95 % intervals, of whole clusters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from statistics import median

from coderepairrl.stats.intervals import Interval, mean_interval


def median_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Interval:
    """Median of `values`, one cluster label each.

    The interval has every value v at which half may lie: the share of values up to v has one half in its own interval
    (`mean_interval`), as Woodruff (1952, J. Am. Stat. Assoc. 47, 635) and Francisco and Fuller (1991, Ann. Stat. 19,
    454) turn intervals of shares into those of quantiles. Its ends are values that occur. Where both are the same one,
    the next that occur on either side stand for them; with one cluster, and where all values are equal, there is none:
    too few. Raises ValueError without values.

    >>> str(median_interval([float(v) for v in range(1, 100)], range(99)))
    '50.000 [40.000, 60.000]'
    >>> str(median_interval([3.0] * 9, range(9)))
    '3.000 [too few]'
    """
    middle, known = float(median(values)), sorted(set(values))
    if len(set(clusters)) < 2 or len(known) < 2:
        return Interval(middle, None, None)

    def first(reached: Callable[[Interval], bool]) -> int:
        """The place in `known` of the least value up to which `reached` holds."""

        def holds(value: float) -> bool:
            return reached(mean_interval([float(each <= value) for each in values], clusters, share=True))

        return min(bisect_left(known, True, key=holds), len(known) - 1)

    low, high = (
        first(lambda share: not share.below(0.5)),
        first(lambda share: share.low is not None and share.low >= 0.5),
    )
    if known[low] >= known[high]:
        low, high = max(0, low - 1), min(len(known) - 1, high + 1)
    return Interval(middle, min(middle, known[low]), max(middle, known[high]))
