"""Algorithms as combinations of parts, and advantages of a group's rewards (docs/reference/algorithms.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from coderepairrl.config.schema import Algorithm, Baseline
from coderepairrl.errors import ConfigError

Ratio = Literal["token", "row", "product"]
Objective = Literal["score", "clip", "cispo"]
Aggregation = Literal["sum", "row", "episode", "batch", "constant"]
EPS = 1e-4  # added to deviations, as in TRL
FLAT = 1e-9
"""Rewards within this difference, from rounding, are equal."""


class Recipe(NamedTuple):
    """Parts of an algorithm, and its defaults."""

    ratio: Ratio
    objective: Objective
    aggregation: Aggregation
    baseline: Baseline
    """`train.advantage`."""
    clip: tuple[float, float] = (0.2, 0.2)
    """`train.eps_low` and `train.eps_high`."""


RECIPES: dict[Algorithm, Recipe] = {
    "reinforce": Recipe("token", "score", "sum", "none"),
    "rloo": Recipe("product", "clip", "row", "leave_one_out"),
    "ppo": Recipe("token", "clip", "batch", "batch"),
    "grpo": Recipe("token", "clip", "episode", "zscore"),
    "dr_grpo": Recipe("token", "clip", "constant", "mean"),
    "bnpo": Recipe("token", "clip", "batch", "zscore"),
    "dapo": Recipe("token", "clip", "batch", "zscore", (0.2, 0.28)),
    "cispo": Recipe("token", "cispo", "batch", "zscore", (0.0, 4.0)),
    "gspo": Recipe("row", "clip", "episode", "zscore", (2e-5, 4e-4)),  # a length-normalised ratio stays near 1
}
"""Every algorithm except `sft`."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages in reward order; None where not trained. `mean` and `std` exclude void episodes."""

    values: tuple[float | None, ...]
    mean: float
    std: float
    flat: bool
    """Fewer than two rewards, or all equal."""


def compute_group_advantages(
    rewards: Sequence[float | None], baseline: Baseline = "zscore", *, kl: bool = False
) -> GroupAdvantages:
    """Compute the advantages of one group of rewards.

    - ``zscore``: ``(r - mean) / (std + EPS)``, with the population's deviation (GRPO, arXiv 2402.03300).
    - ``batch``: ``zscore`` over a batch, passed as one group (REINFORCE++, arXiv 2501.03262).
    - ``mean``: ``r - mean`` (Dr. GRPO, arXiv 2503.20783).
    - ``leave_one_out``: ``(r - mean) n / (n - 1)`` (RLOO, arXiv 2402.14740).
    - ``none``: ``r`` (REINFORCE).

    A flat group (for ``none``, a reward of 0) gets None, or with a KL term (`kl`) 0. Raises `ConfigError` for an
    unknown baseline, ValueError for a non-finite reward.

    >>> compute_group_advantages([0.0, 1.0, None, 0.5], "mean").values
    (-0.5, 0.5, None, 0.0)
    >>> compute_group_advantages([0.3, 0.3]).flat
    True
    """
    if baseline not in get_args(Baseline):
        raise ConfigError(f"unknown advantage {baseline!r}; known: {', '.join(get_args(Baseline))}")
    counted = [reward for reward in rewards if reward is not None]
    n = len(counted)
    if not all(map(math.isfinite, counted)):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    mean = math.fsum(counted) / n if n else 0.0
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in counted) / n) if n else 0.0
    flat = n < 2 or max(counted) - min(counted) <= FLAT
    if baseline == "none":
        rewards_or_none = tuple(None if not reward and not kl else reward for reward in rewards)
        return GroupAdvantages(rewards_or_none, mean, std, flat)
    if flat:
        zeros = tuple(0.0 if kl and reward is not None else None for reward in rewards)
        return GroupAdvantages(zeros, mean, std, flat)
    scale = {"mean": 1.0, "leave_one_out": (n - 1) / n}.get(baseline, std + EPS)  # zscore and batch: the deviation
    values = tuple(None if reward is None else (reward - mean) / scale for reward in rewards)
    return GroupAdvantages(values, mean, std, flat)


def compute_overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Length penalty: 0 up to ``limit - buffer``, 1 from `limit`, linear between (DAPO, arXiv 2503.14476).

    >>> [compute_overlong_penalty(tokens, limit=100, buffer=20) for tokens in (80, 85, 100, 120)]
    [0.0, 0.25, 1.0, 1.0]
    """
    return min(1.0, max(0, tokens - (limit - buffer)) / buffer)


def break_ties(
    values: Sequence[float | None], rewards: Sequence[float | None], scores: Sequence[float], weight: float
) -> tuple[float | None, ...]:
    """Add `weight` times (score - its mean among equal rewards).

    >>> break_ties((None, None), (0.0, 0.0), (1.0, 0.0), weight=0.1)
    (0.05, -0.05)
    >>> break_ties((1.0, -0.5, -0.5), (1.0, 0.0, 0.0), (0.0, 1.0, 0.5), weight=0.1)
    (1.0, -0.475, -0.525)
    """
    result = list(values)
    for reward in {each for each in rewards if each is not None}:
        tied = [at for at, other in enumerate(rewards) if other is not None and abs(other - reward) <= FLAT]
        mean = math.fsum(scores[at] for at in tied) / len(tied)
        for at in tied:
            bonus = weight * (scores[at] - mean)
            if abs(bonus) > FLAT:
                result[at] = (values[at] or 0.0) + bonus
    return tuple(result)
