"""What a training step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from coderepairrl.learn.losses import Loss
from coderepairrl.learn.pack import MicroBatch
from coderepairrl.types import Sample


class Metrics:
    """Gathered over the micro-batches and updates of one step.

    - ``loss``, ``grad_norm`` (before clipping), ``lr``: mean, mean and last over updates.
    - ``ratio_mean``, ``ratio_max``, ``clip_low``, ``clip_high``: of importance ratios, per token or per row as the
      algorithm has it; the clip fractions are of those whose gradient the clip cut off.
    - ``kl``: mean k3 estimate per trained token, present with a KL term.
    - ``entropy``: minus the mean logprob of the trained tokens before the update, an unbiased estimate on policy.
    - ``mismatch_max``, ``mismatch_mean``: absolute difference between the engine's logprobs and ours, over tokens
      that these very weights sampled; absent when there is none.
    - ``staleness_max``: how many versions behind the oldest trained token is.
    - ``tokens``, ``row_tokens``, ``rows``, ``episodes``, ``micro_batches``: counts; tokens are the trained ones.
    """

    def __init__(self, samples: Sequence[Sample], version: int) -> None:
        self._version = version
        self._counts = {
            "tokens": sum(sum(sample.trained) for sample in samples),
            "row_tokens": sum(len(sample.ids) for sample in samples),
            "rows": len(samples),
            "episodes": len({sample.episode_id for sample in samples}),
        }
        self._micro_batches = 0
        self._surprise = 0.0
        self._oldest = version
        self._differences: list[Tensor] = []
        self._losses: list[Loss] = []
        self._norms: list[float] = []
        self._rate = 0.0

    def before(self, batch: MicroBatch, logp_N: Tensor) -> None:
        """Logprobs of a micro-batch before the first update."""
        self._micro_batches += 1
        self._surprise -= logp_N.sum().item()
        self._oldest = min(self._oldest, int(batch.version_N.min()))
        self._differences.append((logp_N - batch.recorded_N).abs()[batch.version_N == self._version])

    def add(self, loss: Loss) -> None:
        """One micro-batch of one update, after its backward pass."""
        self._losses.append(replace(loss, value=loss.value.detach()))  # let the graph go

    def update(self, norm: float, rate: float) -> None:
        """One optimiser update."""
        self._norms.append(norm)
        self._rate = rate

    def summary(self) -> dict[str, float]:
        """All metrics as plain numbers."""
        losses, updates = self._losses, len(self._norms)
        ratios = sum(loss.ratio.numel() for loss in losses)
        kls = [loss.kl_N for loss in losses if loss.kl_N is not None]
        current = [difference for difference in self._differences if difference.numel()]
        result: dict[str, float] = {
            "loss": sum(loss.value.item() for loss in losses) / updates,
            "grad_norm": sum(self._norms) / updates,
            "lr": self._rate,
            "ratio_mean": sum(loss.ratio.sum().item() for loss in losses) / ratios,
            "ratio_max": max(loss.ratio.max().item() for loss in losses),
            "clip_low": sum(loss.low.sum().item() for loss in losses) / ratios,
            "clip_high": sum(loss.high.sum().item() for loss in losses) / ratios,
            "entropy": self._surprise / self._counts["tokens"],
            "staleness_max": self._version - self._oldest,
            "micro_batches": self._micro_batches,
            **self._counts,
        }
        if kls:
            result["kl"] = sum(kl_N.sum().item() for kl_N in kls) / sum(kl_N.numel() for kl_N in kls)
        if current:
            result["mismatch_max"] = max(difference.max().item() for difference in current)
            total = sum(difference.sum().item() for difference in current)
            result["mismatch_mean"] = total / sum(difference.numel() for difference in current)
        return result
