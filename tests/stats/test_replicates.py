"""Means over seeds and tasks: against the analysis of variance, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from coderepairrl.stats.intervals import mean_interval, paired_difference
from coderepairrl.stats.replicates import mean_of_replicates, replicated_difference
from intervals import is_within


def test_one_seed_has_the_interval_of_its_tasks() -> None:
    before, after, clusters = [0, 1, 0, 0, 1, 0], [1, 1, 0, 1, 1, 0], "aabbcc"
    found = replicated_difference([before], [after], clusters, share=True)
    values = [3.0, 5.0, 4.0]
    for ours, theirs in (
        (found, paired_difference(before, after, clusters, share=True)),
        (mean_of_replicates([after], clusters, share=True), mean_interval(after, clusters, share=True)),
        (mean_of_replicates([values], "abc", share=False), mean_interval(values, "abc", share=False)),
    ):
        assert tuple(ours.interval) == pytest.approx(tuple(theirs), rel=3e-3), "quantiles are computed differently"


def test_the_variance_is_that_of_readers_and_cases() -> None:
    """With a task in each cluster: (MS of seeds + MS of tasks - MS of their interaction) / number of values."""
    rows = np.random.default_rng(3).normal(0, 1, (4, 10)) + np.arange(4)[:, None] + np.arange(10)
    seeds, tasks = rows.shape
    mean = rows.mean()
    ms_seeds = tasks * ((rows.mean(1) - mean) ** 2).sum() / (seeds - 1)
    ms_tasks = seeds * ((rows.mean(0) - mean) ** 2).sum() / (tasks - 1)
    rest = rows - rows.mean(1, keepdims=True) - rows.mean(0) + mean
    ms_both = (rest**2).sum() / (seeds - 1) / (tasks - 1)
    variance = (ms_seeds + ms_tasks - ms_both) / rows.size
    freedom = (ms_seeds + ms_tasks - ms_both) ** 2 / (
        ms_seeds**2 / (seeds - 1) + (ms_tasks - ms_both) ** 2 / (tasks - 1)
    )
    found = mean_of_replicates(rows.tolist(), range(tasks), share=False)
    assert found.interval.value == pytest.approx(mean)
    assert found.freedom == pytest.approx(freedom)
    from scipy import stats

    half = stats.t.ppf(0.975, freedom) * variance**0.5
    assert found.interval.high == pytest.approx(mean + half)
    assert found.p == pytest.approx(2 * stats.t.sf(mean / variance**0.5, freedom))
    power = stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)
    assert found.smallest is not None and found.smallest.value == pytest.approx(power * variance**0.5)


@pytest.mark.parametrize("between", [0.0, 0.2])
@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_hold_the_mean_of_further_seeds_and_tasks(seeds: int, between: float) -> None:
    rng, held, studies = np.random.default_rng(seeds), 0, 600
    clusters = np.repeat(np.arange(30), 2)
    for _ in range(studies):
        gains = 0.3 + rng.normal(0, between, (seeds, 1)) + rng.normal(0, 0.2, 30)[clusters]
        gains = gains + rng.normal(0, 0.5, (seeds, 60))
        found = replicated_difference(np.zeros_like(gains).tolist(), gains.tolist(), clusters.tolist(), share=False)
        held += is_within(0.3, found.interval)
    assert 0.92 <= held / studies <= 0.99


@pytest.mark.parametrize("between", [0.0, 0.1])
def test_of_arms_that_do_not_differ_few_are_claimed(between: float) -> None:
    rng, claimed, studies = np.random.default_rng(1), 0, 500
    for _ in range(studies):
        solves = rng.uniform(0.2, 0.8, 40)
        sides = [
            (rng.random((3, 40)) < np.clip(solves + rng.normal(0, between, (3, 1)), 0, 1)).astype(float).tolist()
            for _ in range(2)
        ]
        found = replicated_difference(sides[0], sides[1], range(40), share=True)
        assert (found.p <= 0.05) == (not is_within(0, found.interval)), "test and interval agree"
        claimed += found.p <= 0.05
    assert claimed / studies <= 0.08


def test_what_does_not_vary_has_an_interval_of_some_width_or_none() -> None:
    nothing = replicated_difference([[0, 0, 0]] * 2, [[0, 0, 0]] * 2, "abc", share=True)
    assert nothing.interval.low is not None and nothing.interval.low < 0 and nothing.p == 1
    everything = mean_of_replicates([[1, 1, 1, 1]] * 3, "abcd", share=True).interval
    assert everything.low is not None and everything.low < 0.6
    assert mean_of_replicates([[7, 7]] * 2, "ab", share=False).interval.low is None
    one = replicated_difference([[0.0]] * 2, [[1.0], [0.0]], "a", share=True)
    assert (one.interval.low, one.p, one.smallest) == (None, None, None)


def test_no_share_needs_more_than_the_whole_to_be_shown() -> None:
    sides = [[1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1]], [[0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 0]]
    found = replicated_difference(*sides, "abcdef", share=True)
    assert found.smallest is None or (found.smallest.high is not None and found.smallest.high <= 1)


def test_replicates_without_values_or_of_unequal_length_are_refused() -> None:
    for rows, clusters in (([], "ab"), ([[]], ""), ([[1, 2], [1]], "ab")):
        with pytest.raises(ValueError, match="replicates need"):
            mean_of_replicates(rows, clusters, share=False)
