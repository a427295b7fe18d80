"""Rewards of a group of attempts at one task become advantages (arXiv 2402.03300, 2503.20783). Free of torch.

`None` stands for a void episode: it has no reward, is no part of the baseline, and gets no advantage.
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
"""The default of each algorithm: Dr. GRPO (arXiv 2503.20783) is GRPO without the division, which weighs groups by
their spread."""
FLAT = 1e-9
"""Rewards that differ by no more than this are equal: what is left of 0.1 + 0.2 - 0.3."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group, in the order of its rewards; None for an episode that is not trained on: a void one,
    and each of a flat group, unless there is a KL term.

    `mean` and `std` are of the rewards that count (0.0 when there is none).
    """

    values: tuple[float | None, ...]
    mean: float
    std: float
    flat: bool
    """Fewer than two rewards, or all equal: the rewards teach nothing, and it is counted as such."""


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
    With a KL term (`kl`) a flat group has the advantages that the formulas give it, which are 0: the term acts on every
    episode. Without one its gradient is 0 whatever is computed, so its episodes have none.
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
