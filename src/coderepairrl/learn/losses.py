"""GSPO, GRPO, Dr. GRPO and supervised fine-tuning as plain functions on the trained tokens of a micro-batch.

Each returns its share of the whole batch's loss: denominators (`Scale`) are those of the batch, so gradients of
micro-batches add up to the gradient of the batch, whatever the split. An episode counts once, however many rows
its forks make: a row's weight is its share of the episode's trained tokens.

Shapes: R rows, N trained tokens. With ``r = exp(logp - old)`` per token, advantage ``A`` and
``clipped(r) = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)``, over E episodes, those of flat groups included:

- ``grpo``: ``-1/E sum_e 1/|y_e| sum_t clipped(r_t)`` (arXiv 2402.03300);
- ``dr_grpo``: ``-1/E sum_e 1/L sum_t clipped(r_t)`` with a constant L (arXiv 2503.20783);
- ``gspo``: ``-1/E sum_e sum_rows w_row clipped(s_row)`` with ``s_row = exp(mean_t (logp - old))`` (arXiv 2507.18071);
- ``sft``: ``-1/n sum_rows w_row sum_t logp_t``, cross-entropy, with n the trained tokens of the batch times the weights
  of their rows: there is no ratio, and no advantage.

With a correction (`truncated`), ``clipped`` is weighted by learner over engine: each token's, or for GSPO by their mean
over the row.

The KL term is ``beta`` times the k3 estimator ``exp(ref - logp) - (ref - logp) - 1``, averaged like the
tokens of that loss. It is not weighted by the ratio (TRL 1.16 does so unless ``use_bias_correction_kl=False``). For
``sft``, whose tokens the policy did not sample, the estimator would be biased: there the term is ``KL(ref || policy)``
over the whole vocabulary.

With a teacher of weight w, the loss is ``1 - w`` times that of the algorithm and w times the divergence from the
teacher over the whole vocabulary, averaged alike: for tokens that the policy sampled ``KL(policy || teacher)``, which
makes it sure of what the teacher would do in the places that it gets to itself (on-policy distillation, arXiv
2306.13649); for collected tokens ``KL(teacher || policy)``, as in ordinary distillation (arXiv 1503.02531). The whole
vocabulary is at hand, since the teacher is; the sampled tokens alone would give the same expectation with variance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coderepairrl.config.schema import Algorithm, Correction


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
    """`Truncated.weight_N`; None weights nothing."""
    initial_N: Tensor | None = None
    """``KL(initial weights || policy)`` of each token: the KL term of `sft`."""
    teacher_N: Tensor | None = None
    """Divergence from the teacher, if there is one."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What a loss needs beside the tokens: the clip range, and denominators of the whole batch.

    `tokens` is Dr. GRPO's constant, and for `sft` the batch's trained tokens times the weights of their rows; unused
    elsewhere. `teacher` is the weight of the divergence from it.
    """

    episodes: int
    eps_low: float
    eps_high: float
    beta: float = 0.0
    tokens: float = 1
    teacher: float = 0.0


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's share of the loss, and what it was made of, detached.

    `ratio` and the masks `low` and `high` (ratios that the clip holds back) are per token (N), or per row (R)
    for GSPO, None for `sft`. `kl_N` is that of the KL term per token, `teacher_N` the divergence from the teacher.
    """

    value: Tensor
    ratio: Tensor | None
    low: Tensor | None
    high: Tensor | None
    kl_N: Tensor | None
    teacher_N: Tensor | None


LossFunction = Callable[[Trained, Scale], Loss]


class Truncated(NamedTuple):
    """Importance weights per token, and of which tokens or rows they were cut."""

    weight_N: Tensor
    cut: Tensor


def truncated(
    old_N: Tensor, recorded_N: Tensor, row_N: Tensor, count_R: Tensor, kind: Correction, cap: float
) -> Truncated | None:
    """Truncated importance sampling for what the engine sampled with other logprobs than the learner has.

    With ``old`` recomputed by the learner, the ratio to it says nothing of ``recorded``, the engine's: what is sampled
    from one policy is averaged as if it were another's. ``min(exp(old - recorded), cap)`` per token mends that, and
    bounds its variance (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training"; TRL's
    ``token_truncate``). ``sequence`` has one weight per row, ``exp(mean(old - recorded))``: by its length, as in GSPO's
    own ratio (arXiv 2507.18071), so that the product of both is GSPO's ratio to the engine. TRL's ``sequence_truncate``
    takes the product over the tokens, which after thousands of them is near 0 or cut in most rows. "off" is None.
    """
    if kind == "off":
        return None
    difference_N = (old_N - recorded_N).detach()
    if kind == "token":
        weight_N = torch.exp(difference_N)
        return Truncated(weight_N.clamp(max=cap), weight_N > cap)
    weight_R = torch.exp(_means(difference_N, row_N, count_R))
    return Truncated(weight_R.clamp(max=cap)[row_N], weight_R > cap)


def grpo(trained: Trained, scale: Scale) -> Loss:
    """Token-level ratios, averaged over the tokens of an episode (arXiv 2402.03300)."""
    share_N = (trained.weight_R / trained.count_R)[trained.row_N]
    return _token_level(trained, scale, share_N)


def dr_grpo(trained: Trained, scale: Scale) -> Loss:
    """Token-level ratios, summed over a constant: no bias to length (arXiv 2503.20783)."""
    share_N = torch.full_like(trained.logp_N, 1 / scale.tokens)
    return _token_level(trained, scale, share_N)


def gspo(trained: Trained, scale: Scale) -> Loss:
    """One length-normalised ratio per row (arXiv 2507.18071)."""
    ratio_R = torch.exp(_means(trained.logp_N - trained.old_N, trained.row_N, trained.count_R))
    objective_R, low_R, high_R = _clipped(ratio_R, trained.advantage_R, scale)
    if trained.correction_N is not None:
        objective_R = objective_R * _means(trained.correction_N, trained.row_N, trained.count_R)
    value = -(trained.weight_R * objective_R).sum()
    share_N = (trained.weight_R / trained.count_R)[trained.row_N]
    return _loss(value, share_N, trained, scale, (ratio_R, low_R, high_R))


def sft(trained: Trained, scale: Scale) -> Loss:
    """Cross-entropy of what is to be imitated: every token counts alike, times the weight of its row."""
    share_N = trained.weight_R[trained.row_N] / scale.tokens
    return _loss(-(share_N * trained.logp_N).sum(), share_N, trained, scale)


LOSSES: dict[Algorithm, LossFunction] = {"gspo": gspo, "grpo": grpo, "dr_grpo": dr_grpo, "sft": sft}


def kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """``KL(p || q)`` of two models' logits per token, in nats, over the ids that both vocabularies have.

    Models with one tokenizer may pad their vocabularies to different sizes.
    """
    size = min(p_NV.shape[-1], q_NV.shape[-1])
    p_NV, q_NV = (torch.log_softmax(logits[:, :size], -1) for logits in (p_NV, q_NV))
    return (p_NV.exp() * (p_NV - q_NV)).sum(-1)


def _token_level(trained: Trained, scale: Scale, share_N: Tensor) -> Loss:
    ratio_N = torch.exp(trained.logp_N - trained.old_N)
    objective_N, low_N, high_N = _clipped(ratio_N, trained.advantage_R[trained.row_N], scale)
    if trained.correction_N is not None:
        objective_N = objective_N * trained.correction_N
    return _loss(-(share_N * objective_N).sum(), share_N, trained, scale, (ratio_N, low_N, high_N))


def _means(value_N: Tensor, row_N: Tensor, count_R: Tensor) -> Tensor:
    """Over the trained tokens of each row (R)."""
    return torch.zeros_like(count_R).index_add(0, row_N, value_N) / count_R


def _clipped(ratio: Tensor, advantage: Tensor, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's pessimistic objective, and where the clip is active below and above."""
    bounded = ratio.clamp(1 - scale.eps_low, 1 + scale.eps_high)
    low = (ratio < 1 - scale.eps_low) & (advantage < 0)
    high = (ratio > 1 + scale.eps_high) & (advantage > 0)
    return torch.minimum(ratio * advantage, bounded * advantage), low, high


def _kl(trained: Trained) -> Tensor | None:
    """The KL term per token: k3 of tokens that the policy sampled, else over the whole vocabulary."""
    if trained.ref_N is None:
        return trained.initial_N
    difference_N = trained.ref_N - trained.logp_N
    return torch.exp(difference_N) - difference_N - 1


def _loss(
    value: Tensor,
    share_N: Tensor,
    trained: Trained,
    scale: Scale,
    ratios: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None] = (None, None, None),
) -> Loss:
    """`value`, with the terms that all algorithms have in common: averages by `share_N`, the shares of tokens in it."""
    kl_N, teacher_N = _kl(trained), trained.teacher_N
    if teacher_N is not None:
        value = (1 - scale.teacher) * value + scale.teacher * (share_N * teacher_N).sum()
    if kl_N is not None:
        value = value + scale.beta * (share_N * kl_N).sum()
    detached = (None if each is None else each.detach() for each in (*ratios, kl_N, teacher_N))
    return Loss(value / scale.episodes, *detached)
