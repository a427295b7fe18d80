"""The learner's settings, checked before any process starts. Without torch."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from coderepairrl.config.schema import Algorithm, Correction, Learning
from coderepairrl.errors import ConfigError, PrerequisiteError

Form = Literal["model", "adapter"]
"""Form of the weights for an engine: a whole model, or adapters on the model it has."""

LOGITS = 1 << 26
"""Logits (tokens times vocabulary) in memory at a time: 256 MiB in float32."""
BUCKET = 1 << 26
"""Numbers that ZeRO reduces or gathers at a time: 256 MiB in float32."""
CLIP: dict[Algorithm, tuple[float, float]] = {
    "gspo": (2e-5, 4e-4),  # a length-normalised ratio hardly moves
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "sft": (0.0, 0.0),  # there is no ratio
}
"""Default ``(eps_low, eps_high)``: the ratios of the algorithms live on different scales."""
OF_SAMPLES = ("eps_low", "eps_high", "updates_per_batch", "minibatches", "old_logprobs", "mismatch_correction",
              "mismatch_cap")  # fmt: skip
"""Settings that mean something only for tokens that the policy sampled itself."""
CAP = 2.0
"""Default `LearnSettings.mismatch_cap`, the one of Yao et al. 2025 (`losses.truncated`)."""


class LearnSettings(Learning):
    """The settings of a run's section ``train``, and those of other sections that training depends on.

    >>> LearnSettings().clip, LearnSettings(algorithm="grpo", eps_high=0.28).clip
    ((2e-05, 0.0004), (0.2, 0.28))
    """

    mismatch_correction: Correction = "off"
    """With `recomputed` old logprobs: importance weights for the difference between learner and engine, per token, per
    row or off (`losses.truncated`)."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling: logprobs are those of ``softmax(logits / temperature)``."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Dr. GRPO's constant denominator per episode; None for other algorithms."""
    seed: int = 0
    """Of the adapters' initial weights. Nothing else in the learner is random (no dropout)."""

    @property
    def clip(self) -> tuple[float, float]:
        """``(eps_low, eps_high)`` with the algorithm's defaults filled in."""
        low, high = CLIP[self.algorithm]
        return (low if self.eps_low is None else self.eps_low, high if self.eps_high is None else self.eps_high)

    @property
    def updates(self) -> int:
        """Optimiser updates per batch, at most: a minibatch without rows has none."""
        return self.updates_per_batch * self.minibatches

    @property
    def cap(self) -> float:
        """`mismatch_cap` with its default filled in."""
        return CAP if self.mismatch_cap is None else self.mismatch_cap

    def rate(self, update: int) -> float:
        """The learning rate of an optimiser update, counted from 0.

        >>> settings = LearnSettings(lr=1.0, warmup_updates=1, decay_updates=3)
        >>> [round(settings.rate(update), 2) for update in range(6)]
        [0.5, 1.0, 0.75, 0.25, 0.0, 0.0]
        """
        rise = min(1.0, (update + 1) / (self.warmup_updates + 1))
        if not self.decay_updates:
            return self.lr * rise
        done = min(1.0, max(0, update - self.warmup_updates) / self.decay_updates)
        return self.lr * rise * (1 + math.cos(math.pi * done)) / 2

    def but(self, **changes: Any) -> Self:
        """A copy with `changes`, validated."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.algorithm == "dr_grpo") != (self.max_completion_tokens is not None):
            raise ConfigError(
                f"max_completion_tokens={self.max_completion_tokens} with algorithm={self.algorithm}",
                fix="dr_grpo needs max_completion_tokens, its constant denominator; the others have no use for it.",
            )
        self._check_correction()
        self._check_imitation()
        self._check_processes()
        return self

    def _check_correction(self) -> None:
        if self.mismatch_correction != "off" and self.old_logprobs == "recorded":
            raise ConfigError(
                f"mismatch_correction={self.mismatch_correction} with old_logprobs=recorded: the ratio is to the"
                " engine's logprobs already, there is nothing to correct",
                fix="old_logprobs=recomputed, or mismatch_correction=off",
            )
        if self.mismatch_cap is not None and self.mismatch_correction == "off":
            raise ConfigError(
                f"mismatch_cap={self.mismatch_cap:g} caps nothing with mismatch_correction=off",
                fix="mismatch_correction=token (with old_logprobs=recomputed), or leave mismatch_cap out",
            )

    def _check_imitation(self) -> None:
        """Refuse what has no meaning where nothing was sampled by the policy."""
        fields, unset = type(self).model_fields, OF_SAMPLES
        if self.algorithm == "sft" and (given := [n for n in unset if getattr(self, n) != fields[n].get_default()]):
            raise ConfigError(
                f"{given[0]}={getattr(self, given[0])} with algorithm=sft, which has no ratio and one update a batch",
                fix=f"leave {given[0]} out",
            )

    def _check_processes(self) -> None:
        sharded = self.strategy != "ddp"
        if sharded and self.processes == 1:
            raise ConfigError(
                f"strategy={self.strategy} shares the model among processes, and there is one", fix="raise processes"
            )
        if sharded and self.optimizer != "adamw":
            raise ConfigError(
                f"strategy={self.strategy} divides the moments of optimizer=adamw alone, not of {self.optimizer}",
                fix="optimizer=adamw, or strategy=ddp",
            )
        if self.strategy in ("fsdp2", "zero3") and self.beta > 0 and self.lora is None:
            raise ConfigError(
                f"strategy={self.strategy} with beta={self.beta} would hold a whole copy of the model on every device",
                fix="train adapters (lora), whose reference is the model without them, or set beta=0",
            )
        if self.strategy in ("fsdp2", "zero3") and self.teacher:
            raise ConfigError(
                f"strategy={self.strategy} with a teacher would hold it whole on every device",
                fix="strategy=ddp or zero2, where the model is whole on every device, too",
            )
        if self.attention == "flash_attention_2" and self.precision != "bf16":
            raise ConfigError("flash_attention_2 computes in 16 bits", fix="precision=bf16, or attention=rows")


def require_packages(settings: LearnSettings) -> None:
    """Raise `PrerequisiteError` for a package that these settings need and that is not installed."""
    extras = {"deepspeed": settings.strategy.startswith("zero"), "bitsandbytes": settings.optimizer == "adamw_8bit"}
    for package, wanted in extras.items():
        if wanted and find_spec(package) is None:
            what = f"strategy={settings.strategy}" if package == "deepspeed" else f"optimizer={settings.optimizer}"
            raise PrerequisiteError(
                f"train.{what} needs the package {package}", fix=f"pip install 'coderepairrl[{package}]'"
            )
