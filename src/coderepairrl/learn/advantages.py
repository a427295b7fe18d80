"""Advantages from the rewards of a group of attempts at one task (arXiv 2402.03300, 2503.20783). Without torch.

`None` stands for a void episode: it has no reward, does not count in the baseline, and gets no advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coderepairrl.config.schema import Algorithm, Kind
from coderepairrl.errors import ConfigError

EPS = 1e-4
KIND: dict[Algorithm, Kind] = {"gspo": "zscore", "grpo": "zscore", "dr_grpo": "mean"}
"""The default of each algorithm. Dr. GRPO (arXiv 2503.20783) is GRPO without the division by the standard deviation,
which gives groups with little spread more weight."""
FLAT = 1e-9
"""Rewards that differ by no more than this are equal: rounding errors such as 0.1 + 0.2 - 0.3."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group, in the order of its rewards. None for episodes that are not trained on: void ones, and
    all of a flat group unless there is a KL term.

    `mean` and `std` are those of the rewards of episodes that are not void (0.0 if there are none).
    """

    values: tuple[float | None, ...]
    mean: float
    std: float
    flat: bool
    """Fewer than two rewards, or all equal: there is nothing to learn from them."""


def group_advantages(
    rewards: Sequence[float | None],
    kind: Kind = "zscore",
    *,
    kl: bool = False,
    eps: float = EPS,
    ddof: Literal[0, 1] = 0,
) -> GroupAdvantages:
    """Advantages of one group of rewards.

    ``zscore`` is GRPO's ``(r - mean) / (std + eps)`` and ``mean`` Dr. GRPO's ``r - mean``. The standard deviation
    is the population's (``ddof=0``), as in the thesis; TRL takes the sample's (``ddof=1``) with the same eps.
    With a KL term (`kl`) the episodes of a flat group have advantage 0, since the term acts on every episode. Without
    one their gradient would be 0, so they have None.
    Raises `ConfigError` for an unknown kind and ValueError for a reward that is not finite.

    >>> group_advantages([0.0, 1.0, None, 0.5], "mean").values
    (-0.5, 0.5, None, 0.0)
    >>> group_advantages([0.3, 0.3]).flat
    True
    """
    if kind not in ("zscore", "mean"):
        raise ConfigError(f"unknown advantage {kind!r}; known: zscore, mean")
    counted = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, counted)):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    mean = math.fsum(counted) / len(counted) if counted else 0.0
    squares = math.fsum((reward - mean) ** 2 for reward in counted)
    std = math.sqrt(squares / (len(counted) - ddof)) if len(counted) > ddof else 0.0
    if len(counted) < 2 or max(counted) - min(counted) <= FLAT:
        return GroupAdvantages(
            tuple(0.0 if kl and reward is not None else None for reward in rewards), mean, std, flat=True
        )
    scale = std + eps if kind == "zscore" else 1.0
    values = tuple(None if reward is None else (reward - mean) / scale for reward in rewards)
    return GroupAdvantages(values, mean, std, flat=False)
