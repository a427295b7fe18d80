"""Metrics of a training step."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from coderepairrl.learn.losses import Correction, Loss
from coderepairrl.learn.pack import MicroBatch, distinct
from coderepairrl.types import Sample

_LARGEST = 40.0
"""Log ratio in nats; larger ones could not be squared."""


class Totals(NamedTuple):
    """Sums and extremes over micro-batches and processes."""

    micro_batches: int = 0
    computed: int = 0
    surprise: float = 0.0
    scored: int = 0
    oldest: int = sys.maxsize
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    current: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    low: float = 0.0
    high: float = 0.0
    limited: int = 0
    ratios: int = 0
    kl: float = 0.0
    kls: int = 0
    right: float = 0.0
    judged: int = 0
    teacher: float = 0.0
    teachers: int = 0
    spread: float = 0.0
    spreads: int = 0
    weight: float = 0.0
    weights: int = 0
    cut: float = 0.0
    apart: float = 0.0
    apart_squared: float = 0.0
    divergence: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    behind: int = 0
    value: float = 0.0
    value_cut: float = 0.0
    values: int = 0

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]
        how = {"oldest": min, "mismatch_max": max, "ratio_max": max, "lowest": min, "highest": max}
        pairs = zip(self._fields, self, other, strict=True)
        values: dict[str, Any] = {name: how[name](a, b) if name in how else a + b for name, a, b in pairs}
        return Totals(**values)


class Metrics:
    """Metrics over the micro-batches and updates of one step.

    - ``loss``, ``grad_norm`` (before clipping), ``lr``: mean, mean and last over updates.
    - ``ratio_mean``, ``ratio_max``, ``clip_low``, ``clip_high``: importance ratios per token or row; clipped fractions.
    - ``log_ratio_limited``: ratios cut at ``exp(20)`` or ``exp(-20)``.
    - ``kl``, ``entropy_exact``, ``teacher_kl``: means per trained token, with that term.
    - ``accuracy``: share of likeliest tokens; with `sft` or a teacher.
    - ``entropy`` (``nll`` for `sft`): minus the mean logprob of trained tokens before the update; of the first
      minibatch with recorded old logprobs. So are the next four rows.
    - ``mismatch_max``, ``mismatch_mean``: absolute difference from the engine's logprobs, tokens of these weights only.
    - ``behaviour_ratio_min``, ``behaviour_ratio_max``: learner over engine per token, uncorrected.
    - ``behaviour_kl``: k3 estimate of the engine's divergence from the learner, nats a token.
    - ``ess``: effective sample size of these ratios, ``(sum w)^2 / (n sum w^2)``: 1 on policy.
    - ``mismatch_weight``, ``mismatch_cut``: mean weight in the correction (`losses.correct`), and share cut.
    - ``staleness_max``, ``staleness_mean``: versions behind, of trained tokens.
    - ``tokens`` (trained), ``row_tokens``, ``rows``, ``episodes`` (with rows), ``micro_batches``: counts.
    - ``distinct_tokens``, ``computed_tokens``, ``repetition``: see docs/reference/metrics.md.
    - ``value_loss`` (unweighted), ``value_cut`` (share clipped), ``explained_variance`` (`values.explained_variance`).
    - ``skipped``, ``skipped_reason``: skipped updates; non-finite metrics are then absent.
    - ``denominator``: episodes that the loss is averaged over; absent for `sft`.
    """

    def __init__(self, samples: Sequence[Sample], episodes: int, version: int) -> None:
        self._version = version
        self._counts = {
            "tokens": sum(sum(sample.trained) for sample in samples),
            "row_tokens": sum(len(sample.ids) for sample in samples),
            "distinct_tokens": 0,
            "rows": len(samples),
            "episodes": len({sample.episode_id for sample in samples}),
        }
        self._episodes = episodes
        self._seen: list[Totals] = []
        self._norms: list[float] = []
        self._rate = 0.0
        self._skipped: dict[str, Any] = {}
        self.explained: float | None = None

    def minibatch(self, samples: Sequence[Sample]) -> None:
        """Count a minibatch's rows."""
        self._counts["distinct_tokens"] += distinct([sample.ids for sample in samples])

    def packed(self, batch: MicroBatch, *, idle: bool = False) -> None:
        """Count a micro-batch, trained or `idle`."""
        tokens = len(batch.ids_T)
        self._seen.append(
            Totals(computed=tokens)
            if idle
            else Totals(micro_batches=1, computed=tokens, oldest=int(batch.version_N.min()))
        )

    def before(self, batch: MicroBatch, logp_N: Tensor) -> None:
        """Record logprobs before the first update."""
        difference_N = logp_N - batch.recorded_N
        current_N = difference_N.abs()[batch.version_N == self._version]
        log_ratio_N = difference_N.double().clamp(-_LARGEST, _LARGEST)
        ratio_N = log_ratio_N.exp()
        self._seen.append(
            Totals(
                surprise=-logp_N.sum().item(),
                scored=len(logp_N),
                mismatch=current_N.sum().item(),
                mismatch_max=current_N.max().item() if len(current_N) else 0.0,
                current=len(current_N),
                apart=ratio_N.sum().item(),
                apart_squared=ratio_N.square().sum().item(),
                divergence=(ratio_N - log_ratio_N - 1).sum().item(),
                lowest=log_ratio_N.min().item(),
                highest=log_ratio_N.max().item(),
                behind=int((self._version - batch.version_N).sum()),
            )
        )

    def add(self, loss: Loss, correction: Correction | None, right_N: Tensor) -> None:
        """Record a micro-batch of an update; `right_N` may be empty."""
        if correction is not None:
            weight_N, cut_N = correction
            self._seen.append(Totals(weight=weight_N.sum().item(), weights=len(weight_N), cut=cut_N.sum().item()))
        if loss.ratio is not None and loss.low is not None and loss.high is not None:
            self._seen.append(
                Totals(
                    ratio=loss.ratio.sum().item(),
                    ratio_max=loss.ratio.max().item(),
                    low=loss.low.sum().item(),
                    high=loss.high.sum().item(),
                    limited=0 if loss.limited is None else int(loss.limited.sum()),
                    ratios=loss.ratio.numel(),
                )
            )
        self._seen.append(
            Totals(
                loss=loss.value.item(),
                right=right_N.sum().item(),
                judged=right_N.numel(),
                kl=0.0 if loss.kl_N is None else loss.kl_N.sum().item(),
                kls=0 if loss.kl_N is None else loss.kl_N.numel(),
                teacher=0.0 if loss.teacher_N is None else loss.teacher_N.sum().item(),
                teachers=0 if loss.teacher_N is None else loss.teacher_N.numel(),
                spread=0.0 if loss.entropy_N is None else loss.entropy_N.sum().item(),
                spreads=0 if loss.entropy_N is None else loss.entropy_N.numel(),
                value=0.0 if loss.value_N is None else loss.value_N.sum().item(),
                value_cut=0.0 if loss.value_cut_N is None else loss.value_cut_N.sum().item(),
                values=0 if loss.value_N is None else loss.value_N.numel(),
            )
        )

    def update(self, norm: float, rate: float) -> None:
        """Record an optimiser update."""
        self._norms.append(norm)
        self._rate = rate

    def skip(self, updates: int, reason: str) -> None:
        """Record skipped updates."""
        self._skipped = {"skipped": updates, "skipped_reason": reason}

    def totals(self) -> Totals:
        """Totals of this process."""
        return sum(self._seen, Totals())

    def summary(self, everyone: Sequence[Totals]) -> dict[str, Any]:
        """Metrics over all processes."""
        total = sum(everyone, Totals())
        result: dict[str, float] = {"micro_batches": total.micro_batches, **self._counts}
        result |= {
            "computed_tokens": total.computed,
            "repetition": total.computed / self._counts["distinct_tokens"],
        }
        if total.ratios:
            result |= {
                "ratio_mean": total.ratio / total.ratios,
                "ratio_max": total.ratio_max,
                "clip_low": total.low / total.ratios,
                "clip_high": total.high / total.ratios,
                "log_ratio_limited": total.limited,
                "entropy": total.surprise / total.scored,
                "staleness_max": self._version - min(self._version, total.oldest),
                "staleness_mean": total.behind / total.scored,
                "behaviour_ratio_min": math.exp(total.lowest),
                "behaviour_ratio_max": math.exp(total.highest),
                "behaviour_kl": total.divergence / total.scored,
                "ess": total.apart**2 / (total.scored * total.apart_squared),
                "denominator": self._episodes,
            }
        else:
            result["nll"] = total.surprise / total.scored
        if total.judged:
            result["accuracy"] = total.right / total.judged
        if total.teachers:
            result["teacher_kl"] = total.teacher / total.teachers
        if total.spreads:
            result["entropy_exact"] = total.spread / total.spreads
        if total.values:
            result |= {"value_loss": total.value / total.values, "value_cut": total.value_cut / total.values}
        if self.explained is not None:
            result["explained_variance"] = self.explained
        if total.kls:
            result["kl"] = total.kl / total.kls
        if total.current:
            result["mismatch_max"] = total.mismatch_max
            result["mismatch_mean"] = total.mismatch / total.current
        if total.weights:
            result |= {
                "mismatch_weight": total.weight / total.weights,
                "mismatch_cut": total.cut / total.weights,
            }
        if updates := len(self._norms):
            result |= {"loss": total.loss / updates, "grad_norm": sum(self._norms) / updates, "lr": self._rate}
        elif not total.ratios and not self._skipped:  # measured, not trained
            result["loss"] = total.loss
        if self._skipped:  # JSON has no NaN or infinity
            result = {name: value for name, value in result.items() if math.isfinite(value)}
        return result | self._skipped
