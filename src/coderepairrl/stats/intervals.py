"""95 % intervals for means, shares and paired differences, and a sign-flip test, all by whole clusters.

The variance of a mean is that of a ratio estimator over G clusters, times G / (G - 1), but never below that of
independent values; quantiles are Student's with G - 1 degrees of freedom (Korn and Graubard 1998). Shares (means of
values in [0, 1]) have Wilson's score interval (1927), differences of two shares Tango's (1998), both for the effective
number of observations: p (1 - p) over the variance. These hold for few clusters and small p, unlike a percentile
bootstrap (Dean and Pagano 2015; tests/stats/test_coverage.py), but not for rare shares of strongly clustered values.

Equal shares count as one observation per cluster. One cluster, or equal values that are no shares, have no interval.

Wilson 1927: J. Am. Stat. Assoc. 22, 209. Korn, Graubard 1998: Surv. Methodol. 24, 193. Tango 1998: Stat. Med. 17, 891.
Dean, Pagano 2015: J. Surv. Stat. Methodol. 3, 484.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coderepairrl.types import Episode

TOO_FEW = "too few"

_FLIPS, _EXACT = 10_000, 12  # random sign flips; most clusters of which all flips are tried
_Z = NormalDist().inv_cdf(0.975)
_ROUNDING = 1e-12
SHARE_TOLERANCE = 5e-4
"""Difference up to which shares count as equal, since they print so: an edit in a wrong place scores 1e-9."""


class Interval(NamedTuple):
    """Estimate with its 95 % interval; both ends are None with too little data.

    >>> str(Interval(0.5, 0.4, 0.6)), str(Interval(0.5, None, None))
    ('0.500 [0.400, 0.600]', '0.500 [too few]')
    """

    value: float
    low: float | None
    high: float | None

    def is_all_above(self, level: float) -> bool:
        """Whether the interval lies above `level`."""
        return self.low is not None and self.low > level

    def is_all_below(self, level: float) -> bool:
        """Whether the interval lies below `level`."""
        return self.high is not None and self.high < level

    def text(self, form: str = ".3f") -> str:
        """Readable text, each number in `form`.

        >>> Interval(0.5, -0.25, 1).text("+.2f")
        '+0.50 [-0.25, +1.00]'
        """
        ends = TOO_FEW if self.low is None or self.high is None else f"{self.low:{form}}, {self.high:{form}}"
        return f"{self.value:{form}} [{ends}]"

    def __str__(self) -> str:
        return self.text()


def mean_interval(
    values: Sequence[float], clusters: Sequence[Hashable], *, share: bool, least: float = -math.inf
) -> Interval:
    """Mean of `values`, one cluster label each, with an interval not below `least`.

    A `share` has values in [0, 1]. Raises ValueError without values, or for values out of range.

    >>> str(mean_interval([0, 0, 0, 0], "abcd", share=True)), str(mean_interval([7, 7, 7], "abc", share=False))
    ('0.000 [0.000, 0.490]', '7.000 [too few]')
    """
    mean = estimate_mean(values, clusters, SHARE_TOLERANCE if share else 0.0)
    if share:
        _check_share(values)
    if mean.clusters < 2 or (mean.variance == 0 and not share):
        return Interval(mean.mean, None, None)
    if share:
        return share_interval(mean.mean, mean.variance, mean.clusters, mean.clusters - 1)
    half = student_quantile(mean.clusters - 1) * math.sqrt(mean.variance)
    return Interval(mean.mean, max(least, mean.mean - half), mean.mean + half)


def share_interval(mean: float, variance: float, clusters: int, freedom: float) -> Interval:
    """Wilson's interval for the effective number of observations."""
    if variance == 0:
        return wilson_interval(mean * clusters, clusters)
    effective = mean * (1 - mean) / variance
    return wilson_interval(mean * effective, effective, student_quantile(freedom))


def paired_difference(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable], *, share: bool
) -> Interval:
    """Mean of ``after - before`` over pairs; arguments and errors as for `mean_interval`.

    >>> str(paired_difference([0, 1, 0, 1], [0, 1, 0, 1], "abcd", share=True))
    '0.000 [-0.490, 0.490]'
    """
    differences = [late - early for early, late in zip(before, after, strict=True)]
    if not share:
        return mean_interval(differences, clusters, share=False)
    change = estimate_mean(differences, clusters, SHARE_TOLERANCE)
    _check_share([*before, *after])
    if change.clusters < 2:
        return Interval(change.mean, None, None)
    lost, gained, pairs = count_effective_pairs(differences, change.mean, change.variance, change.clusters)
    quantile = student_quantile(change.clusters - 1) if change.variance else _Z
    _, low, high = tango_interval(lost, gained, pairs, quantile)
    return Interval(change.mean, low, high)


def count_effective_pairs(
    differences: Sequence[float], mean: float, variance: float, clusters: int
) -> tuple[float, float, float]:
    """Effective numbers of worse, better and all pairs."""
    moved = math.fsum(map(abs, differences)) / len(differences)
    pairs = (moved - mean**2) / variance if variance else float(clusters)
    lost, gained = (max(0.0, (moved + sign * mean) / 2) * pairs for sign in (-1, 1))
    return lost, gained, pairs


def sign_flip_test(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0
) -> float:
    """Two-sided p-value of the paired permutation test for ``after - before``.

    Whole `clusters` change sign together: all ``2^n`` combinations of up to 12 differing clusters, else 10,000 random
    ones.

    >>> sign_flip_test([0, 0, 0], [1, 1, 1], "abc"), sign_flip_test([0, 1], [1, 0], "ab")
    (0.25, 1.0)
    """
    differences = [late - early for early, late in zip(before, after, strict=True)]
    sums, _ = _sum_by_cluster(differences, clusters)
    sums = sums[sums != 0]  # flipping 0 changes nothing
    if len(sums) <= _EXACT:
        # all combinations: the bits of the numbers below 2^n
        bits = np.arange(1 << len(sums))[:, None] >> np.arange(len(sums)) & 1
        extra_draws = 0
    else:
        bits = np.random.default_rng(seed).integers(0, 2, size=(_FLIPS, len(sums)))
        extra_draws = 1  # the observed signs count as one more draw
    flipped, rounding = np.abs((1 - 2 * bits) @ sums), 1e-9 * max(1.0, np.abs(sums).sum())
    return float((extra_draws + np.count_nonzero(flipped >= abs(sums.sum()) - rounding)) / (extra_draws + len(bits)))


def wilson_interval(successes: float, trials: float, quantile: float = _Z) -> Interval:
    """Wilson's score interval of a proportion: all p with ``|share - p| <= quantile * sqrt(p (1 - p) / trials)``.

    Raises ValueError without trials.

    >>> str(wilson_interval(36, 500))
    '0.072 [0.052, 0.098]'
    """
    if not trials > 0:
        raise ValueError("a proportion of no trials has no interval")
    square, p = quantile * quantile / trials, successes / trials
    centre = (p + square / 2) / (1 + square)
    half = math.sqrt(square * p * (1 - p) + square * square / 4) / (1 + square)
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def tango_interval(lost: float, gained: float, pairs: float, quantile: float = _Z) -> Interval:
    """Tango's score interval of ``(gained - lost) / pairs``, a difference of paired proportions.

    All d with ``|share - d| <= quantile * sqrt(tango_variance / pairs)``. Raises ValueError without pairs.

    >>> str(tango_interval(0, 0, 20)), str(tango_interval(3, 9, 50))
    ('0.000 [-0.161, 0.161]', '0.120 [-0.018, 0.263]')
    """
    if not pairs > 0:
        raise ValueError("a difference of no pairs has no interval")
    share = (gained - lost) / pairs

    def holds(d: float) -> bool:
        return pairs * (share - d) ** 2 <= quantile * quantile * tango_variance(d, lost, gained, pairs)

    return Interval(share, find_end(holds, share, -1.0), find_end(holds, share, 1.0))


def tango_variance(d: float, lost: float, gained: float, pairs: float) -> float:
    """Variance of one pair's difference, given the maximum-likelihood probabilities for `d`.

    >>> tango_variance(0.0, 3, 9, 50) == 12 / 50
    True
    """
    linear = (2 * pairs + lost - gained) * d - lost - gained
    root = math.sqrt(max(0.0, linear * linear + 8 * pairs * lost * d * (1 - d)))
    worse = (root - linear) / (4 * pairs)  # most likely probability of getting worse; of getting better: worse + d
    return max(0.0, 2 * worse + d - d * d)


def find_end(holds: Callable[[float], bool], inside: float, outside: float) -> float:
    """Bisect for the last number between `inside` and `outside` that `holds`; numbers beyond it do not."""
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return inside


class Estimate(NamedTuple):
    """Mean of clustered values, and its variance."""

    mean: float
    variance: float
    clusters: int


def estimate_mean(values: Sequence[float], clusters: Sequence[Hashable], tolerance: float = 0.0) -> Estimate:
    """Mean of `values`, and its variance from whole `clusters`, at least that of independent values.

    The variance is 0 if values differ by at most `tolerance` or rounding.
    """
    sums, counts = _sum_by_cluster(values, clusters)
    mean, size, number = math.fsum(values) / len(values), len(values), len(sums)
    if max(values) - min(values) <= max(tolerance, _ROUNDING * max(1.0, abs(mean))):
        return Estimate(mean, 0.0, number)
    # exact sums, which do not depend on the order of the values, in which episodes ended
    independent = math.fsum((value - mean) ** 2 for value in values)
    between = math.fsum((sums - mean * counts) ** 2) * number / max(1, number - 1)
    return Estimate(mean, max(independent, between) / size**2, number)


def student_quantile(freedom: float | None, probability: float = 0.975) -> float:
    """Quantile of Student's t; of the normal distribution without `freedom`.

    >>> [round(student_quantile(n), 2) for n in (1, 2, 3, 9, 60, None)]
    [12.71, 4.3, 3.18, 2.26, 2.0, 1.96]
    """
    # imported here, since most commands need no interval, and scipy is a quarter of their start
    from scipy import special

    return float(special.ndtri(probability) if freedom is None else special.stdtrit(freedom, probability))


def t_probability(value: float, freedom: float | None) -> float:
    """Probability of at most `value` by the distribution of `student_quantile`."""
    from scipy import special

    return float(special.ndtr(value) if freedom is None else special.stdtr(freedom, value))


def is_share(values: Iterable[float]) -> bool:
    """Whether all `values` lie in [0, 1], up to rounding."""
    return all(-_ROUNDING <= value <= 1 + _ROUNDING for value in values)


def _check_numbers(values: Iterable[float]) -> None:
    # no comparison with NaN holds
    if any(map(math.isnan, values)):
        raise ValueError("one of the values is NaN")


def _check_share(values: Iterable[float]) -> None:
    if not is_share(values):
        raise ValueError("a share has values from 0 to 1")


def _sum_by_cluster(
    values: Sequence[float], clusters: Sequence[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if not values:
        raise ValueError("a mean of no values has no interval")
    _check_numbers(values)
    rows: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        rows.setdefault(cluster, []).append(value)
    sums, counts = [math.fsum(row) for row in rows.values()], [len(row) for row in rows.values()]
    return np.array(sums), np.array(counts, dtype=float)


def median_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Interval:
    """Median of `values`, one cluster label each.

    Its interval holds each v where the interval of the share of values up to v contains 0.5 (Woodruff 1952, J. Am.
    Stat. Assoc. 47, 635; Francisco and Fuller 1991, Ann. Stat. 19, 454). Fewer than 4 clusters are too few.

    >>> str(median_interval([float(v) for v in range(1, 100)], range(99)))
    '50.000 [40.000, 60.000]'
    >>> str(median_interval([3.0] * 9, range(9)))
    '3.000 [too few]'
    """
    _check_numbers(values)
    middle, distinct = float(median(values)), sorted(set(values))
    if len(set(clusters)) < 4 or len(distinct) < 2:  # 3 clusters may well all lie on one side of the median
        return Interval(middle, None, None)

    def share_up_to(value: float) -> Interval:
        return mean_interval([float(each <= value) for each in values], clusters, share=True)

    # shares grow with the value: bisect for the first value that is not too low, and the first that is too high
    low = bisect_left(distinct, True, key=lambda value: not share_up_to(value).is_all_below(0.5))
    high = bisect_left(distinct, True, key=lambda value: (share_up_to(value).low or 0.0) >= 0.5)
    if distinct[low] >= distinct[high]:
        low, high = max(0, low - 1), min(len(distinct) - 1, high + 1)
    return Interval(middle, min(middle, distinct[low]), max(middle, distinct[high]))


_MUTANTS = "mutants/"
QUOTES = {"-q": "quoted issues", "-u": "unquoted issues"}
"""Slices of mutants by the end of their ids."""
_CLUSTERED_BY_FOLDER = (_MUTANTS, "primevul/", "sven/")
_MOST_SLICES = 12
"""Limit of distinct values: more slices would be too small for an estimate."""


def cluster_episodes(episodes: Iterable[Episode]) -> dict[str, str]:
    """Cluster of each episode's task, by task id.

    Tasks of one repository share a cluster, unless it is the only one. Without a repository, a mutant is clustered by
    function, a vulnerable function with its pair.
    """
    return cluster_tasks({episode.task_id: episode.repository for episode in episodes})


def cluster_tasks(repositories: Mapping[str, str]) -> dict[str, str]:
    """`cluster_episodes` from repositories by task.

    >>> cluster_tasks({"a": "flask", "b": "sympy", "c": ""}), cluster_tasks({"a": "flask", "b": "flask"})
    ({'a': 'flask', 'b': 'sympy', 'c': 'c'}, {'a': 'a', 'b': 'b'})
    """
    several = len(set(repositories.values())) > 1
    return {task: (several and repository) or _default_cluster(task) for task, repository in repositories.items()}


def _default_cluster(task_id: str) -> str:
    """Cluster of a task without a repository.

    >>> _default_cluster("mutants/stats.median/compare-1f3a-q"), _default_cluster("handmade/till")
    ('mutants/stats.median', 'handmade/till')
    """
    has_folder = task_id.count("/") >= 2 and task_id.startswith(_CLUSTERED_BY_FOLDER)
    return task_id.rpartition("/")[0] if has_folder else task_id


def get_quote_slice(task_id: str) -> str:
    """Get the slice of a mutant: whether its issue quotes the broken line.

    >>> get_quote_slice("mutants/stats.median/compare-1f3a-q"), get_quote_slice("handmade/till")
    ('quoted issues', '')
    """
    return QUOTES.get(task_id[-2:], "") if task_id.startswith(_MUTANTS) else ""


def slice_episodes(
    episodes: Iterable[Episode], further: Iterable[Callable[[Episode], str]] = ()
) -> dict[str, frozenset[str]]:
    """Task ids by slice: kind, language, repository, difficulty half, quotes in mutants' issues, `further` fields."""
    tasks = {episode.task_id: episode for episode in episodes}
    difficulties = [task.difficulty for task in tasks.values() if task.difficulty is not None]
    middle = median(difficulties) if difficulties else 0.0

    def difficulty(task: Episode) -> str:
        if task.difficulty is None:
            return ""
        return f"difficulty up to {middle:g}" if task.difficulty <= middle else f"difficulty above {middle:g}"

    fields: tuple[Callable[[Episode], str], ...] = (
        lambda task: get_quote_slice(task.task_id),
        lambda task: task.kind and f"kind {task.kind}",
        lambda task: task.language and f"language {task.language}",
        lambda task: task.repository and f"repository {task.repository}",
        difficulty,
        *further,
    )
    by_slice: dict[str, frozenset[str]] = {}
    for field in fields:
        by_slice |= group_by_value({name: field(task) for name, task in tasks.items()})
    return by_slice


def group_by_value(values: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Keys of `values` by value; none if all are equal, or more than 12 differ.

    >>> group_by_value({"a": "go", "b": "c", "c": ""}), group_by_value({"a": "go", "b": "go"})
    ({'c': frozenset({'b'}), 'go': frozenset({'a'})}, {})
    """
    distinct = set(values.values())
    if not 1 < len(distinct) <= _MOST_SLICES:
        return {}
    return {part: frozenset(key for key, value in values.items() if value == part) for part in sorted(distinct - {""})}
