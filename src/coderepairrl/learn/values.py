"""PPO's values: the return that a linear head on the policy predicts of each context, and what tokens learn from it.

The trajectory of an episode is its trained tokens, row after row, as `stitch` orders them. A row that begins where the
context was rewritten, or forked, goes on with the same episode: what comes after the last token of one is the first of
the next. So the episode's reward arrives once, at the last trained token of its last row, and the values of later rows
reach back into earlier ones. With ``gamma`` and ``gae_lambda`` of 1 the order makes no difference: each token learns
from the reward less the value of its own context.

Shapes: R rows, N trained tokens, S trained tokens of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coderepairrl.learn.advantages import EPS
from coderepairrl.learn.pack import MicroBatch
from coderepairrl.types import Sample

FILE = "value_head"
"""Stem of its file in a checkpoint, and what its parameters' names begin with."""


class ValueHead(nn.Module):
    """A linear function of the last hidden state in float32, whatever the model computes in. It begins with 0: no state
    is better than another until rewards say so, and nothing is drawn."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Values (N) of hidden states."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            # FSDP2 gathers weights in bfloat16 where it trains a whole model in it
            return (hidden_ND.float() @ self.weight.float().T)[:, 0] + self.bias.float()


class Targets(NamedTuple):
    """What the trained tokens (N) of a micro-batch learn from, by the values before the batch."""

    advantage_N: Tensor
    return_N: Tensor
    before_N: Tensor


class Row(NamedTuple):
    """Of the trained tokens of a row, values before the batch and what the KL term takes from the reward of each."""

    values: list[float]
    penalties: list[float]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Generalised advantage estimates (arXiv 1506.02438) of a trajectory that ends with its last reward.

    ``A_t = sum over l of (gamma lam)^l delta_(t+l)``, with ``delta_t = r_t + gamma V_(t+1) - V_t``, and V of the end 0.

    >>> gae([0.0, 1.0], [0.25, 0.5], gamma=1.0, lam=1.0), gae([0.0, 1.0], [0.25, 0.5], gamma=1.0, lam=0.0)
    ([0.75, 0.5], [0.25, 0.5])
    """
    found: list[float] = []
    following, advantage = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        found.append(advantage)
    return found[::-1]


def rows_of(batch: MicroBatch, value_N: Tensor, penalty_N: Tensor) -> Iterator[tuple[int, Row]]:
    """The rows of a micro-batch by their numbers among the samples it was dealt from."""
    sizes = [int(count) for count in batch.count_R.tolist()]
    columns = zip(torch.split(value_N, sizes), torch.split(penalty_N, sizes), strict=True)
    for number, (values, penalties) in zip(batch.dealt, columns, strict=True):
        yield number, Row(values.double().tolist(), penalties.double().tolist())


class Estimate(NamedTuple):
    """Of the trained tokens of a row. A return is the advantage and the value before: what the head is to predict."""

    advantages: list[float]
    returns: list[float]
    values: list[float]


def estimates(
    minibatches: Sequence[tuple[Sequence[Sample], Mapping[int, Row]]], gamma: float, lam: float, *, whiten: bool
) -> tuple[list[dict[int, Estimate]], float | None]:
    """Those of each minibatch's rows by their numbers, and the values' `explained` variance.

    The `advantage` of a sample is the reward of its episode. To `whiten` is to make the mean of the batch's advantages
    0 and their standard deviation 1.
    """
    found = [_of_episodes(samples, rows, gamma, lam) for samples, rows in minibatches]
    every = [each for part in found for each in part.values()]
    advantages, returns, values = ([x for each in every for x in each[column]] for column in range(3))
    if whiten:
        column = torch.tensor(advantages, dtype=torch.float64)
        mean, spread = column.mean().item(), column.std(correction=0).item() + EPS
        for each in every:
            each.advantages[:] = [(advantage - mean) / spread for advantage in each.advantages]
    return found, explained(returns, values)


def _of_episodes(samples: Sequence[Sample], rows: Mapping[int, Row], gamma: float, lam: float) -> dict[int, Estimate]:
    episodes: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        episodes.setdefault(sample.episode_id, []).append(number)
    found = {}
    for numbers in episodes.values():
        values = [value for number in numbers for value in rows[number].values]
        rewards = [-less for number in numbers for less in rows[number].penalties]
        rewards[-1] += samples[numbers[0]].advantage
        left = gae(rewards, values, gamma, lam)
        for number in numbers:
            own = rows[number].values
            advantages, left = left[: len(own)], left[len(own) :]
            found[number] = Estimate(advantages, [a + v for a, v in zip(advantages, own, strict=True)], own)
    return found


def targets(batch: MicroBatch, found: Mapping[int, Estimate]) -> Targets:
    """Those of a micro-batch."""
    columns = ([x for number in batch.dealt for x in found[number][column]] for column in range(3))
    return Targets(*(torch.tensor(each, dtype=torch.float32, device=batch.ids_T.device) for each in columns))


def explained(returns: Sequence[float], values: Sequence[float]) -> float | None:
    """The share of the variance of `returns` that `values` account for: 1 if they are equal, 0 as good as a constant,
    below 0 worse than that; None where returns do not vary.

    >>> explained([0.0, 1.0], [0.25, 0.75]), explained([0.5, 0.5], [0.0, 1.0])
    (0.75, None)
    """
    whole = _variance(returns)
    return 1 - _variance([a - b for a, b in zip(returns, values, strict=True)]) / whole if whole > EPS**2 else None


def _variance(numbers: Sequence[float]) -> float:
    """Of the population. In torch, which goes on where a broken policy's values are not finite: the step is skipped."""
    return torch.tensor(numbers, dtype=torch.float64).var(correction=0).item()


def value_loss(value_N: Tensor, before_N: Tensor, return_N: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error of each value, and where the clip acts.

    The worse of two: that of the value, and that of the value no further than `clip` from the one before the batch (as
    PPO's authors and TRL have it). Where it acts there is no gradient.
    """
    near_N = torch.maximum(torch.minimum(value_N, before_N + clip), before_N - clip)
    free_N, bound_N = (value_N - return_N).square(), (near_N - return_N).square()
    return torch.maximum(free_N, bound_N) / 2, bound_N > free_N
