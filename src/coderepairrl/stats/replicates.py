"""Means and paired differences that generalise to further tasks *and* training runs (seeds).

All seeds are measured on the same tasks. The variance of the mean is that between seeds, plus that between
clusters of tasks, less that of their interaction, which both include. Degrees of freedom are Satterthwaite's of the two
parts (Hillis 2007, Stat. Med. 26, 596; Satterthwaite 1946, Biometrics Bull. 2, 110). Intervals and p-values as in
`intervals`. Simulated in tests/stats/test_replicates.py.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from coderepairrl.stats.intervals import (
    SHARE_TOLERANCE,
    Interval,
    count_effective_pairs,
    estimate_mean,
    share_interval,
    student_quantile,
    t_probability,
    tango_interval,
    tango_variance,
)
from coderepairrl.stats.power import smallest_detectable, smallest_detectable_interval

Rows = Sequence[Sequence[float]]


class Replicated(NamedTuple):
    """Mean over seeds and tasks."""

    interval: Interval
    p: float | None
    """Two-sided p of a mean of 0, by the interval's statistic; None with too little data."""
    smallest: Interval | None
    """Smallest detectable mean; None if none is."""
    seeds: int
    tasks: int
    clusters: int
    freedom: float | None
    """Degrees of freedom of the variance; None where all values are equal."""


class _Estimate(NamedTuple):
    mean: float
    variance: float
    freedom: float
    clusters: int


def mean_of_replicates(rows: Rows, clusters: Sequence[Hashable], *, share: bool) -> Replicated:
    """Mean of `rows`, with a cluster label for each task; a `share` has values in [0, 1]. Raises ValueError without
    data.

    >>> print(mean_of_replicates([[1, 0, 1, 0], [1, 0, 1, 1]], "abcd", share=True).interval)
    0.625 [0.118, 0.954]
    """
    estimate = _mean_and_variance(rows, clusters, SHARE_TOLERANCE if share else 0.0)
    if not share or estimate.clusters < 2:
        return _use_student(rows, estimate)
    interval = share_interval(estimate.mean, estimate.variance, estimate.clusters, estimate.freedom)
    return _make_replicated(rows, estimate, interval)


def replicated_difference(before: Rows, after: Rows, clusters: Sequence[Hashable], *, share: bool) -> Replicated:
    """Mean of ``after - before``, paired by seed and task; `share` as for `mean_of_replicates`.

    >>> print(replicated_difference([[0, 0, 1, 0]] * 2, [[1, 0, 1, 1], [1, 1, 1, 1]], "abcd", share=True).interval)
    0.625 [-0.532, 0.954]
    """
    rows = [[y - x for x, y in zip(first, last, strict=True)] for first, last in zip(before, after, strict=True)]
    estimate = _mean_and_variance(rows, clusters, SHARE_TOLERANCE if share else 0.0)
    if not share or estimate.clusters < 2:
        return _use_student(rows, estimate)
    differences = [value for row in rows for value in row]
    lost, gained, pairs = count_effective_pairs(differences, estimate.mean, estimate.variance, estimate.clusters)
    freedom = estimate.freedom if estimate.variance else None
    _, low, high = tango_interval(lost, gained, pairs, student_quantile(freedom))
    error = math.sqrt(tango_variance(0.0, lost, gained, pairs) / pairs)
    smallest: Interval | None
    if freedom is None:
        smallest_of_equal = smallest_detectable(estimate.clusters, 0.0)
        smallest = None if smallest_of_equal is None else Interval(smallest_of_equal, None, None)
    else:
        smallest = smallest_detectable_interval(estimate.variance, freedom)
        # shares differ by 1 at most
        smallest = None if smallest.value > 1 else smallest._replace(high=min(1.0, smallest.high or 1.0))
    return _make_replicated(
        rows, estimate, Interval(estimate.mean, low, high), _two_sided_p(estimate.mean, error, freedom), smallest
    )


def _use_student(rows: Rows, estimate: _Estimate) -> Replicated:
    if estimate.clusters < 2 or estimate.variance == 0:
        return _make_replicated(rows, estimate, Interval(estimate.mean, None, None))
    error = math.sqrt(estimate.variance)
    half = student_quantile(estimate.freedom) * error
    interval = Interval(estimate.mean, estimate.mean - half, estimate.mean + half)
    smallest = smallest_detectable_interval(estimate.variance, estimate.freedom)
    return _make_replicated(rows, estimate, interval, _two_sided_p(estimate.mean, error, estimate.freedom), smallest)


def _make_replicated(
    rows: Rows, estimate: _Estimate, interval: Interval, p: float | None = None, smallest: Interval | None = None
) -> Replicated:
    freedom = estimate.freedom if estimate.variance else None
    return Replicated(interval, p, smallest, len(rows), len(rows[0]), estimate.clusters, freedom)


def _mean_and_variance(rows: Rows, clusters: Sequence[Hashable], tolerance: float) -> _Estimate:
    """Mean and variance, which is 0 where values differ by at most `tolerance`."""
    if not rows or not clusters or any(len(row) != len(clusters) for row in rows):
        raise ValueError("replicates need seeds, tasks, and a value of each seed for each task")
    seeds, tasks = len(rows), len(clusters)
    per_task = [math.fsum(column) / seeds for column in zip(*rows, strict=True)]
    per_seed = [math.fsum(row) / tasks for row in rows]
    of_tasks = estimate_mean(per_task, clusters, tolerance)
    mean, number = of_tasks.mean, of_tasks.clusters
    if seeds == 1:
        return _Estimate(mean, of_tasks.variance, number - 1.0, number)
    if max(map(max, rows)) - min(map(min, rows)) <= max(tolerance, 1e-12):
        return _Estimate(mean, 0.0, 0.0, number)
    between = math.fsum((each - mean) ** 2 for each in per_seed) / (seeds - 1) / seeds
    if number < 2:
        return _Estimate(mean, between, seeds - 1.0, number)
    # sums by seed and cluster of what neither the seed nor the task explains: their interaction
    sums: dict[tuple[int, Hashable], float] = {}
    for seed, row in enumerate(rows):
        for value, of_task, label in zip(row, per_task, clusters, strict=True):
            sums[seed, label] = sums.get((seed, label), 0.0) + value - per_seed[seed] - of_task + mean
    interaction = math.fsum(each * each for each in sums.values()) / (seeds * tasks) ** 2
    interaction *= number / (number - 1) * seeds / (seeds - 1)
    task_variance = max(0.0, of_tasks.variance - interaction)
    if between + task_variance <= of_tasks.variance:
        return _Estimate(mean, of_tasks.variance, number - 1.0, number)
    freedom = (between + task_variance) ** 2 / (between**2 / (seeds - 1) + task_variance**2 / (number - 1))
    return _Estimate(mean, between + task_variance, freedom, number)


def _two_sided_p(mean: float, error: float, freedom: float | None) -> float:
    if not error:
        return 1.0 if mean == 0 else 0.0
    return 2 * t_probability(-abs(mean) / error, freedom)
