"""Medians with intervals, against scipy's of independent values, and by simulation of clustered ones."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from coderepairrl.stats.intervals import median_interval
from intervals import is_within, read_ends


@pytest.mark.parametrize("size", [9, 40, 400])
def test_independent_values_have_the_order_statistics_that_scipy_takes(size: int) -> None:
    """Its interval is of the exact binomial, ours of the score test: at most one place apart."""
    values = sorted(np.random.default_rng(size).exponential(size=size).tolist())
    found = median_interval(values, range(size))
    exact = stats.quantile_test(values, q=1.0, p=0.5).confidence_interval(0.95)
    assert found.value == np.median(values)
    for own, other in zip(read_ends(found), exact, strict=True):
        assert abs(values.index(own) - values.index(other)) <= 1


@pytest.mark.parametrize(("clusters", "shared"), [(40, 0.0), (20, 1.0)])
def test_intervals_hold_the_median(clusters: int, shared: float) -> None:
    rng = np.random.default_rng(7)
    labels = np.repeat(np.arange(clusters), 3)
    held = 0
    for _ in range(300):
        values = shared * rng.normal(size=clusters)[labels] + rng.normal(size=len(labels))
        held += is_within(0, median_interval(values.tolist(), labels.tolist()))
    assert 0.92 <= held / 300 <= 0.99


@pytest.mark.parametrize("size", [2, 3])
def test_the_median_may_be_beyond_so_few_values(size: int) -> None:
    """All lie on the same side of it with a probability of 1/2 and 1/4."""
    assert read_ends(median_interval([0.0, 1.0, 2.0, 3.0], range(4))) == (0.0, 3.0)
    values = [float(value) for value in range(size) for _ in range(5)]
    assert median_interval(values, [value for value in range(size) for _ in range(5)]).low is None


@pytest.mark.parametrize(
    "values", [[3.0], [3.0, 3.0, 3.0], [5.0] * 50 + [4.0], [0.0, 1.0, 2.0, 3.0], [1.0] * 9 + [2.0] * 9]
)
def test_ties_leave_no_zero_width(values: list[float]) -> None:
    found = median_interval(values, range(len(values)))
    if len(set(values)) == 1:
        assert (found.low, found.high) == (None, None)
    else:
        assert is_within(found.value, found) and found.low < found.high
    assert median_interval(values, [0] * len(values)).low is None, "one cluster"
    with pytest.raises(ValueError):
        median_interval([], [])
