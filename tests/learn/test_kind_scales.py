"""Kinds of tasks in one batch: each one's share of the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_algorithms import episode

from coderepairrl.config import Config
from coderepairrl.learn import Batch
from coderepairrl.learn.losses import LOSSES, LossScale, TrainedTokens
from coderepairrl.stages.policy import make_batch
from coderepairrl.types import Ending, Episode

ALGORITHMS = ("gspo", "grpo", "dr_grpo")


def group(kind: str, name: str, tokens: int, rewards: Sequence[float | None] = (0.0, 1.0)) -> list[Episode]:
    return [
        replace(
            episode(f"{name}-{at}", reward or 0.0, Ending.DONE if reward is not None else Ending.VOID, tokens),
            **{"task_id": name, "group": name, "kind": kind},
        )
        for at, reward in enumerate(rewards)
    ]


MIXED = [
    *(each for at in range(3) for each in group("repair", f"r{at}", 40)),
    *group("repair", "flat", 40, (1.0, 1.0)),
    *group("detect", "d", 4),
    *group("detect", "v", 4, (None, None)),
]
"""8 episodes of repair in 4 groups, one of them flat; 2 valid ones of detect, a tenth as long."""


def config(algorithm: str, **more: Any) -> Config:
    kinds = {"detect": {"weight": more.pop("weight", 1.0)}}
    curriculum = {"refill": more.pop("refill", 0)}
    train = {"algorithm": algorithm, **more}
    return Config.model_validate({"run": {"name": "x"}, "kinds": kinds, "curriculum": curriculum, "train": train})


def parts(batch: Batch, algorithm: str) -> dict[str, float]:
    """Sum of absolute gradients of each kind's tokens, by the loss itself."""
    kinds = {each.id: each.kind for each in MIXED}
    counts = [sum(sample.trained) for sample in batch.samples]
    logp = torch.full((sum(counts),), -0.5, requires_grad=True)
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    trained = TrainedTokens(
        logp,
        logp.detach(),
        None,
        rows,
        torch.tensor([sample.advantage for sample in batch.samples]),
        torch.tensor([sample.weight for sample in batch.samples]) / batch.episodes,
        torch.tensor(counts, dtype=torch.float32),
    )
    LOSSES[algorithm](trained, LossScale(batch.episodes, 0.2, 0.2, constant=1000)).value.backward()  # type: ignore[index]
    assert logp.grad is not None
    shares: dict[str, float] = defaultdict(float)
    for at, sample in enumerate(batch.samples):
        shares[kinds[sample.episode_id]] += float(logp.grad[rows == at].abs().sum())
    return shares


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_kind_with_few_tokens_is_not_drowned(algorithm: str) -> None:
    """Unbalanced, a kind's share is its number of tokens or episodes, by the algorithm; balanced, shares are equal."""
    plain = parts(make_batch(MIXED, config(algorithm)), algorithm)
    assert plain["repair"] / plain["detect"] == pytest.approx(30 if algorithm == "dr_grpo" else 3, rel=1e-3)

    balanced = make_batch(MIXED, config(algorithm, balance_kinds=True, refill=1))
    even = parts(balanced, algorithm)
    assert even["repair"] == pytest.approx(even["detect"], rel=1e-3)
    whole = parts(make_batch(MIXED, config(algorithm, refill=1)), algorithm)
    assert sum(even.values()) == pytest.approx(sum(whole.values()), rel=1e-3)  # a step is as large as before

    weighted = config(algorithm, balance_kinds=True, refill=1, weight=3)
    thrice = parts(make_batch(MIXED, weighted), algorithm)
    assert thrice["detect"] == pytest.approx(3 * thrice["repair"], rel=1e-3)


def test_flat_groups_count_where_the_loss_is_averaged_over_them() -> None:
    """8 episodes of repair, 2 of detect: parts of 5 each."""
    batch = make_batch(MIXED, config("gspo", balance_kinds=True))
    assert batch.scales == {"repair": 5 / 8, "detect": 5 / 2} and batch.episodes == 10


def test_accounts_and_scales_of_kinds_that_have_nothing() -> None:
    batch = make_batch(MIXED, config("gspo", balance_kinds=True, weight=2))
    assert sum(account.trained for account in batch.kinds.values()) == batch.account.trained
    assert sum(account.sampled for account in batch.kinds.values()) == batch.account.sampled
    assert all(account.is_balanced for account in batch.kinds.values())
    void = make_batch(group("detect", "v", 4, (None, None)), config("gspo", balance_kinds=True))
    assert void.scales == {"detect": 1.0} and void.samples == ()
