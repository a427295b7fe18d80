"""The metrics of a training step."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from coderepairrl.learn.losses import Loss, Truncated
from coderepairrl.learn.pack import MicroBatch
from coderepairrl.types import Sample


class Totals(NamedTuple):
    """Sums and extremes over micro-batches; adding combines those of several processes."""

    micro_batches: int = 0
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
    ratios: int = 0
    kl: float = 0.0
    kls: int = 0
    right: float = 0.0
    judged: int = 0
    teacher: float = 0.0
    teachers: int = 0
    weight: float = 0.0
    weights: int = 0
    cut: float = 0.0
    cuts: int = 0

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]
        how = {"oldest": min, "mismatch_max": max, "ratio_max": max}
        pairs = zip(self._fields, self, other, strict=True)
        values: dict[str, Any] = {name: how[name](a, b) if name in how else a + b for name, a, b in pairs}
        return Totals(**values)


class Metrics:
    """Gathered over the micro-batches and updates of one step.

    - ``loss``, ``grad_norm`` (before clipping), ``lr``: mean, mean and last over updates.
    - ``ratio_mean``, ``ratio_max``, ``clip_low``, ``clip_high``: of importance ratios, per token or per row as the
      algorithm has it; the clip fractions are of those whose gradient the clip cut off.
    - ``kl``: mean of the KL term per trained token, present with one: the k3 estimate, for `sft` over the vocabulary.
    - ``teacher_kl``: mean divergence from the teacher per trained token; absent without one.
    - ``accuracy``: share of the trained tokens that are the likeliest; of `sft`, and with a teacher.
    - ``entropy``: minus the mean logprob of the trained tokens before the update, an unbiased estimate on policy. Of
      several minibatches, with recorded old logprobs, that of the first. For `sft` it is called ``nll``: there it is
      the cross-entropy, without further terms.
    - ``mismatch_max``, ``mismatch_mean``: absolute difference between the engine's logprobs and ours, over tokens
      that these very weights sampled; absent when there is none. Of minibatches as `entropy` is.
    - ``mismatch_weight``, ``mismatch_cut``: mean weight of a token in the correction (`losses.truncated`), and the
      share of tokens or rows whose weight was cut; absent without one.
    - ``staleness_max``: how many versions behind the oldest trained token is.
    - ``tokens``, ``row_tokens``, ``rows``, ``episodes``, ``micro_batches``: counts; tokens are the trained ones,
      episodes those that have rows.
    - ``skipped``, ``skipped_reason``: how many updates were not made, for a gradient was not finite, and why;
      absent where all were made. What then is not finite, or of no update, is absent as well.
    - ``denominator``: episodes that the loss is averaged over, those without a row included; absent for `sft`.
    """

    def __init__(self, samples: Sequence[Sample], episodes: int, version: int) -> None:
        self._version = version
        self._counts = {
            "tokens": sum(sum(sample.trained) for sample in samples),
            "row_tokens": sum(len(sample.ids) for sample in samples),
            "rows": len(samples),
            "episodes": len({sample.episode_id for sample in samples}),
        }
        self._episodes = episodes
        self._seen: list[Totals] = []
        self._norms: list[float] = []
        self._rate = 0.0
        self._skipped: dict[str, Any] = {}

    def packed(self, batch: MicroBatch) -> None:
        """A micro-batch, before anything is done with it."""
        self._seen.append(Totals(micro_batches=1, oldest=int(batch.version_N.min())))

    def before(self, batch: MicroBatch, logp_N: Tensor) -> None:
        """Logprobs of a micro-batch before the first update."""
        current_N = (logp_N - batch.recorded_N).abs()[batch.version_N == self._version]
        self._seen.append(
            Totals(
                surprise=-logp_N.sum().item(),
                scored=len(logp_N),
                mismatch=current_N.sum().item(),
                mismatch_max=current_N.max().item() if len(current_N) else 0.0,
                current=len(current_N),
            )
        )

    def add(self, loss: Loss, correction: Truncated | None, right_N: Tensor) -> None:
        """One micro-batch of one update, after its backward pass; of no token of `right_N` where that was not asked."""
        if correction is not None:
            weight_N, cut = correction
            self._seen.append(
                Totals(weight=weight_N.sum().item(), weights=len(weight_N), cut=cut.sum().item(), cuts=len(cut))
            )
        if loss.ratio is not None and loss.low is not None and loss.high is not None:
            self._seen.append(
                Totals(
                    ratio=loss.ratio.sum().item(),
                    ratio_max=loss.ratio.max().item(),
                    low=loss.low.sum().item(),
                    high=loss.high.sum().item(),
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
            )
        )

    def update(self, norm: float, rate: float) -> None:
        """One optimiser update."""
        self._norms.append(norm)
        self._rate = rate

    def skip(self, updates: int, reason: str) -> None:
        """Note that `updates` updates will not be made."""
        self._skipped = {"skipped": updates, "skipped_reason": reason}

    def totals(self) -> Totals:
        """The totals of this process."""
        return sum(self._seen, Totals())

    def summary(self, everyone: Sequence[Totals]) -> dict[str, Any]:
        """The metrics over all processes: numbers, and the reason if a batch was skipped."""
        total = sum(everyone, Totals())
        result: dict[str, float] = {"micro_batches": total.micro_batches, **self._counts}
        if total.ratios:
            result |= {
                "ratio_mean": total.ratio / total.ratios,
                "ratio_max": total.ratio_max,
                "clip_low": total.low / total.ratios,
                "clip_high": total.high / total.ratios,
                "entropy": total.surprise / total.scored,
                "staleness_max": self._version - min(self._version, total.oldest),
                "denominator": self._episodes,
            }
        else:
            result["nll"] = total.surprise / total.scored
        if total.judged:
            result["accuracy"] = total.right / total.judged
        if total.teachers:
            result["teacher_kl"] = total.teacher / total.teachers
        if total.kls:
            result["kl"] = total.kl / total.kls
        if total.current:
            result["mismatch_max"] = total.mismatch_max
            result["mismatch_mean"] = total.mismatch / total.current
        if total.weights:
            result["mismatch_weight"] = total.weight / total.weights
            result["mismatch_cut"] = total.cut / total.cuts
        if updates := len(self._norms):
            result |= {"loss": total.loss / updates, "grad_norm": sum(self._norms) / updates, "lr": self._rate}
        elif not total.ratios and not self._skipped:  # measured, not trained
            result["loss"] = total.loss
        if self._skipped:  # JSON has no NaN or infinity
            result = {name: value for name, value in result.items() if math.isfinite(value)}
        return result | self._skipped
