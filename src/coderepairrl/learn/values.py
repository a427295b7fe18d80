"""PPO's values: the return that a linear head on the policy predicts of each context, and what tokens learn from it.

The trajectory of an episode is its trained tokens, row after row, as `stitch` orders them. A row that begins where the
context was rewritten, or forked, goes on with the same episode: what comes after the last token of one is the first of
the next. The episode's reward arrives at the end and is not discounted, and no value stands in for it: each token
learns from the reward minus the value of its own context (as in VAPO and Open-Reasoner-Zero, arXiv 2503.24290).

Shapes: R rows, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def values_of_rows(batch: MicroBatch, value_N: Tensor) -> dict[int, list[float]]:
    """Values of the trained tokens of each row, by its number among the samples that the batch was dealt from."""
    sizes = [int(count) for count in batch.count_R.tolist()]
    columns = zip(batch.dealt, torch.split(value_N, sizes), strict=True)
    return {number: values.double().tolist() for number, values in columns}


class Estimate(NamedTuple):
    """Of the trained tokens of a row. A return is the reward of the episode: what the head is to predict."""

    advantages: list[float]
    returns: list[float]
    values: list[float]


def estimates(
    minibatches: Sequence[tuple[Sequence[Sample], Mapping[int, list[float]]]], *, whiten: bool
) -> tuple[list[dict[int, Estimate]], float | None]:
    """Those of each minibatch's rows by their numbers, and the values' `explained` variance.

    The `advantage` of a sample is the reward of its episode. To `whiten` is to make the mean of the batch's advantages
    0 and their standard deviation 1.
    """
    found = [
        {
            number: Estimate([reward - value for value in values], [reward] * len(values), values)
            for number, values in rows.items()
            for reward in (samples[number].advantage,)
        }
        for samples, rows in minibatches
    ]
    every = [each for part in found for each in part.values()]
    advantages, returns, values = ([x for each in every for x in each[column]] for column in range(3))
    if whiten:
        column = torch.tensor(advantages, dtype=torch.float64)
        mean, spread = column.mean().item(), column.std(correction=0).item() + EPS
        for each in every:
            each.advantages[:] = [(advantage - mean) / spread for advantage in each.advantages]
    return found, explained(returns, values)


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
