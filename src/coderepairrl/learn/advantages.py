"""Advantages from the rewards of a group of attempts at one task. Without torch.

`None` stands for a void episode: it has no reward, does not count in the baseline, and gets no advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from coderepairrl.config.sections.train import Kind
from coderepairrl.errors import ConfigError

EPS = 1e-4
FLAT = 1e-9
"""Rewards that differ by no more than this are equal: rounding errors such as 0.1 + 0.2 - 0.3."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group, in the order of its rewards. None for episodes that are not trained on: void ones, and
    those of a flat group that have no gradient.

    `mean` and `std` are those of the rewards of episodes that are not void (0.0 if there are none).
    """

    values: tuple[float | None, ...]
    mean: float
    std: float
    flat: bool
    """Fewer than two rewards, or all equal: there is nothing to learn from comparing them."""


def group_advantages(
    rewards: Sequence[float | None],
    kind: Kind = "zscore",
    *,
    kl: bool = False,
    eps: float = EPS,
    ddof: Literal[0, 1] = 0,
) -> GroupAdvantages:
    """Advantages of one group of rewards.

    - ``zscore``: ``(r - mean) / (std + eps)`` (GRPO, arXiv 2402.03300). The standard deviation is the population's
      (``ddof=0``), as in the thesis; TRL takes the sample's (``ddof=1``) with the same eps. ``batch`` is the same over
      the episodes of a batch, which the caller gives as one group (as in REINFORCE++, arXiv 2501.03262).
    - ``mean``: ``r - mean`` (Dr. GRPO, arXiv 2503.20783): the division gives groups with little spread more weight.
    - ``leave_one_out``: r minus the mean of the others, ``(r - mean) n / (n - 1)`` (RLOO, arXiv 2402.14740): a baseline
      that does not depend on its own sample leaves the gradient unbiased.
    - ``none``: ``r`` (REINFORCE without a baseline).

    With a KL term (`kl`) the episodes of a flat group have advantage 0, since the term acts on every episode. Without
    one their gradient would be 0, so they have None. For ``none`` only rewards of 0 are so.
    Raises `ConfigError` for an unknown kind and ValueError for a reward that is not finite.

    >>> group_advantages([0.0, 1.0, None, 0.5], "mean").values
    (-0.5, 0.5, None, 0.0)
    >>> group_advantages([0.3, 0.3]).flat
    True
    """
    if kind not in get_args(Kind):
        raise ConfigError(f"unknown advantage {kind!r}; known: {', '.join(get_args(Kind))}")
    counted = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, counted)):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    mean = math.fsum(counted) / len(counted) if counted else 0.0
    squares = math.fsum((reward - mean) ** 2 for reward in counted)
    std = math.sqrt(squares / (len(counted) - ddof)) if len(counted) > ddof else 0.0
    flat = len(counted) < 2 or max(counted) - min(counted) <= FLAT
    if kind == "none":
        own = tuple(None if not reward and not kl else reward for reward in rewards)
        return GroupAdvantages(own, mean, std, flat)
    if flat:
        zeros = tuple(0.0 if kl and reward is not None else None for reward in rewards)
        return GroupAdvantages(zeros, mean, std, flat)
    n = len(counted)
    scale = {"mean": 1.0, "leave_one_out": (n - 1) / n}.get(kind, std + eps)
    values = tuple(None if reward is None else (reward - mean) / scale for reward in rewards)
    return GroupAdvantages(values, mean, std, flat)


def overlong(tokens: int, limit: int, buffer: int) -> float:
    """What is taken from the reward of an attempt of so many `tokens`: 0 up to ``limit - buffer``, 1 from `limit` on,
    and evenly more between (DAPO's soft overlong punishment, arXiv 2503.14476).

    >>> [overlong(tokens, limit=100, buffer=20) for tokens in (80, 85, 100, 120)]
    [0.0, 0.25, 1.0, 1.0]
    """
    return min(1.0, max(0, tokens - (limit - buffer)) / buffer)


def ties_broken(
    values: Sequence[float | None], rewards: Sequence[float | None], scores: Sequence[float], weight: float
) -> tuple[float | None, ...]:
    """Advantages `values` of a group, with `weight` times what a score has above the mean of the attempts with the same
    reward. Among these it adds up to 0, so that it does not act between different rewards.

    Where that leaves nothing to learn, None stays.

    >>> ties_broken((None, None), (0.0, 0.0), (1.0, 0.0), weight=0.1)
    (0.05, -0.05)
    >>> ties_broken((1.0, -0.5, -0.5), (1.0, 0.0, 0.0), (0.0, 1.0, 0.5), weight=0.1)
    (1.0, -0.475, -0.525)
    """
    broken = list(values)
    for reward in {each for each in rewards if each is not None}:
        tied = [at for at, other in enumerate(rewards) if other is not None and abs(other - reward) <= FLAT]
        mean = math.fsum(scores[at] for at in tied) / len(tied)
        for at in tied:
            more = weight * (scores[at] - mean)
            if abs(more) > FLAT:
                broken[at] = (values[at] or 0.0) + more
    return tuple(broken)
