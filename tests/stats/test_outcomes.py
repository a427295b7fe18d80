"""Resolved attempts, pass@k and pass^k, and costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coderepairrl.stats.measures import Prices, measure_episode, sum_costs
from coderepairrl.stats.outcomes import estimate_pass_rates, is_resolved
from coderepairrl.types import Ending, Episode, Fork, Origin, Score, TokenSpan, Turn
from intervals import is_within, read_ends


def make_attempt(task: str, number: int, passed: bool | None, *, patch: bytes = b"diff", void: bool = False) -> Episode:
    scores = (Score("tests", float(bool(passed)), passed=passed),)
    return Episode(
        f"{task}-{number}", task, "eval", 0, task, number, Ending.VOID if void else Ending.DONE,
        patch=patch, scores=() if void else scores,
    )  # fmt: skip


def test_pass_rates_leave_out_void_attempts() -> None:
    rows = [
        make_attempt("a", 0, True),
        make_attempt("a", 1, None, patch=b"\n"),
        make_attempt("b", 0, False),
        make_attempt("b", 1, True),
    ]
    rates = estimate_pass_rates([*rows, make_attempt("c", 0, None, void=True)])
    assert {name: rate.value for name, rate in rates.items()} == {"pass@2": 1.0, "pass^2": 0.0}


@pytest.mark.parametrize("passed", [True, False])
def test_all_or_none_has_an_interval_of_some_width_and_one_task_has_none(passed: bool) -> None:
    for share in estimate_pass_rates([make_attempt(f"t{at}", k, passed) for at in range(5) for k in range(2)]).values():
        low, high = read_ends(share)
        assert high - low > 0.3 and 0 <= low <= share.value + 1e-12 and share.value - 1e-12 <= high <= 1
    for share in estimate_pass_rates([make_attempt("t", k, passed) for k in range(2)]).values():
        assert (share.low, share.high) == (None, None)


def test_what_was_not_tested_is_not_resolved_nor_unresolved() -> None:
    plain = Episode("e", "t", "eval", 0, "g", 0, Ending.DONE, patch=b"diff", scores=(Score("patch_edits", 0.5),))
    assert is_resolved(plain) is None and estimate_pass_rates([plain] * 2) == estimate_pass_rates([]) == {}
    short = [*(make_attempt("a", k, True) for k in range(3)), make_attempt("b", 0, False)]
    assert estimate_pass_rates(short)["pass@3"].value == 1.0, "b has too few attempts for k = 3"


def test_intervals_of_pass_at_k_hold_the_truth() -> None:
    """Each task has its own probability, and 4 independent attempts."""
    rng = np.random.default_rng(0)
    held, runs = 0, 150
    truth = float(np.mean(1 - (1 - rng.beta(0.5, 1.5, 200_000)) ** 2))
    for _ in range(runs):
        rates = rng.beta(0.5, 1.5, 40)
        rows = [make_attempt(f"t{at}", k, bool(rng.random() < rate)) for at, rate in enumerate(rates) for k in range(4)]
        held += is_within(truth, estimate_pass_rates(rows)["pass@2"])
    assert 0.9 <= held / runs <= 1.0


def test_tokens_are_those_that_the_engine_had_or_the_server_counted() -> None:
    def span(size: int) -> TokenSpan:
        return TokenSpan(tuple(range(size)), Origin.GIVEN)

    def said(size: int) -> TokenSpan:
        return TokenSpan(tuple(range(size)), Origin.POLICY, (0.0,) * size)

    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    turns = (
        Turn(0, None, span(10), said(2)),
        Turn(1, 0, span(3), said(4)),
        Turn(2, None, span(1), said(1), fork=Fork(1, tokens=11, messages=1)),
        Turn(3, None, span(0), said(0), remote={"usage": usage}),
        Turn(4, None, span(0), said(0), remote={"model": "silent"}),
    )
    episode = Episode("e", "t", "eval", 0, "g", 0, Ending.VOID, turns=turns, timings={"total": 1.5})
    found = sum_costs([episode])
    assert found == (5, 10 + 15 + 12 + 7, 4, 2 + 4 + 1 + 5, 1.5, 1)
    assert "sampled_tokens" not in measure_episode(episode), "those of the last call are unknown"
    assert measure_episode(replace(episode, turns=turns[:4]))["sampled_tokens"] == 12
    assert found.money(Prices(1, 10)) == pytest.approx((44 + 120) / 1e6)
    assert found.money(Prices(1, 10, 0.5)) == pytest.approx((40 + 2 + 120) / 1e6)
