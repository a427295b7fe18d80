"""PPO's values: a linear head predicts the return of each context.

The reward arrives after an episode's last trained token, undiscounted and without bootstrapping: a token's advantage is
the reward minus its context's value (VAPO, Open-Reasoner-Zero, arXiv 2503.24290). R rows, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coderepairrl.learn.algorithms import EPS
from coderepairrl.learn.pack import MicroBatch
from coderepairrl.types import Sample

VALUE_HEAD = "value_head"
"""File stem, and prefix of parameter names."""


class ValueHead(nn.Module):
    """Linear float32 function of the last hidden state, initially zero."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Values (N) of hidden states."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            # FSDP2 gathers weights in bfloat16 when it trains the whole model in bfloat16
            return (hidden_ND.float() @ self.weight.float().T)[:, 0] + self.bias.float()


class Targets(NamedTuple):
    """Targets of trained tokens (N), from values before the batch's updates."""

    advantage_N: Tensor
    return_N: Tensor
    before_N: Tensor


def group_values_by_row(batch: MicroBatch, value_N: Tensor) -> dict[int, list[float]]:
    """Values of each row's trained tokens, by sample index."""
    sizes = [int(count) for count in batch.count_R.tolist()]
    columns = zip(batch.sample_indices, torch.split(value_N, sizes), strict=True)
    return {number: values.double().tolist() for number, values in columns}


class Estimate(NamedTuple):
    """Estimates for a row's tokens; the return is the episode's reward."""

    advantages: list[float]
    returns: list[float]
    values: list[float]


def compute_estimates(
    minibatches: Sequence[tuple[Sequence[Sample], Mapping[int, list[float]]]], *, whiten: bool
) -> tuple[list[dict[int, Estimate]], float | None]:
    """Estimates of each minibatch's rows by index, and `explained_variance`.

    A sample's `advantage` is its episode's reward. `whiten` scales advantages to mean 0, deviation 1.
    """

    def estimate(reward: float, values: list[float]) -> Estimate:
        return Estimate([reward - value for value in values], [reward] * len(values), values)

    by_minibatch = [
        {number: estimate(samples[number].advantage, values) for number, values in rows.items()}
        for samples, rows in minibatches
    ]
    every = [each for rows in by_minibatch for each in rows.values()]
    advantages, returns, values = ([x for each in every for x in each[column]] for column in range(3))
    if whiten:
        column = torch.tensor(advantages, dtype=torch.float64)
        mean, spread = column.mean().item(), column.std(correction=0).item() + EPS
        for each in every:
            each.advantages[:] = [(advantage - mean) / spread for advantage in each.advantages]
    return by_minibatch, explained_variance(returns, values)


def make_targets(batch: MicroBatch, estimates: Mapping[int, Estimate]) -> Targets:
    """Targets of a micro-batch."""
    columns = ([x for number in batch.sample_indices for x in estimates[number][column]] for column in range(3))
    return Targets(*(torch.tensor(each, dtype=torch.float32, device=batch.ids_T.device) for each in columns))


def explained_variance(returns: Sequence[float], values: Sequence[float]) -> float | None:
    """Share of the variance of `returns` that `values` explain; None without variance.

    >>> explained_variance([0.0, 1.0], [0.25, 0.75]), explained_variance([0.5, 0.5], [0.0, 1.0])
    (0.75, None)
    """
    total = _variance(returns)
    return 1 - _variance([a - b for a, b in zip(returns, values, strict=True)]) / total if total > EPS**2 else None


def _variance(numbers: Sequence[float]) -> float:
    # in torch, which accepts a broken policy's non-finite values: the step is skipped
    return torch.tensor(numbers, dtype=torch.float64).var(correction=0).item()


def value_loss(value_N: Tensor, before_N: Tensor, return_N: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error of each value, and where the clip acts (no gradient).

    The larger error counts: of the value, or of it clipped to within `clip` of `before_N` (PPO, TRL).
    """
    near_N = torch.maximum(torch.minimum(value_N, before_N + clip), before_N - clip)
    free_N, bound_N = (value_N - return_N).square(), (near_N - return_N).square()
    return torch.maximum(free_N, bound_N) / 2, bound_N > free_N
