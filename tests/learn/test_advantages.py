"""Rewards of a group become advantages, without void episodes; flat groups have no advantages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.learn import compute_group_advantages

WORKED = [0.1, 0.8, 0.3, 0.9, 0.2]  # the thesis's example
rewards = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12)


def test_worked_example_of_the_thesis():
    group = compute_group_advantages(WORKED, "zscore")
    assert group.mean == pytest.approx(0.46, abs=1e-15)
    assert group.std == pytest.approx(math.sqrt(0.1064), abs=1e-15)  # the population's
    expected = [d / (math.sqrt(0.1064) + 1e-4) for d in (-0.36, 0.34, -0.16, 0.44, -0.26)]
    assert group.values == pytest.approx(expected, abs=1e-14)
    assert [round(value, 2) for value in group.values] == [-1.1, 1.04, -0.49, 1.35, -0.8]
    assert compute_group_advantages(WORKED, "mean").values == pytest.approx(
        [-0.36, 0.34, -0.16, 0.44, -0.26], abs=1e-15
    )


@pytest.mark.parametrize("group", [[], [None, None], [0.4], [0.4, None], [0.0] * 8, [0.3, 0.1 + 0.2]])
def test_flat_groups_have_no_advantage_or_0_with_a_kl_term(group):
    for kl, value in ((False, None), (True, 0.0)):
        result = compute_group_advantages(group, kl=kl)
        assert result.flat
        assert result.values == tuple(None if reward is None else value for reward in group)


def test_without_a_baseline_a_group_need_not_differ():
    assert compute_group_advantages([0.5, 0.5, None, 0.0], "none").values == (0.5, 0.5, None, None)
    same = compute_group_advantages([0.5, 0.5], "none")
    assert same.values == (0.5, 0.5) and same.flat
    assert compute_group_advantages([0.0, None], "none", kl=True).values == (0.0, None)


@pytest.mark.parametrize("kind", ["zscore", "mean", "leave_one_out"])
@given(rewards)
def test_advantages_are_centred_and_keep_the_order(kind, group):
    result = compute_group_advantages(group, kind)
    pairs = [(r, a) for r, a in zip(group, result.values, strict=True) if r is not None and a is not None]
    if result.flat:
        assert not pairs
        return
    assert len(pairs) == sum(reward is not None for reward in group)
    assert math.fsum(a for _, a in pairs) == pytest.approx(0, abs=1e-6)
    assert all((x[1] <= y[1]) for x in pairs for y in pairs if x[0] < y[0])


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        compute_group_advantages([0.0, math.nan])
