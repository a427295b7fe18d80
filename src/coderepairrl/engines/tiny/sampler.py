"""Sampling tokens from logits, each row with its request's settings and random numbers.

A tensor's name ends with its axes: B rows, V vocabulary, N blocks of it, K tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from coderepairrl.types import Sampling

LARGE, BLOCK = 8192, 512
"""In a vocabulary of more than `LARGE` tokens, a block of `BLOCK` tokens is drawn first, then a token of it."""


def draw_uniforms(seed: int, count: int) -> list[float]:
    """Random numbers in [0, 1) of 52 bits, one per token: a pure function of `seed` (Philox).

    >>> draw_uniforms(7, 2) == draw_uniforms(7, 3)[:2]
    True
    """
    raw = np.random.Philox(key=seed % (1 << 128)).random_raw(count)
    numbers: list[float] = ((raw >> np.uint64(12)).astype(np.float64) * 2.0**-52).tolist()
    return numbers


def sample_tokens(
    logits_BV: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token and its logprob per row.

    The logprob is ``log softmax(logits / T)`` over the *whole* vocabulary, even with top-k, top-p or min-p; at
    temperature 0 (greedy), T = 1. `draws` invert the cumulative distribution. A non-finite row has logprob nan.
    """
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures).unsqueeze(1)
    logprobs_BV = logits_BV.log_softmax(-1)
    greedy = [sampling.temperature == 0.0 for sampling in samplings]
    if all(greedy):
        ids_B = logits_BV.argmax(-1)
    else:
        ids_B = _draw(logprobs_BV, samplings, draws)
        if any(greedy):
            ids_B = torch.where(torch.tensor(greedy), logits_BV.argmax(-1), ids_B)
    chosen_B = logprobs_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1)
    return ids_B.tolist(), chosen_B.tolist()


def _draw(logprobs_BV: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    if logprobs_BV.shape[1] > LARGE:
        ids_B = _draw_from_blocks(logprobs_BV, torch.tensor(draws, dtype=torch.float64).unsqueeze(1))
        # sampled, but not trainable: with top-k, top-p or min-p
        truncated = [row for row, each in enumerate(samplings) if each.temperature and not each.trainable]
        if truncated:
            ids_B[truncated] = _draw_whole(
                logprobs_BV[truncated], [samplings[row] for row in truncated], [draws[row] for row in truncated]
            )
        return ids_B
    return _draw_whole(logprobs_BV, samplings, draws)


def _draw_whole(logprobs_BV: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    weights_BV = logprobs_BV.double().exp_()
    for row, sampling in enumerate(samplings):
        if sampling.temperature and not sampling.trainable:
            _truncate(weights_BV[row], sampling)
    # a token with weight 0 does not increase the sum, so it is never the first to exceed the draw
    cumulative_BV = weights_BV.cumsum(-1)
    at_B1 = cumulative_BV[:, -1:] * torch.tensor(draws, dtype=torch.float64).unsqueeze(1)
    return torch.searchsorted(cumulative_BV, at_B1, right=True).squeeze(1).clamp_(max=weights_BV.shape[1] - 1)


def _draw_from_blocks(logprobs_BV: Tensor, draws_B1: Tensor) -> Tensor:
    """Draw a block, then the token in it. Sums are in float64, weights in float32."""
    size = logprobs_BV.shape[1]
    weights_BNK = pad(logprobs_BV.exp(), (0, -size % BLOCK)).view(len(logprobs_BV), -1, BLOCK)
    sums_BN = weights_BNK.sum(-1, dtype=torch.float64)
    cumulative_BN = sums_BN.cumsum(-1)
    at_B1 = cumulative_BN[:, -1:] * draws_B1
    block_B1 = torch.searchsorted(cumulative_BN, at_B1, right=True).clamp_(max=sums_BN.shape[1] - 1)
    before_B1 = cumulative_BN.gather(1, block_B1) - sums_BN.gather(1, block_B1)
    within_BK = weights_BNK[torch.arange(len(block_B1)), block_B1.squeeze(1)].double().cumsum_(-1)
    # rounding must not select a token before the first, or after the last, that has any weight
    rest_B1 = torch.minimum((at_B1 - before_B1).clamp_(min=0.0), within_BK[:, -1:] * (1.0 - 2.0**-52))
    token_B1 = torch.searchsorted(within_BK, rest_B1, right=True).clamp_(max=BLOCK - 1)
    return (block_B1 * BLOCK + token_B1).squeeze(1).clamp_(max=size - 1)


def _truncate(weights_V: Tensor, sampling: Sampling) -> None:
    """Zero weights by top-k, then top-p, then min-p; the likeliest token stays."""
    sorted_V, order = weights_V.sort(descending=True, stable=True)
    if sampling.top_k > 0:
        sorted_V[sampling.top_k :] = 0.0
    if sampling.top_p < 1.0:
        mass_before = sorted_V.cumsum(0) - sorted_V
        sorted_V[mass_before >= sampling.top_p * sorted_V.sum()] = 0.0
    if sampling.min_p > 0.0:
        sorted_V[sorted_V < sampling.min_p * sorted_V[0]] = 0.0
    weights_V[order] = sorted_V
