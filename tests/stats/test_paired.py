"""Paired tests, effect sizes and power against scipy, statsmodels, brute force and simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from coderepairrl.stats.intervals import paired_difference, sign_flip_test, wilson_interval
from coderepairrl.stats.outcomes import compare_curves, pass_at_k, pass_hat_k
from coderepairrl.stats.paired import (
    adjust_holm,
    bootstrap_difference,
    cohens_d,
    mcnemar_p,
    mcnemar_test,
)
from coderepairrl.stats.power import needed_tasks, smallest_detectable, spread_of_shares
from intervals import is_within, read_ends

CLOSE = {"rel": 1e-9, "abs": 1e-12}


def draw_shares(rng: np.random.Generator, count: int, p: float) -> list[float]:
    return (rng.random(count) < p).astype(float).tolist()


# -- against scipy and statsmodels


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (5, 5), (31, 36), (0, 5), (180, 231)])
def test_mcnemar_is_that_of_statsmodels_and_scipy(lost: int, gained: int) -> None:
    exact, mid_p = mcnemar_p(lost, gained)
    assert exact == pytest.approx(reference_mcnemar([[7, lost], [gained, 9]], exact=True).pvalue, **CLOSE)
    assert exact == mcnemar_p(gained, lost)[0]
    if lost + gained:
        assert exact == pytest.approx(scipy_stats.binomtest(lost, lost + gained).pvalue, **CLOSE)
    tails = scipy_stats.binom.cdf(min(lost, gained), lost + gained, 0.5)
    here = scipy_stats.binom.pmf(min(lost, gained), lost + gained, 0.5)
    assert mid_p == pytest.approx(min(1, 2 * (tails - here / 2)), **CLOSE)
    assert mid_p <= exact


@pytest.mark.parametrize("p", [(0.01, 0.04, 0.03), (0.5,), (0.2, 0.2, 0.001, 0.9), (1.0, 1.0), ()])
def test_holm_is_that_of_statsmodels(p: tuple[float, ...]) -> None:
    expected = multipletests(p, method="holm")[1].tolist() if p else []
    assert adjust_holm(p) == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize(("solved", "tasks"), [(0, 20), (36, 500), (20, 20)])
def test_wilson_is_that_of_statsmodels_and_scipy(solved: int, tasks: int) -> None:
    expected = proportion_confint(solved, tasks, method="wilson")
    assert read_ends(wilson_interval(solved, tasks)) == pytest.approx(expected, **CLOSE)
    assert read_ends(wilson_interval(solved, tasks)) == pytest.approx(
        tuple(scipy_stats.binomtest(solved, tasks).proportion_ci(method="wilson")), **CLOSE
    )


def test_cohens_d_is_the_difference_over_the_pooled_deviation() -> None:
    rng = np.random.default_rng(1)
    before, after = rng.normal(1e6, 2, 40), rng.normal(1e6 + 1, 3, 40)
    found = cohens_d(before.tolist(), after.tolist(), range(40))
    pooled = math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / 2)
    assert found is not None
    assert found.value == pytest.approx((after.mean() - before.mean()) / pooled, rel=1e-9)


def test_the_sign_flip_test_is_scipys_permutation_test() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=9), rng.normal(0.4, 1, 9)
    expected = scipy_stats.permutation_test(
        (after - before,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert sign_flip_test(before.tolist(), after.tolist(), range(9)) == pytest.approx(expected.pvalue, **CLOSE)


def test_sign_flips_of_tasks_that_stand_for_themselves_are_mcnemars_exact_test() -> None:
    before, after = [1.0, 0, 0, 0, 0, 1, 1, 0, 0], [0.0, 1, 1, 1, 1, 1, 1, 0, 0]
    counted = mcnemar_test([*map(bool, before)], [*map(bool, after)])
    assert counted[:4] == (2, 1, 4, 2)
    assert sign_flip_test(before, after, range(9)) == pytest.approx(counted.exact, **CLOSE)
    assert counted.exact == mcnemar_p(1, 4)[0]


def test_pass_at_k_is_the_mean_over_all_choices() -> None:
    for attempts, solved in ((4, 1), (5, 3), (6, 0), (3, 3)):
        results = [True] * solved + [False] * (attempts - solved)
        for k in range(1, attempts + 1):
            chosen = list(combinations(results, k))
            assert pass_at_k(attempts, solved, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), **CLOSE)
            assert pass_hat_k(attempts, solved, k) == pytest.approx(sum(map(all, chosen)) / len(chosen), **CLOSE)


# -- the numbers of a published comparison: 31 and 36 of 500


def test_31_and_36_of_500_are_no_difference_however_they_overlap() -> None:
    """Five discordant tasks are too few even if all 31 are among the 36; if none is, 67 tasks are discordant."""
    assert mcnemar_p(0, 5)[0] == 0.0625
    assert mcnemar_p(31, 36)[0] == pytest.approx(0.6254, abs=1e-3)
    for shared in range(32):
        assert mcnemar_p(31 - shared, 36 - shared)[0] > 0.05
        before = [1.0] * 31 + [0.0] * 469
        after = [1.0] * shared + [0.0] * (31 - shared) + [1.0] * (36 - shared) + [0.0] * (433 + shared)
        found = paired_difference(before, after, range(500), share=True)
        assert found.value == pytest.approx(0.01)
        seen = smallest_detectable(500, (67 - 2 * shared) / 500)
        assert seen is not None and 0.0156 < seen < 0.0461  # 1 point was out of reach


# -- what is simulated


def test_the_bootstrap_holds_the_truth_for_few_repositories_of_unequal_size() -> None:
    """12 of them, the largest with a third of the tasks, as benchmarks have."""
    rng = np.random.default_rng(3)
    sizes = [30, 12, 10, 8, 6, 5, 4, 4, 3, 3, 2, 2]
    labels = np.repeat(np.arange(12), sizes)
    held = 0
    for _ in range(400):
        own = rng.normal(0.1, 0.1, 12)[labels]
        before = rng.normal(0, 0.5, len(labels))
        after = before + own + rng.normal(0, 0.3, len(labels))
        held += is_within(0.1, bootstrap_difference(before.tolist(), after.tolist(), labels.tolist()))
    assert 0.90 <= held / 400 <= 0.98


@pytest.mark.parametrize(("clusters", "size", "worse", "better"), [(60, 1, 0.1, 0.2), (40, 3, 0.05, 0.1)])
def test_intervals_of_a_difference_hold_it_in_93_to_97_of_100(
    clusters: int, size: int, worse: float, better: float
) -> None:
    """Tango's, which verdicts use; the bootstrap interval does in at least 92 of 100."""
    rng = np.random.default_rng(clusters)
    labels = np.repeat(np.arange(clusters), size).tolist()
    held: list[bool] = []
    drawn: list[bool] = []
    for run in range(1000):
        kind = rng.choice(4, len(labels), p=[worse, better, 0.3, 0.7 - worse - better])
        before, after = np.isin(kind, (0, 2)).astype(float).tolist(), np.isin(kind, (1, 2)).astype(float).tolist()
        held.append(is_within(better - worse, paired_difference(before, after, labels, share=True)))
        if run < 250:
            drawn.append(is_within(better - worse, bootstrap_difference(before, after, labels)))
    assert 0.93 <= np.mean(held) <= 0.97
    assert 0.92 <= np.mean(drawn) <= 0.98


@pytest.mark.parametrize(("effect", "square"), [(0.03, 0.134), (0.05, 0.1), (0.1, 0.1)])
def test_the_planned_number_of_tasks_has_the_power(effect: float, square: float) -> None:
    tasks = math.ceil(needed_tasks(effect, square))
    assert smallest_detectable(tasks, square) == pytest.approx(effect, rel=0.01)
    rng = np.random.default_rng(4)
    kinds = rng.multinomial(tasks, [(square - effect) / 2, (square + effect) / 2, 1 - square], 4000)
    shown = sum(mcnemar_p(*pair)[1] <= 0.05 for pair in ((int(lost), int(gained)) for lost, gained, _ in kinds))
    assert 0.76 <= shown / 4000 <= 0.9


def test_clusters_that_agree_count_as_one_task() -> None:
    rng = np.random.default_rng(5)
    agreeing = [[value for value in draw_shares(rng, 100, 0.5) for _ in range(5)] for _ in range(2)]
    for size in (5, 1):
        design = spread_of_shares(*agreeing, [at // size for at in range(500)]).design
        assert design == pytest.approx(size, rel=0.05)


# -- the edges


@pytest.mark.parametrize("same", [0.0, 1.0])
@pytest.mark.parametrize("tasks", [1, 2, 30])
def test_values_that_never_vary_have_an_interval_or_no_number(same: float, tasks: int) -> None:
    values, labels = [same] * tasks, list(range(tasks))
    assert cohens_d(values, values, labels) is None
    assert bootstrap_difference(values, values, labels) == (0, None, None)
    outcomes = [bool(same)] * tasks
    assert mcnemar_test(outcomes, outcomes)[4:] == (1, 1)
    square = spread_of_shares(values, values, labels).square
    assert square.value == 0 and (tasks == 1 or read_ends(square)[1] > 0)
    first, last = {str(at): [*outcomes[at:], True] for at in labels}, {str(at): [True] * 3 for at in labels}
    points = compare_curves(first, last, {str(at): at for at in labels}, [1])
    assert all(tasks == 1 or read_ends(point.change)[0] < read_ends(point.change)[1] for point in points)


def test_too_few_repositories_or_tasks_can_show_nothing() -> None:
    assert bootstrap_difference([0, 1, 0], [1, 1, 0], "aaa") == (pytest.approx(1 / 3), None, None)
    assert smallest_detectable(5, 0.5) is None
    seen: Sequence[float | None] = [smallest_detectable(tasks, 0.0) for tasks in (100, 500)]
    assert [round(value, 3) for value in seen if value] == [0.077, 0.016]  # about 8 tasks of either number
