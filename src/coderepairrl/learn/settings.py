"""Learner settings, checked before any process starts."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from coderepairrl.config.schema import Baseline, Correction, Learning, Quantise
from coderepairrl.errors import ConfigError
from coderepairrl.learn.algorithms import RECIPES, Recipe
from coderepairrl.processes.installs import require_extra, require_train

Form = Literal["model", "adapter"]
"""What an engine loads: all weights, or adapters."""

MAX_LOGITS = 1 << 26
"""Logits in memory at a time: 256 MiB in float32."""
BUCKET = 1 << 26
"""Numbers that ZeRO reduces at a time: 256 MiB in float32."""
NF4_BLOCK = 64
"""Weights per scale (QLoRA, arXiv 2305.14314)."""
SAMPLED_ONLY = ("eps_low", "eps_high", "delta", "updates_per_batch", "minibatches", "old_logprobs",
                "mismatch_correction", "entropy", "value_head")  # fmt: skip
"""Settings for sampled tokens, which `sft` lacks."""
VALUE_WEIGHT, VALUE_CLIP = 0.1, 0.2
"""Weight of the value loss, and bound of a value's change: TRL's PPO."""
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")
"""Gated DeltaNet's LoRA targets, without layers of one output per head."""


class LearnSettings(Learning):
    """Section ``train``, and related settings of other sections.

    >>> LearnSettings().clip, LearnSettings(algorithm="grpo", eps_high=0.28).clip
    ((2e-05, 0.0004), (0.2, 0.28))
    """

    mismatch_correction: Correction = "off"
    """Importance weights (`losses.correct_mismatch`), with `recomputed` old logprobs."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of sampling and logprobs."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Constant denominator of `dr_grpo`."""
    quantise: Quantise = "none"
    """Format of base weights."""
    seed: int = 0
    """Seed of the adapters' initial weights, the only random numbers."""

    @property
    def recipe(self) -> Recipe | None:
        """Parts of the algorithm; None for `sft`."""
        return RECIPES.get(self.algorithm)

    @property
    def clip(self) -> tuple[float, float]:
        """``(eps_low, eps_high)``; zeros without a ratio."""
        low, high = self.recipe.clip if self.recipe else (0.0, 0.0)
        return (low if self.eps_low is None else self.eps_low, high if self.eps_high is None else self.eps_high)

    @property
    def baseline(self) -> Baseline:
        """`advantage`, or the algorithm's default."""
        return self.advantage or (self.recipe.baseline if self.recipe else "none")

    @property
    def updates(self) -> int:
        """Maximum optimiser updates per batch."""
        return self.updates_per_batch * self.minibatches

    def rate(self, update: int) -> float:
        """Learning rate of an update, counted from 0.

        >>> settings = LearnSettings(lr=1.0, warmup_updates=1, decay_updates=3)
        >>> [round(settings.rate(update), 2) for update in range(6)]
        [0.5, 1.0, 0.75, 0.25, 0.0, 0.0]
        """
        rise = min(1.0, (update + 1) / (self.warmup_updates + 1))
        if not self.decay_updates:
            return self.lr * rise
        done = min(1.0, max(0, update - self.warmup_updates) / self.decay_updates)
        return self.lr * rise * (1 + math.cos(math.pi * done)) / 2

    def with_changes(self, **changes: Any) -> Self:
        """Validated copy with `changes`."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        self._check_algorithm()
        self._check_value_head()
        self._check_correction()
        self._check_imitation()
        self._check_processes()
        self._check_quantised()
        return self

    def _check_algorithm(self) -> None:
        recipe = self.recipe
        is_constant = recipe is not None and recipe.aggregation == "constant"
        if is_constant != (self.max_completion_tokens is not None):
            raise ConfigError(
                f"max_completion_tokens={self.max_completion_tokens} with algorithm={self.algorithm}",
                fix="it is the constant denominator of dr_grpo; set it only there.",
            )
        if recipe is None:
            return
        used = {"clip": ("eps_low", "eps_high", "delta"), "cispo": ("eps_high",)}
        for name in ("eps_low", "eps_high", "delta"):
            if getattr(self, name) is not None and name not in used.get(recipe.objective, ()):
                valid = ", ".join(n for n, each in RECIPES.items() if name in used.get(each.objective, ()))
                raise ConfigError(
                    f"{name}={getattr(self, name):g} has no effect with algorithm={self.algorithm}",
                    fix=f"leave {name} out, or take one of {valid}",
                )
        if self.delta is not None and self.delta <= 1 + self.clip[1]:
            raise ConfigError(
                f"delta={self.delta:g} is not above 1 + eps_high = {1 + self.clip[1]:g}, where the clip acts already",
                fix="set a larger delta",
            )

    def _check_value_head(self) -> None:
        if not self.value_head:
            return
        if self.algorithm not in ("ppo", "sft"):
            raise ConfigError(
                f"value_head=true with algorithm={self.algorithm}, whose advantages are of whole episodes",
                fix="algorithm=ppo, or leave value_head out",
            )
        if self.baseline not in ("batch", "none"):
            raise ConfigError(
                f"advantage={self.baseline} with value_head=true: a token's baseline is the value of its context",
                fix="leave advantage out (advantages with mean 0 and deviation 1 over the batch), or advantage=none",
            )
        if self.strategy.startswith("zero"):
            raise ConfigError(
                f"value_head=true with strategy={self.strategy}: value heads are untested with ZeRO",
                fix="strategy=fsdp2, which divides as much as zero3, or ddp",
            )

    def _check_correction(self) -> None:
        is_corrected = self.mismatch_correction != "off"
        if is_corrected and self.old_logprobs == "recorded":
            raise ConfigError(
                f"mismatch_correction={self.mismatch_correction} with old_logprobs=recorded: the ratio is to the"
                " engine's logprobs already, there is nothing to correct",
                fix="old_logprobs=recomputed, or leave mismatch_correction out",
            )
        if self.recipe and self.recipe.objective == "score" and self.old_logprobs == "recomputed" and not is_corrected:
            raise ConfigError(
                f"old_logprobs=recomputed with algorithm={self.algorithm}, which has no ratio to them, and without a"
                " correction",
                fix="leave old_logprobs out, or mismatch_correction=token",
            )

    def _check_imitation(self) -> None:
        if self.algorithm != "sft":
            return
        for name in SAMPLED_ONLY:
            if (value := getattr(self, name)) != type(self).model_fields[name].get_default():
                raise ConfigError(
                    f"{name}={value} with algorithm=sft, which has no ratio and one update a batch",
                    fix=f"leave {name} out",
                )

    def _check_processes(self) -> None:
        sharded = self.strategy != "ddp"
        if sharded and self.processes == 1:
            raise ConfigError(
                f"strategy={self.strategy} shares the model among processes, and there is one", fix="raise processes"
            )
        if sharded and self.optimizer != "adamw":
            raise ConfigError(
                f"strategy={self.strategy} divides the moments of optimizer=adamw only, not of {self.optimizer}",
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

    def _check_quantised(self) -> None:
        if self.quantise == "none":
            return
        prefix = f"model.quantise={self.quantise} holds"
        if self.lora is None:
            raise ConfigError(
                f"{prefix} quantised weights, which cannot be trained, and train.lora=false trains all weights",
                fix="train adapters on them (train.lora=true), or model.quantise=none",
            )
        if self.strategy != "ddp":
            raise ConfigError(
                f"{prefix} quantised weights, which strategy={self.strategy} cannot divide",
                fix="strategy=ddp, where each process has all of them, or model.quantise=none",
            )


def require_packages(settings: LearnSettings) -> None:
    """Raise `PrerequisiteError` for a missing package."""
    require_train()
    if settings.strategy.startswith("zero"):
        require_extra("deepspeed", f"train.strategy={settings.strategy}")
    if settings.optimizer == "adamw_8bit":
        require_extra("bitsandbytes", f"train.optimizer={settings.optimizer}")
    if settings.quantise == "nf4":
        require_extra("bitsandbytes", f"model.quantise={settings.quantise}")
