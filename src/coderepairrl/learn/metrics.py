"""Metrics of a training step."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from coderepairrl.learn.losses import Correction, Loss
from coderepairrl.learn.pack import MicroBatch, count_distinct_tokens, count_trained_tokens
from coderepairrl.types import Sample

_LOG_RATIO_LIMIT = 40.0
"""Nats; keeps sums of squared ratios finite."""
Totals = dict[str, float]
"""Sums and `EXTREMES` over micro-batches and processes, by name."""
EXTREMES: dict[str, tuple[Callable[[float, float], float], float]] = {
    "oldest": (min, sys.maxsize),
    "mismatch_max": (max, 0.0),
    "ratio_max": (max, 0.0),
    "lowest": (min, math.inf),
    "highest": (max, -math.inf),
}
"""Function and initial value of totals that are not sums."""


def add_totals(parts: Iterable[Totals] = ()) -> Totals:
    """Add up `parts`."""
    totals: Totals = defaultdict(int, {name: initial for name, (_, initial) in EXTREMES.items()})
    for part in parts:
        for name, value in part.items():
            totals[name] = EXTREMES[name][0](totals[name], value) if name in EXTREMES else totals[name] + value
    return totals


class Metrics:
    """Metrics over the micro-batches and updates of one step.

    - ``loss``, ``grad_norm`` (before clipping), ``lr``: mean, mean and last over updates.
    - ``ratio_mean``, ``ratio_max``, ``clip_low``, ``clip_high``: importance ratios per token or row; clipped fractions.
    - ``log_ratio_limited``: ratios cut at ``exp(20)``, ``exp(-20)``.
    - ``kl``, ``entropy_exact``, ``teacher_kl``: means per trained token, if computed.
    - ``accuracy``: share of tokens that were likeliest; with `sft` or a teacher.
    - ``entropy`` (``nll`` for `sft`): minus the mean logprob of trained tokens before the update. With recorded
      old logprobs, it and the next four entries are of the first minibatch.
    - ``mismatch_max``, ``mismatch_mean``: absolute difference from the engine's logprobs, tokens of these weights only.
    - ``behaviour_ratio_min``, ``behaviour_ratio_max``: learner over engine per token, uncorrected.
    - ``behaviour_kl``: k3 estimate of the engine's divergence from the learner, nats a token.
    - ``ess``: effective sample size of these ratios, ``(sum w)^2 / (n sum w^2)``: 1 on policy.
    - ``mismatch_weight``, ``mismatch_cut``: mean weight in the correction (`losses.correct_mismatch`), and share cut.
    - ``staleness_max``, ``staleness_mean``: versions behind, of trained tokens.
    - Counts, and ``repetition``: see docs/reference/metrics.md.
    - ``value_loss`` (unweighted), ``value_cut`` (share clipped), ``explained_variance`` (`values.explained_variance`).
    - ``skipped``, ``skipped_reason``: skipped updates; non-finite metrics are then absent.
    """

    def __init__(self, samples: Sequence[Sample], episodes: int, version: int) -> None:
        self._version = version
        self._counts = {
            "tokens": count_trained_tokens(samples),
            "row_tokens": sum(len(sample.ids) for sample in samples),
            "distinct_tokens": 0,
            "rows": len(samples),
            "episodes": len({sample.episode_id for sample in samples}),
        }
        self._episodes = episodes
        self.totals = add_totals()
        """Totals of this process."""
        self._norms: list[float] = []
        self._rate = self._loss = 0.0
        self._skipped: dict[str, Any] = {}
        self.explained_variance: float | None = None

    def count_minibatch(self, samples: Sequence[Sample]) -> None:
        """Count a minibatch's rows."""
        self._counts["distinct_tokens"] += count_distinct_tokens([sample.ids for sample in samples])

    def count_micro_batch(self, batch: MicroBatch, *, idle: bool = False) -> None:
        """Count a micro-batch, trained or `idle`."""
        self._add(computed=len(batch.ids_T))
        if not idle:
            self._add(micro_batches=1, oldest=int(batch.version_N.min()))

    def record_logprobs(self, batch: MicroBatch, logp_N: Tensor) -> None:
        """Record logprobs before the first update."""
        difference_N = logp_N - batch.recorded_N
        current_N = difference_N.abs()[batch.version_N == self._version]
        log_ratio_N = difference_N.double().clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        ratio_N = log_ratio_N.exp()
        self._add(
            surprise=-logp_N.sum().item(),
            scored=len(logp_N),
            mismatch=current_N.sum().item(),
            mismatch_max=current_N.max().item() if len(current_N) else 0.0,
            current=len(current_N),
            behaviour=ratio_N.sum().item(),
            behaviour_squared=ratio_N.square().sum().item(),
            divergence=(ratio_N - log_ratio_N - 1).sum().item(),
            lowest=log_ratio_N.min().item(),
            highest=log_ratio_N.max().item(),
            behind=int((self._version - batch.version_N).sum()),
        )

    def record_loss(self, loss: Loss, correction: Correction | None, likeliest_N: Tensor | None) -> None:
        """Record a micro-batch of an update."""
        self._add(loss=loss.value.item())
        parts: dict[str, Tensor | None] = {
            "ratio": loss.ratio,
            "low": loss.low,
            "high": loss.high,
            "limited": loss.limited,
            "kl": loss.kl_N,
            "teacher": loss.teacher_N,
            "entropy": loss.entropy_N,
            "value": loss.value_N,
            "value_cut": loss.value_cut_N,
            "likeliest": likeliest_N,
        }
        if correction is not None:
            parts |= {"weight": correction.weight_N, "cut": correction.cut_N}
        for name, part in parts.items():
            if part is not None:
                self._add(**{name: part.sum().item(), f"{name}_count": part.numel()})
        if loss.ratio is not None:
            self._add(ratio_max=loss.ratio.max().item())

    def record_update(self, norm: float, rate: float) -> None:
        """Record an optimiser update."""
        self._norms.append(norm)
        self._rate = rate
        self._loss = self.totals["loss"]

    def record_skip(self, updates: int, reason: str) -> None:
        """Record skipped updates: the loss of the first does not count."""
        self.totals["loss"] = self._loss
        self._skipped = {"skipped": updates, "skipped_reason": reason}

    def _add(self, **values: float) -> None:
        self.totals = add_totals([self.totals, values])

    def summarise(self, processes: Sequence[Totals]) -> dict[str, Any]:
        """Metrics of all `processes`."""
        total = add_totals(processes)
        result: dict[str, float] = {"micro_batches": total["micro_batches"], **self._counts}
        result |= {
            "computed_tokens": total["computed"],
            "repetition": total["computed"] / self._counts["distinct_tokens"],
        }
        scored = total["scored"]
        if total["ratio_count"]:
            result |= {
                "ratio_mean": total["ratio"] / total["ratio_count"],
                "ratio_max": total["ratio_max"],
                "clip_low": total["low"] / total["ratio_count"],
                "clip_high": total["high"] / total["ratio_count"],
                "log_ratio_limited": total["limited"],
                "entropy": total["surprise"] / scored,
                "staleness_max": self._version - min(self._version, total["oldest"]),
                "staleness_mean": total["behind"] / scored,
                "behaviour_ratio_min": math.exp(total["lowest"]),
                "behaviour_ratio_max": math.exp(total["highest"]),
                "behaviour_kl": total["divergence"] / scored,
                "ess": total["behaviour"] ** 2 / (scored * total["behaviour_squared"]),
                "denominator": self._episodes,
            }
        else:
            result["nll"] = total["surprise"] / scored

        def add_mean(metric: str, name: str) -> None:
            if count := total[f"{name}_count"]:
                result[metric] = total[name] / count

        add_mean("accuracy", "likeliest")
        add_mean("teacher_kl", "teacher")
        add_mean("entropy_exact", "entropy")
        add_mean("value_loss", "value")
        add_mean("value_cut", "value_cut")
        if self.explained_variance is not None:
            result["explained_variance"] = self.explained_variance
        add_mean("kl", "kl")
        if total["current"]:
            result["mismatch_max"] = total["mismatch_max"]
            result["mismatch_mean"] = total["mismatch"] / total["current"]
        add_mean("mismatch_weight", "weight")
        add_mean("mismatch_cut", "cut")
        if updates := len(self._norms):
            result |= {"loss": total["loss"] / updates, "grad_norm": sum(self._norms) / updates, "lr": self._rate}
        elif not total["ratio_count"] and not self._skipped:  # measured, not trained
            result["loss"] = total["loss"]
        if self._skipped:  # JSON has no NaN or infinity
            result = {name: value for name, value in result.items() if math.isfinite(value)}
        return result | self._skipped
