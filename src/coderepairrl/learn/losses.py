"""Losses as plain functions on a micro-batch's trained tokens (formulas: docs/reference/algorithms.md).

A loss is ``- sum_t share_t objective(ratio_t, A)``; an algorithm chooses three parts and a baseline
(`algorithms.RECIPES`). R rows, N trained tokens. Denominators (`LossScale`) are those of the whole batch.

Sources: that page; for the teacher, arXiv 2306.13649 (sampled tokens), arXiv 1503.02531 (collected tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from coderepairrl.config.schema import Algorithm
from coderepairrl.learn.algorithms import RECIPES, Aggregation, Objective, Ratio, Recipe
from coderepairrl.learn.values import Targets, value_loss

CORRECTION_CAP = 2.0
"""Largest importance weight (Yao et al. 2025)."""
LOG_RATIO_LIMIT = 20.0
"""Nats, as in verl; a log ratio beyond has no gradient."""


class Correction(NamedTuple):
    """Weights of trained tokens, and which were cut."""

    weight_N: Tensor
    cut_N: Tensor


def correct_mismatch(old_N: Tensor, recorded_N: Tensor) -> Correction:
    """Truncated importance weights, ``min(exp(old - recorded), CORRECTION_CAP)`` per token.

    They reweight from the engine's policy to the learner's before the batch: Yao et al. 2025, TRL's
    ``token_truncate``. With clipping, decoupled PPO (arXiv 2110.00641, arXiv 2505.24298).
    """
    weight_N = torch.exp((old_N - recorded_N).detach())
    return Correction(weight_N.clamp(max=CORRECTION_CAP), weight_N > CORRECTION_CAP)


def compute_row_means(value_N: Tensor, row_N: Tensor, count_R: Tensor) -> Tensor:
    """Mean over each row's trained tokens (R)."""
    return torch.zeros_like(count_R).index_add(0, row_N, value_N) / count_R


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Trained tokens of a micro-batch. `old_N` and `ref_N` carry no gradient."""

    logp_N: Tensor
    old_N: Tensor
    ref_N: Tensor | None
    row_N: Tensor
    advantage_R: Tensor
    weight_R: Tensor
    count_R: Tensor
    correction_N: Tensor | None = None
    initial_N: Tensor | None = None
    """``KL(initial weights || policy)`` for `sft`."""
    teacher_N: Tensor | None = None
    entropy_N: Tensor | None = None
    value_N: Tensor | None = None
    """Output of the value head; needs `targets`."""
    targets: Targets | None = None


@dataclass(frozen=True, slots=True)
class LossScale:
    """Bounds, weights (`beta`, `teacher`, `entropy`, `value`), and denominators of the whole batch."""

    episodes: int
    eps_low: float
    eps_high: float
    beta: float = 0.0
    tokens: float = 1
    """Trained tokens, flat groups included; for `sft` times row weights."""
    constant: float = 1
    """L of the aggregation ``constant``."""
    teacher: float = 0.0
    delta: float = math.inf
    """Bound of ratios with a negative advantage."""
    entropy: float = 0.0
    value: float = 0.0
    value_clip: float = math.inf


@dataclass(frozen=True, slots=True)
class Loss:
    """Micro-batch's share of the loss, and its parts, detached.

    `ratio`, `low`, `high` (bound active) and `limited` (by `LOG_RATIO_LIMIT`) have the ratio's shape, N or R; None for
    `sft`.
    """

    value: Tensor
    ratio: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    limited: Tensor | None = None
    kl_N: Tensor | None = None
    teacher_N: Tensor | None = None
    entropy_N: Tensor | None = None
    value_N: Tensor | None = None
    value_cut_N: Tensor | None = None


LossFunction = Callable[[TrainedTokens, LossScale], Loss]


class ObjectiveValue(NamedTuple):
    """Objective, and where its bounds act."""

    value: Tensor
    low: Tensor
    high: Tensor


def policy_gradient_loss(trained: TrainedTokens, scale: LossScale, recipe: Recipe) -> Loss:
    """Loss of a recipe."""
    log_ratio = LOG_RATIOS[recipe.ratio](trained)
    ratio = _clamp_log_ratio(log_ratio).exp()
    is_per_row = recipe.ratio in ("row", "product")
    if trained.targets is not None:
        advantage = trained.targets.advantage_N
    else:
        advantage = trained.advantage_R if is_per_row else trained.advantage_R[trained.row_N]
    gain, low, high = OBJECTIVES[recipe.objective](ratio, advantage, trained, scale)
    gain_N = gain.index_select(0, trained.row_N) if is_per_row else gain  # index_select adds gradients in a fixed order
    if trained.correction_N is not None:
        gain_N = gain_N * trained.correction_N
    share_N = AGGREGATIONS[recipe.aggregation](trained, scale)
    limited = log_ratio.abs() > LOG_RATIO_LIMIT
    value = -(share_N * gain_N).sum()
    return _add_terms(value, share_N, trained, scale, ratio=ratio, low=low, high=high, limited=limited)


def sft_loss(trained: TrainedTokens, scale: LossScale) -> Loss:
    """Cross-entropy, weighted by row."""
    share_N = trained.weight_R[trained.row_N] / scale.tokens
    return _add_terms(-(share_N * trained.logp_N).sum(), share_N, trained, scale)


def _clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _mean_log_ratios(t: TrainedTokens) -> Tensor:
    return compute_row_means(t.logp_N - t.old_N, t.row_N, t.count_R)


LOG_RATIOS: dict[Ratio, Callable[[TrainedTokens], Tensor]] = {
    "token": lambda t: t.logp_N - t.old_N,
    "row": _mean_log_ratios,
    "product": lambda t: t.count_R * _mean_log_ratios(t),
}


def _clip_objective(ratio: Tensor, advantage: Tensor, t: TrainedTokens, scale: LossScale) -> ObjectiveValue:
    bounded = ratio.clamp(1 - scale.eps_low, 1 + scale.eps_high)
    value = torch.minimum(ratio.clamp(max=scale.delta) * advantage, bounded * advantage)
    low = (ratio < 1 - scale.eps_low) & (advantage < 0)
    high = (ratio > 1 + scale.eps_high) & (advantage > 0) | (ratio > scale.delta) & (advantage < 0)
    return ObjectiveValue(value, low, high)


def _cispo_objective(ratio: Tensor, advantage: Tensor, t: TrainedTokens, scale: LossScale) -> ObjectiveValue:
    cap = 1 + scale.eps_high
    high = ratio > cap
    return ObjectiveValue(ratio.detach().clamp(max=cap) * advantage * t.logp_N, torch.zeros_like(high), high)


def _score_objective(ratio: Tensor, advantage: Tensor, t: TrainedTokens, scale: LossScale) -> ObjectiveValue:
    unbounded = torch.zeros_like(ratio, dtype=torch.bool)
    return ObjectiveValue(advantage * t.logp_N, unbounded, unbounded)


OBJECTIVES: dict[Objective, Callable[[Tensor, Tensor, TrainedTokens, LossScale], ObjectiveValue]] = {
    "clip": _clip_objective,
    "cispo": _cispo_objective,
    "score": _score_objective,
}


AGGREGATIONS: dict[Aggregation, Callable[[TrainedTokens, LossScale], Tensor]] = {
    "episode": lambda t, scale: (t.weight_R / t.count_R)[t.row_N] / scale.episodes,
    "batch": lambda t, scale: torch.full_like(t.logp_N, 1 / scale.tokens),
    "constant": lambda t, scale: torch.full_like(t.logp_N, 1 / (scale.constant * scale.episodes)),
    "sum": lambda t, scale: torch.full_like(t.logp_N, 1 / scale.episodes),
    "row": lambda t, scale: (1 / t.count_R)[t.row_N] / scale.episodes,
}

LOSSES: dict[Algorithm, LossFunction] = {
    **{name: partial(policy_gradient_loss, recipe=recipe) for name, recipe in RECIPES.items()},
    "sft": sft_loss,
}


def kl_divergence(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """``KL(p || q)`` per token, in nats, over ids in both vocabularies."""
    size = min(p_NV.shape[-1], q_NV.shape[-1])
    p_NV, q_NV = (torch.log_softmax(logits[:, :size], -1) for logits in (p_NV, q_NV))
    return (p_NV.exp() * (p_NV - q_NV)).sum(-1)


def compute_entropy(logits_NV: Tensor) -> Tensor:
    """Entropy per token, in nats."""
    logp_NV = torch.log_softmax(logits_NV, -1)
    return -(logp_NV.exp() * logp_NV).sum(-1)


def estimate_kl(logp: Tensor, ref: Tensor) -> Tensor:
    """Estimate ``KL(policy || reference)`` per sampled token: ``exp(-d) - 1 + d``, ``d = logp - ref``.

    Unbiased and nonnegative (Schulman 2020; gradient: arXiv 2506.09477).
    """
    d = _clamp_log_ratio(logp - ref)
    return torch.exp(-d) - 1 + d


def _add_terms(value: Tensor, share_N: Tensor, trained: TrainedTokens, scale: LossScale, **ratios: Tensor) -> Loss:
    kl_N = trained.initial_N if trained.ref_N is None else estimate_kl(trained.logp_N, trained.ref_N)
    teacher_N, entropy_N = trained.teacher_N, trained.entropy_N
    value_loss_N: Tensor | None = None
    value_cut_N: Tensor | None = None
    if teacher_N is not None:
        value = (1 - scale.teacher) * value + scale.teacher * (share_N * teacher_N).sum()
    if kl_N is not None:
        value = value + scale.beta * (share_N * kl_N).sum()
    if entropy_N is not None:
        value = value - scale.entropy * entropy_N.sum() / scale.tokens
    if trained.value_N is not None and trained.targets is not None:
        targets = trained.targets
        value_loss_N, value_cut_N = value_loss(trained.value_N, targets.before_N, targets.return_N, scale.value_clip)
        value = value + scale.value * (share_N * value_loss_N).sum()
    parts: dict[str, Tensor | None] = {
        **ratios,
        "kl_N": kl_N,
        "teacher_N": teacher_N,
        "entropy_N": entropy_N,
        "value_N": value_loss_N,
        "value_cut_N": value_cut_N,
    }
    return Loss(value, **{name: None if part is None else part.detach() for name, part in parts.items()})
