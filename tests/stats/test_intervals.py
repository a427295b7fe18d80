"""Intervals against published numbers, against brute-force searches of their definitions, and edge cases."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from coderepairrl.stats.intervals import (
    mean_interval,
    median_interval,
    paired_difference,
    sign_flip_test,
    student_quantile,
    tango_interval,
    wilson_interval,
)
from coderepairrl.stats.paired import adjust_holm
from intervals import compute_width, read_ends

Z = NormalDist().inv_cdf(0.975)


@pytest.mark.parametrize(("lost", "gained", "pairs"), [(0, 0, 20), (3, 9, 50), (0, 10, 10), (7, 0, 30), (4, 4, 9)])
def test_tango_is_the_score_test_turned_round(lost: int, gained: int, pairs: int) -> None:
    """At its ends the score statistic is z and -z, given the most likely nuisance parameter (by grid search)."""

    def statistic(d: float) -> float:
        worse = np.linspace(max(0.0, -d), min(1.0, (1 - d) / 2) if d > -1 else 1.0, 200_001)[1:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = pairs - lost - gained
            terms = ((lost, worse), (gained, worse + d), (rest, 1 - 2 * worse - d))
            likelihood = sum(number * np.log(np.maximum(p, 1e-300)) for number, p in terms if number)
        likeliest = worse[np.argmax(likelihood)]
        return ((gained - lost) / pairs - d) / math.sqrt((2 * likeliest + d - d * d) / pairs)

    low, high = read_ends(tango_interval(lost, gained, pairs))
    assert low == -1 or statistic(low) == pytest.approx(Z, abs=0.01)
    assert high == 1 or statistic(high) == pytest.approx(-Z, abs=0.01)


def test_pairs_without_a_difference_have_wilsons_interval() -> None:
    """The difference of 20 equal pairs has the upper end of 0 successes in 20 trials, in both directions. Clusters of
    one value have Wilson's interval, but with Student's quantile."""
    low, high = read_ends(tango_interval(0, 0, 20))
    assert high == -low == pytest.approx(read_ends(wilson_interval(0, 20))[1])
    found = mean_interval([1.0] * 40 + [0.0] * 60, range(100), share=True)
    assert read_ends(found) == pytest.approx(read_ends(wilson_interval(0.4 * 99, 99, 1.9842)), abs=1e-4)


def test_the_quantiles_are_those_of_the_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
    assert {n: student_quantile(n) for n in table} == pytest.approx(table, abs=6e-4)
    assert student_quantile(10**6) == pytest.approx(Z, abs=1e-5)


def test_clusters_widen() -> None:
    rng = np.random.default_rng(0)
    shared = np.repeat(rng.random(30) < 0.4, 8)
    values = [float(v) for v in np.where(rng.random(240) < 0.8, shared, ~shared)]
    wide, narrow = (mean_interval(values, [at // size for at in range(240)], share=True) for size in (8, 1))
    assert compute_width(wide) > 1.5 * compute_width(narrow)
    # Clusters that vary less than independent values do not narrow the interval.
    even = mean_interval([0.0, 1.0] * 20, [at // 2 for at in range(40)], share=True)
    assert read_ends(even) == pytest.approx(read_ends(wilson_interval(20, 40, student_quantile(19))))


def test_equal_values_count_one_for_each_cluster() -> None:
    clusters = [at // 8 for at in range(240)]
    assert read_ends(mean_interval([0.0] * 240, clusters, share=True)) == read_ends(wilson_interval(0, 30))
    assert read_ends(mean_interval([1.0] * 240, clusters, share=True)) == read_ends(wilson_interval(30, 30))
    assert read_ends(mean_interval([1 / 3] * 240, clusters, share=True)) == pytest.approx(
        read_ends(wilson_interval(10, 30))
    )
    assert read_ends(paired_difference([0.5] * 240, [0.5] * 240, clusters, share=True)) == read_ends(
        tango_interval(0, 0, 30)
    )
    assert read_ends(paired_difference([0.0] * 240, [1.0] * 240, clusters, share=True)) == read_ends(
        tango_interval(0, 30, 30)
    )


def test_too_few_have_no_interval() -> None:
    for found in (
        mean_interval([1.0], "a", share=True),
        mean_interval([0.0, 1.0, 1.0], "aaa", share=True),
        mean_interval([3.0], "a", share=False),
        mean_interval([3.0, 3.0], "ab", share=False),
        paired_difference([0.0, 1.0], [1.0, 1.0], "aa", share=True),
        paired_difference([3.0, 5.0], [4.0, 6.0], "ab", share=False),
    ):
        assert (found.low, found.high) == (None, None)
        assert str(found).endswith("[too few]") and not found.is_all_above(-1e9) and not found.is_all_below(1e9)


@pytest.mark.parametrize("share", [True, False])
def test_nan_is_refused(share: bool) -> None:
    """No comparison with NaN is true, so sorted values and p-values would be arbitrary."""
    nan = math.nan
    for ask in (
        lambda: mean_interval([0.0, nan, 1.0], "abc", share=share),
        lambda: paired_difference([0.0, nan], [1.0, 1.0], "ab", share=share),
        lambda: sign_flip_test([0.0, nan], [1.0, 1.0], "ab"),
        lambda: median_interval([0.0, nan, 1.0], "abc"),
        lambda: wilson_interval(1, nan),
        lambda: tango_interval(1, 2, nan),
        lambda: adjust_holm([0.01, nan, 0.02]),
    ):
        with pytest.raises(ValueError):
            ask()


def test_shares_stay_within_bounds_and_nothing_else_is_taken_for_one() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        number = int(rng.integers(2, 12))
        before, after = ([float(v) for v in rng.integers(0, 2, number)] for _ in range(2))
        clusters = [int(c) for c in rng.integers(0, 4, number)]
        for found, least in ((mean_interval(before, clusters, share=True), 0.0),
                             (paired_difference(before, after, clusters, share=True), -1.0)):  # fmt: skip
            if found.low is not None:
                low, high = read_ends(found)
                assert least <= low <= found.value + 1e-9 and found.value - 1e-9 <= high <= 1 and high - low > 0.1
    with pytest.raises(ValueError, match="0 to 1"):
        mean_interval([0.5, 1.5], "ab", share=True)
    with pytest.raises(ValueError, match="0 to 1"):
        paired_difference([0.5, -0.5], [1.0, 0.0], "ab", share=True)


def test_pairing_removes_what_tasks_share() -> None:
    rng = np.random.default_rng(1)
    before = 10 * rng.normal(size=100)
    after = before + 0.2 + 0.01 * rng.normal(size=100)
    gain = paired_difference(list(before), list(after), range(100), share=False)
    assert gain.value == pytest.approx(0.2, abs=0.01)
    assert 0 < compute_width(gain) < 0.01


def test_sign_flips_are_level_under_the_null_and_find_a_gain() -> None:
    rng = np.random.default_rng(2)
    p_values = []
    for seed in range(60):
        shared = np.repeat(rng.normal(size=20), 4)  # what a function's tasks have in common
        noise = list(shared + 0.1 * rng.normal(size=80))
        p_values.append(sign_flip_test([0.0] * 80, noise, [i // 4 for i in range(80)], seed=seed))
    assert sum(p < 0.05 for p in p_values) <= 9  # 3 expected; 1 in 500 tries has more than 9
    assert sign_flip_test([0.0] * 20, list(rng.normal(0.5, 0.2, size=20)), range(20)) < 0.001
    tokens = rng.integers(1_000_000, 9_000_000, size=(40, 12)) / 3  # sums of such numbers are rounded
    assert {sign_flip_test([0.0] * 12, each, range(12)) for each in tokens.tolist()} == {2 / 2**12}
    with pytest.raises(ValueError):
        sign_flip_test([], [], [])


@pytest.mark.parametrize("least", [0.0, 5e-324, 1e-20, 1e-9, 1e-4])
def test_values_that_hardly_differ_have_no_interval_without_width(least: float) -> None:
    """`patch_edits` scores an edit in a wrong place 1e-9: four such tasks once had 0.000 [0.000, 0.000]."""
    for values in ([0.0, 0.0, 0.0, least], [1.0, 1.0, 1.0, 1.0 - least]):
        assert compute_width(mean_interval(values, "abcd", share=True)) > 0.4
        low, high = read_ends(paired_difference([values[0]] * 4, values, "abcd", share=True))
        assert low < -0.4 < 0.4 < high


def test_the_order_of_episodes_changes_no_bit() -> None:
    """A run reads episodes as they end, its report in the order of the log."""
    random = np.random.default_rng(0)
    values, clusters = random.random(24), np.arange(24) % 6
    for share in (True, False):
        orders = [random.permutation(24) for _ in range(50)]
        found = {mean_interval([float(v) for v in values[o]], clusters[o].tolist(), share=share) for o in orders}
        assert len(found) == 1
