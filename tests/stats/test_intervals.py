from __future__ import annotations

import numpy as np
import pytest

from coderepairrl.stats import bootstrap_mean, paired_difference, sign_flip_test, wilson


def test_wilson_of_the_thesis() -> None:
    # REQUIREMENTS 17: 36 of 500 resolved is 5.3-9.8 %, 31 of 500 is 4.4-8.7 %.
    assert wilson(36, 500)[1:] == pytest.approx((0.0525, 0.0981), abs=5e-4)
    assert wilson(31, 500)[1:] == pytest.approx((0.0440, 0.0866), abs=5e-4)


def test_bootstrap_covers_and_clusters_widen() -> None:
    rng = np.random.default_rng(0)
    covered, wider = 0, 0
    for seed in range(60):
        effects = np.repeat(rng.normal(size=30), 8)
        values = list(effects + 0.1 * rng.normal(size=240))
        clustered = bootstrap_mean(values, [i // 8 for i in range(240)], seed=seed)
        naive = bootstrap_mean(values, range(240), seed=seed)
        covered += clustered.low <= 0 <= clustered.high
        wider += clustered.high - clustered.low > naive.high - naive.low
    assert covered >= 51  # 95 % nominal; 85 % leaves room for 60 draws
    assert wider == 60


def test_pairing_removes_what_tasks_share() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(size=100)
    after = before + 0.2
    gain = paired_difference(list(before), list(after), range(100))
    assert gain.value == pytest.approx(0.2)
    assert gain.high - gain.low < 1e-9


def test_nothing_has_no_interval() -> None:
    with pytest.raises(ValueError):
        bootstrap_mean([], [])
    with pytest.raises(ValueError):
        paired_difference([1.0], [], [0])


def test_sign_flips_are_level_under_the_null_and_find_a_gain() -> None:
    rng = np.random.default_rng(2)
    p_values = []
    for seed in range(60):
        shared = np.repeat(rng.normal(size=20), 4)  # what a function's tasks have in common
        noise = list(shared + 0.1 * rng.normal(size=80))
        p_values.append(sign_flip_test([0.0] * 80, noise, [i // 4 for i in range(80)], seed=seed))
    assert sum(p < 0.05 for p in p_values) <= 9  # 3 expected; 1 in 500 tries has more than 9
    assert sign_flip_test([0.0] * 20, list(rng.normal(0.5, 0.2, size=20)), range(20)) < 0.001
    with pytest.raises(ValueError):
        sign_flip_test([], [], [])
