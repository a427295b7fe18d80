"""The losses as plain functions on the trained tokens of a micro-batch.

A policy-gradient loss is ``- sum_t share_t objective(ratio_t, A)``, and an algorithm a choice of three parts and a
baseline (`algorithms.RECIPES`). Shapes: R rows, N trained tokens; ``sg`` stops the gradient.

Ratio of the policy to the one before, ``d_t = logp_t - old_t``, whose logarithm is cut at `LOG_RATIO_LIMIT`:

- ``token``: ``exp(d_t)``;
- ``row``: ``exp(mean_t d_t)``, one of a whole row (GSPO, arXiv 2507.18071);
- ``product``: ``exp(sum_t d_t)``, that of the probabilities of a whole row.

Objective of a ratio ``r`` and an advantage ``A``:

- ``clip``: ``min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A)`` (PPO, arXiv 1707.06347; without delta,
  ``min(r, delta)`` is ``r``);
- ``cispo``: ``sg(min(r, 1 + eps_high)) A logp``: cut, a ratio still has a gradient (MiniMax-M1, arXiv 2506.13585);
- ``score``: ``A logp``, of which the gradient is REINFORCE's (Williams 1992).

Share of a token, over E episodes, those of flat groups included. An episode counts once, however many rows its forks
make: a row's weight ``w`` is its part of the episode's trained tokens, and ``|row|`` the number of its own.

- ``episode``: ``w / |row| / E``: the mean over an episode's tokens;
- ``batch``: ``1 / tokens``: the mean over all tokens of the batch;
- ``constant``: ``1 / L / E`` with a constant L (Dr. GRPO, arXiv 2503.20783);
- ``sum``: ``1 / E``: the sum over an episode's tokens;
- ``row``: ``1 / |row| / E``: the sum over an episode's rows.

All denominators (`Scale`) are those of the whole batch, so that gradients of micro-batches add up to the gradient of
the batch, whatever the split. With a correction (`correct`) each token's objective is weighted by learner over engine.

``sft`` is ``-1/n sum_rows w_row sum_t logp_t``, cross-entropy, with n the trained tokens of the batch times the weights
of their rows: there is no ratio, and no advantage.

The KL term is ``beta`` times an estimator (`k3`), averaged like the tokens of that loss. It is not weighted by the
ratio (TRL 1.16 does so unless ``use_bias_correction_kl=False``). The bonus is ``entropy`` times the mean entropy of the
batch's tokens. For ``sft``, whose tokens the policy did not sample, the estimator would be biased: there the term is
``KL(ref || policy)`` over the whole vocabulary.

With a value head each token has an advantage of its own, and the loss `values.value_loss` times its weight, averaged
like the tokens of that loss.

With a teacher of weight w, the loss is ``1 - w`` times that of the algorithm and w times the divergence from the
teacher over the whole vocabulary, averaged alike: for tokens that the policy sampled ``KL(policy || teacher)``, which
makes it sure of what the teacher would do in the places that it gets to itself (on-policy distillation, arXiv
2306.13649); for collected tokens ``KL(teacher || policy)``, as in ordinary distillation (arXiv 1503.02531). The whole
vocabulary is at hand, since the teacher is; the sampled tokens alone would give the same expectation with variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from coderepairrl.config.sections.train import Algorithm
from coderepairrl.learn.algorithms import RECIPES, Aggregation, Objective, Ratio, Recipe
from coderepairrl.learn.values import Targets, value_loss

CORRECTION_CAP = 2.0
"""Largest weight of a token in the correction, the one of Yao et al. 2025."""
LOG_RATIO_LIMIT = 20.0
"""Largest difference in nats of two policies' logprobs in a loss, as in verl; a ratio beyond has no gradient."""


class Correction(NamedTuple):
    """Weights of trained tokens for the difference between learner and engine, and which of them were cut."""

    weight_N: Tensor
    cut_N: Tensor


def correct(old_N: Tensor, recorded_N: Tensor) -> Correction:
    """Truncated importance weights, ``min(exp(old - recorded), CORRECTION_CAP)`` per token.

    Three policies are told apart: the *behaviour* policy, whose logprobs the engine recorded with each token; the
    *proximal* one, the learner's weights before the batch (``old``), which the clip keeps an update near; and the one
    that is being trained. Where ``old`` was recomputed by the learner, the ratio to it says nothing of ``recorded``:
    what is sampled from one policy is averaged as if it were another's. The weights mend that, and the cap bounds their
    variance (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training"; TRL's
    ``token_truncate``). With them, the clipped loss is the decoupled one of PPO (arXiv 2110.00641, and for asynchronous
    training of language models arXiv 2505.24298).
    """
    weight_N = torch.exp((old_N - recorded_N).detach())
    return Correction(weight_N.clamp(max=CORRECTION_CAP), weight_N > CORRECTION_CAP)


def row_means(value_N: Tensor, row_N: Tensor, count_R: Tensor) -> Tensor:
    """Over the trained tokens of each row (R)."""
    return torch.zeros_like(count_R).index_add(0, row_N, value_N) / count_R


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained tokens of a micro-batch. `old_N` and `ref_N` carry no gradient; `ref_N` is None without KL."""

    logp_N: Tensor
    old_N: Tensor
    ref_N: Tensor | None
    row_N: Tensor
    advantage_R: Tensor
    weight_R: Tensor
    count_R: Tensor
    correction_N: Tensor | None = None
    """`Correction.weight_N`; None weights nothing."""
    initial_N: Tensor | None = None
    """``KL(initial weights || policy)`` of each token: the KL term of `sft`."""
    teacher_N: Tensor | None = None
    """Divergence from the teacher, if there is one."""
    entropy_N: Tensor | None = None
    """Entropy of the policy over the vocabulary, where there is a bonus for it."""
    value_N: Tensor | None = None
    """Of the value head, where there is one; then there are `targets`."""
    targets: Targets | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """What a loss needs beside the tokens: bounds, weights of its terms, and denominators of the whole batch."""

    episodes: int
    eps_low: float
    eps_high: float
    beta: float = 0.0
    tokens: float = 1
    """Trained tokens of the batch, those of flat groups included; for `sft` times the weights of their rows."""
    constant: float = 1
    """L of the aggregation ``constant``."""
    teacher: float = 0.0
    """Weight of the divergence from it."""
    delta: float = math.inf
    entropy: float = 0.0
    """Weight of the bonus."""
    value: float = 0.0
    """Weight of the value loss."""
    value_clip: float = math.inf


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's share of the loss, and what it was made of, detached.

    `ratio` and the masks `low` and `high` (where the objective's bound acts) are per token (N), or per row (R) where
    the ratio is, None for `sft`. `kl_N` is that of the KL term per token, `teacher_N` the divergence from the teacher,
    `entropy_N` the entropy over the vocabulary, where there is a bonus for it. `value_N` is the value loss per token,
    and `value_cut_N` where its clip acts, with a value head. `limited` is where the log ratio exceeds
    `LOG_RATIO_LIMIT`, shaped as `ratio`.
    """

    value: Tensor
    ratio: Tensor | None
    low: Tensor | None
    high: Tensor | None
    kl_N: Tensor | None
    teacher_N: Tensor | None
    entropy_N: Tensor | None
    value_N: Tensor | None = None
    value_cut_N: Tensor | None = None
    limited: Tensor | None = None


LossFunction = Callable[[Trained, Scale], Loss]


class Gain(NamedTuple):
    """The value of an objective, and where its bound acts below and above."""

    value: Tensor
    low: Tensor
    high: Tensor


def policy_gradient(trained: Trained, scale: Scale, recipe: Recipe) -> Loss:
    """The loss of a recipe."""
    log_ratio = LOG_RATIOS[recipe.ratio](trained)
    ratio = _limited(log_ratio).exp()
    whole = recipe.ratio in ("row", "product")
    if trained.targets is not None:
        advantage = trained.targets.advantage_N
    else:
        advantage = trained.advantage_R if whole else trained.advantage_R[trained.row_N]
    gain, low, high = OBJECTIVES[recipe.objective](ratio, advantage, trained, scale)
    gain_N = gain.index_select(0, trained.row_N) if whole else gain  # its backward pass adds in one order
    if trained.correction_N is not None:
        gain_N = gain_N * trained.correction_N
    share_N = AGGREGATIONS[recipe.aggregation](trained, scale)
    loss = _loss(-(share_N * gain_N).sum(), share_N, trained, scale, (ratio, low, high))
    return replace(loss, limited=log_ratio.detach().abs() > LOG_RATIO_LIMIT)


def sft(trained: Trained, scale: Scale) -> Loss:
    """Cross-entropy of what is to be imitated: every token counts alike, times the weight of its row."""
    share_N = trained.weight_R[trained.row_N] / scale.tokens
    return _loss(-(share_N * trained.logp_N).sum(), share_N, trained, scale)


def _limited(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _token(t: Trained) -> Tensor:
    return t.logp_N - t.old_N


def _row(t: Trained) -> Tensor:
    return row_means(t.logp_N - t.old_N, t.row_N, t.count_R)


def _product(t: Trained) -> Tensor:
    return t.count_R * row_means(t.logp_N - t.old_N, t.row_N, t.count_R)


LOG_RATIOS: dict[Ratio, Callable[[Trained], Tensor]] = {
    "token": _token,
    "row": _row,
    "product": _product,
}


def _clip(ratio: Tensor, advantage: Tensor, t: Trained, scale: Scale) -> Gain:
    bounded = ratio.clamp(1 - scale.eps_low, 1 + scale.eps_high)
    value = torch.minimum(ratio.clamp(max=scale.delta) * advantage, bounded * advantage)
    low = (ratio < 1 - scale.eps_low) & (advantage < 0)
    high = (ratio > 1 + scale.eps_high) & (advantage > 0) | (ratio > scale.delta) & (advantage < 0)
    return Gain(value, low, high)


def _cispo(ratio: Tensor, advantage: Tensor, t: Trained, scale: Scale) -> Gain:
    cap = 1 + scale.eps_high
    high = ratio > cap
    return Gain(ratio.detach().clamp(max=cap) * advantage * t.logp_N, torch.zeros_like(high), high)


def _score(ratio: Tensor, advantage: Tensor, t: Trained, scale: Scale) -> Gain:
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return Gain(advantage * t.logp_N, nowhere, nowhere)


OBJECTIVES: dict[Objective, Callable[[Tensor, Tensor, Trained, Scale], Gain]] = {
    "clip": _clip,
    "cispo": _cispo,
    "score": _score,
}


AGGREGATIONS: dict[Aggregation, Callable[[Trained, Scale], Tensor]] = {
    "episode": lambda t, scale: (t.weight_R / t.count_R)[t.row_N] / scale.episodes,
    "batch": lambda t, scale: torch.full_like(t.logp_N, 1 / scale.tokens),
    "constant": lambda t, scale: torch.full_like(t.logp_N, 1 / (scale.constant * scale.episodes)),
    "sum": lambda t, scale: torch.full_like(t.logp_N, 1 / scale.episodes),
    "row": lambda t, scale: (1 / t.count_R)[t.row_N] / scale.episodes,
}

LOSSES: dict[Algorithm, LossFunction] = {
    **{name: partial(policy_gradient, recipe=recipe) for name, recipe in RECIPES.items()},
    "sft": sft,
}


def kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """``KL(p || q)`` of two models' logits per token, in nats, over the ids that both vocabularies have.

    Models with one tokenizer may pad their vocabularies to different sizes.
    """
    size = min(p_NV.shape[-1], q_NV.shape[-1])
    p_NV, q_NV = (torch.log_softmax(logits[:, :size], -1) for logits in (p_NV, q_NV))
    return (p_NV.exp() * (p_NV - q_NV)).sum(-1)


def entropy(logits_NV: Tensor) -> Tensor:
    """Of the distribution over the vocabulary per token, in nats."""
    logp_NV = torch.log_softmax(logits_NV, -1)
    return -(logp_NV.exp() * logp_NV).sum(-1)


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """Estimate ``KL(policy || reference)`` per token that the policy sampled: ``exp(-d) - 1 + d`` with ``d = logp -
    ref``.

    It is unbiased and never below 0; its gradient is on average that of ``KL(reference || policy)`` (Schulman 2020,
    "Approximating KL divergence"; on the gradient arXiv 2506.09477).
    """
    d = _limited(logp - ref)
    return torch.exp(-d) - 1 + d


def _kl(trained: Trained, scale: Scale) -> Tensor | None:
    """The KL term per token: an estimate for tokens that the policy sampled, else over the whole vocabulary."""
    if trained.ref_N is None:
        return trained.initial_N
    return k3(trained.logp_N, trained.ref_N)


def _loss(
    value: Tensor,
    share_N: Tensor,
    trained: Trained,
    scale: Scale,
    ratios: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None] = (None, None, None),
) -> Loss:
    """`value`, with the terms that all algorithms have in common: sums by `share_N`, the shares of tokens in it."""
    kl_N, teacher_N, entropy_N = _kl(trained, scale), trained.teacher_N, trained.entropy_N
    if teacher_N is not None:
        value = (1 - scale.teacher) * value + scale.teacher * (share_N * teacher_N).sum()
    if kl_N is not None:
        value = value + scale.beta * (share_N * kl_N).sum()
    if entropy_N is not None:
        value = value - scale.entropy * entropy_N.sum() / scale.tokens
    of_values: tuple[Tensor | None, Tensor | None] = None, None
    if trained.value_N is not None and trained.targets is not None:
        loss_N, cut_N = value_loss(
            trained.value_N, trained.targets.before_N, trained.targets.return_N, scale.value_clip
        )
        value, of_values = value + scale.value * (share_N * loss_N).sum(), (loss_N, cut_N)
    detached = (None if each is None else each.detach() for each in (*ratios, kl_N, teacher_N, entropy_N, *of_values))
    return Loss(value, *detached)
