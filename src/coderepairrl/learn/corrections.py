"""Corrections for tokens that were sampled from another policy than the learner's: rounding, or older weights.

Three policies are told apart: the *behaviour* policy, whose logprobs the engine recorded with each token; the
*proximal* one, the learner's weights before the batch (``old``), which the clip keeps an update near; and the one that
is being trained. A loss whose ratio is to the proximal policy needs the ratio of the proximal to the behaviour policy
as a weight beside it.

Shapes: R rows, N trained tokens, as in `losses`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coderepairrl.config.sections.train import Correction


class Weights(NamedTuple):
    """What the tokens of a micro-batch count in its loss."""

    weight_N: Tensor
    cut: Tensor
    """Of which tokens, or rows, the weight was cut; empty where none are truncated."""
    masked_R: Tensor
    """Which rows are left out; empty where none are masked."""


def weights(
    old_N: Tensor,
    recorded_N: Tensor,
    row_N: Tensor,
    count_R: Tensor,
    kind: Correction,
    cap: float,
    bound: float | None = None,
) -> Weights | None:
    """The product of `truncated` and `masked`; None where neither is asked for."""
    if kind == "off" and bound is None:
        return None
    difference_N = (old_N - recorded_N).detach()
    nothing = torch.zeros(0, dtype=torch.bool, device=difference_N.device)
    weight_N, cut = torch.ones_like(difference_N), nothing
    if kind != "off":
        weight_N, cut = truncated(difference_N, row_N, count_R, kind, cap)
    if bound is None:
        return Weights(weight_N, cut, nothing)
    masked_R = masked(difference_N, row_N, count_R, bound)
    return Weights(weight_N.masked_fill(masked_R[row_N], 0.0), cut, masked_R)


def truncated(
    difference_N: Tensor, row_N: Tensor, count_R: Tensor, kind: Literal["token", "sequence", "icepop"], cap: float
) -> tuple[Tensor, Tensor]:
    """Truncated importance weights of tokens (N), and of which tokens or rows they were cut.

    `difference_N` is ``old - recorded``. Where ``old`` was recomputed by the learner, the ratio to it says nothing of
    ``recorded``, the engine's: what is sampled from one policy is averaged as if it were another's.
    ``min(exp(old - recorded), cap)`` per token mends that, and bounds its variance (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy training"; TRL's ``token_truncate``). With it, the clipped loss is the
    decoupled one of PPO (arXiv 2110.00641, and for asynchronous training of language models arXiv 2505.24298).

    ``sequence`` has one weight per row, ``exp(mean(old - recorded))``: by its length, as in GSPO's own ratio (arXiv
    2507.18071), so that the product of both is GSPO's ratio to the engine. TRL's ``sequence_truncate`` takes the
    product over the tokens, which after thousands of them is near 0 or cut in most rows.

    ``icepop`` leaves out tokens whose weight is above `cap` or below its inverse in place of cutting it (IcePop, Ling
    Team 2025, arXiv 2510.18855; TRL's ``token_mask``).
    """
    if kind == "icepop":
        weight_N = torch.exp(difference_N)
        outside_N = (weight_N > cap) | (weight_N < 1 / cap)
        return weight_N.masked_fill(outside_N, 0.0), outside_N
    if kind == "token":
        weight_N = torch.exp(difference_N)
        return weight_N.clamp(max=cap), weight_N > cap
    weight_R = torch.exp(row_means(difference_N, row_N, count_R))
    return weight_R.clamp(max=cap)[row_N], weight_R > cap


def masked(difference_N: Tensor, row_N: Tensor, count_R: Tensor, bound: float) -> Tensor:
    """The rows (R) whose geometric mean ratio, ``exp(mean(old - recorded))``, is above `bound` or below its inverse.

    A row that the learner would hardly have sampled teaches it little whatever its weight, and a cut weight is biased:
    such rows are left out (Liu, Li et al. 2025, "When speed kills stability", geometric sequence masking). The mean
    over the row makes one bound do for rows of every length.
    """
    return row_means(difference_N, row_N, count_R).abs() > math.log(bound)


def row_means(value_N: Tensor, row_N: Tensor, count_R: Tensor) -> Tensor:
    """Over the trained tokens of each row (R)."""
    return torch.zeros_like(count_R).index_add(0, row_N, value_N) / count_R
