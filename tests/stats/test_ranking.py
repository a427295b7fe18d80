"""AUCs against counting pairs, and intervals that shrink with more tasks."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.stats import Ranking, interval, rank_correlation

ATTEMPTS = st.lists(
    st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from("abcd")), min_size=2, max_size=40
).filter(lambda rows: len({right for _, right, _ in rows}) == 2)


def counted(rows: list[tuple[int, bool, str]]) -> float:
    """The share of pairs of a right and a wrong attempt that are in order, ties half."""
    good, bad = ([value for value, right, _ in rows if right is wanted] for wanted in (True, False))
    return sum((a > b) + (a == b) / 2 for a in good for b in bad) / (len(good) * len(bad))


@settings(max_examples=150, deadline=None)
@given(ATTEMPTS)
def test_auc_counts_pairs(rows: list[tuple[int, bool, str]]) -> None:
    ranking = Ranking(*zip(*rows, strict=True))
    assert ranking.overall == pytest.approx(counted(rows))
    tasks = [[row for row in rows if row[2] == name] for name in {row[2] for row in rows}]
    each = [counted(task) for task in tasks if len({row[1] for row in task}) == 2]
    assert ranking.within == pytest.approx(sum(each) / len(each)) if each else math.isnan(ranking.within)


def test_intervals_hold_what_they_should() -> None:
    rng = random.Random(0)
    widths = []
    for size in (20, 320):
        tasks = [task for task in range(size) for _ in range(4)]
        outcomes = [rng.random() < 0.5 for _ in tasks]
        values = [right * 0.5 + rng.random() for right in outcomes]
        ranking = Ranking(values, outcomes, tasks)
        overall, within = ranking.draws()
        found = interval(ranking.overall, overall), interval(ranking.within, within)
        assert all(each.low < each.value < each.high for each in found)
        assert all(each.low < 0.875 < each.high for each in found)  # the value by construction
        widths.append(found[0].high - found[0].low)
        same = ranking.draws()
        assert (same[0] == overall).all()  # paired: the same seed draws the same tasks
    assert widths[1] < widths[0] / 2


def test_one_outcome_has_no_ranking() -> None:
    with pytest.raises(ValueError, match="right and wrong"):
        Ranking([0.1, 0.2], [True, True], "ab")
    assert math.isnan(rank_correlation([1.0, 1.0], [True, False]))
    assert rank_correlation([1.0, 2.0], [False, True]) == pytest.approx(1.0)
