"""The learner's settings, checked before any process starts. Without torch."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from coderepairrl.config.sections.train import Correction, Kind, KLEstimator, KLPlace, Learning, Quantise
from coderepairrl.errors import ConfigError
from coderepairrl.learn.algorithms import RECIPES, Recipe
from coderepairrl.processes.extras import require_extra, require_train

Form = Literal["model", "adapter"]
"""Form of the weights for an engine: a whole model, or adapters on the model it has."""

LOGITS = 1 << 26
"""Logits (tokens times vocabulary) in memory at a time: 256 MiB in float32."""
BUCKET = 1 << 26
"""Numbers that ZeRO reduces or gathers at a time: 256 MiB in float32."""
ALIGNED = 8
"""Products in groups need rows of a multiple of 16 bytes on a GPU: ranks of adapters on experts are filled up to one of
so many numbers."""
NF4_BLOCK, INT8_BLOCK = 64, 32
"""Numbers that share a scale: of NF4 (QLoRA, arXiv 2305.14314) in float32, of int8 a power of two (MXINT8 of the OCP
Microscaling formats, arXiv 2310.10537), with which every number is one of bfloat16."""
OF_SAMPLES = ("eps_low", "eps_high", "delta", "updates_per_batch", "minibatches", "old_logprobs", "mismatch_correction",
              "mismatch_cap", "mismatch_mask", "kl", "kl_in", "entropy", "value_head")  # fmt: skip
"""Settings that mean something only for tokens that the policy sampled itself."""
OF_VALUES = {"gamma": 1.0, "gae_lambda": 1.0, "value_weight": 0.1, "value_clip": 0.2}
"""Settings that mean something only with a value head, and their defaults with one: undiscounted and without bootstrap
(arXiv 2503.24290), the weight and the clip of TRL's PPO."""
MUON_LR = 0.02
"""Default `LearnSettings.muon_lr`."""
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")
"""Gated DeltaNet's targets of adapters: those that decide on decay and strength of a token's update are a number per
head, and stay."""
CAP = 2.0
"""Default `LearnSettings.mismatch_cap`, the one of Yao et al. 2025 (`corrections.truncated`)."""


class LearnSettings(Learning):
    """The settings of a run's section ``train``, and those of other sections that training depends on.

    >>> LearnSettings().clip, LearnSettings(algorithm="grpo", eps_high=0.28).clip
    ((2e-05, 0.0004), (0.2, 0.28))
    """

    mismatch_correction: Correction = "off"
    """With `recomputed` old logprobs: importance weights for the difference between learner and engine, per token, per
    row or off (`corrections.truncated`)."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling: logprobs are those of ``softmax(logits / temperature)``."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The constant denominator per episode of algorithms that have one; None for others."""
    quantise: Literal[Quantise, "checkpoint"] = "none"
    """How the weights below adapters are held; ``checkpoint`` are the codes in the model's files."""
    seed: int = 0
    """Of the adapters' initial weights. Nothing else in the learner is random (no dropout)."""

    @property
    def recipe(self) -> Recipe | None:
        """What the algorithm is made of; None for `sft`."""
        return RECIPES.get(self.algorithm)

    @property
    def clip(self) -> tuple[float, float]:
        """``(eps_low, eps_high)`` with the algorithm's defaults filled in; zeros where there is no ratio."""
        low, high = self.recipe.clip if self.recipe else (0.0, 0.0)
        return (low if self.eps_low is None else self.eps_low, high if self.eps_high is None else self.eps_high)

    @property
    def baseline(self) -> Kind:
        """`advantage` with the algorithm's default filled in."""
        return self.advantage or (self.recipe.baseline if self.recipe else "none")

    @property
    def kl_place(self) -> KLPlace:
        """`kl_in` with the algorithm's default filled in."""
        return self.kl_in or (self.recipe.kl_in if self.recipe else "loss")

    @property
    def estimator(self) -> KLEstimator:
        """`kl` with its default filled in."""
        return self.kl or ("k1" if self.kl_place == "reward" else "k3")

    def of_values(self, name: str) -> float:
        """One of `OF_VALUES` with its default filled in."""
        given: float | None = getattr(self, name)
        return OF_VALUES[name] if given is None else given

    @property
    def updates(self) -> int:
        """Optimiser updates per batch, at most: a minibatch without rows has none."""
        return self.updates_per_batch * self.minibatches

    @property
    def cap(self) -> float:
        """`mismatch_cap` with its default filled in."""
        return CAP if self.mismatch_cap is None else self.mismatch_cap

    @property
    def matrix_lr(self) -> float:
        """`muon_lr` with its default filled in."""
        return MUON_LR if self.muon_lr is None else self.muon_lr

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
        self._check_algorithm()
        self._check_values()
        self._check_correction()
        self._check_imitation()
        self._check_optimizer()
        self._check_processes()
        self._check_quantised()
        return self

    def _check_algorithm(self) -> None:
        """Refuse what does nothing under the algorithm."""
        recipe, bounds = self.recipe, [n for n in ("eps_low", "eps_high", "delta") if getattr(self, n) is not None]
        constant = recipe is not None and recipe.aggregation == "constant"
        if constant != (self.max_completion_tokens is not None):
            raise ConfigError(
                f"max_completion_tokens={self.max_completion_tokens} with algorithm={self.algorithm}",
                fix="it is the constant denominator of dr_grpo and dppo; the others have no use for it.",
            )
        if recipe is None:
            return
        used = {"clip": ("eps_low", "eps_high", "delta"), "tv": ("eps_low", "eps_high"), "cispo": ("eps_high",)}
        for name in bounds:
            if name not in used.get(recipe.objective, ()):
                others = ", ".join(n for n, each in RECIPES.items() if name in used.get(each.objective, ()))
                raise ConfigError(
                    f"{name}={getattr(self, name):g} bounds nothing with algorithm={self.algorithm}",
                    fix=f"leave {name} out, or take one of {others}",
                )
        if self.delta is not None and self.delta <= 1 + self.clip[1]:
            raise ConfigError(
                f"delta={self.delta:g} is not above 1 + eps_high = {1 + self.clip[1]:g}, where the clip acts already",
                fix="a larger delta",
            )

        self._check_kl()

    def _check_kl(self) -> None:
        """Refuse a KL term that has no weight, no gradient, or no place in the baseline."""
        given = next((name for name in ("kl", "kl_in") if getattr(self, name) is not None), None)
        if self.beta == 0:
            if given is not None:
                raise ConfigError(
                    f"{given}={getattr(self, given)} with beta=0: there is no KL term",
                    fix=f"beta, or leave {given} out",
                )
            return
        if (self.estimator, self.kl_place) == ("k1", "loss"):
            raise ConfigError(
                "kl=k1 with kl_in=loss: over what the policy samples, the gradient of that term is 0 on average",
                fix="kl=k2, whose gradient is that of the divergence, kl=k3, or kl_in=reward",
            )
        if self.kl_place == "reward" and self.baseline in ("zscore", "batch") and not self.value_head:
            raise ConfigError(
                f"kl_in=reward with advantage={self.baseline}, which would divide the KL term by the spread of rewards",
                fix="advantage=mean, leave_one_out or none, or kl_in=loss",
            )

    def _check_values(self) -> None:
        """Refuse a value head that nothing learns from, and its settings without one."""
        given = next((name for name in OF_VALUES if getattr(self, name) is not None), None)
        if not self.value_head:
            if given is not None:
                raise ConfigError(
                    f"{given}={getattr(self, given):g} without a value head",
                    fix=f"algorithm=ppo with value_head=true, or leave {given} out",
                )
            return
        if self.algorithm not in ("ppo", "sft"):
            raise ConfigError(
                f"value_head=true with algorithm={self.algorithm}, whose advantages are of whole episodes",
                fix="algorithm=ppo, or leave value_head out",
            )
        if self.baseline not in ("batch", "none"):
            raise ConfigError(
                f"advantage={self.baseline} with value_head=true: the value of its context is the baseline of a token",
                fix="leave advantage out (advantages with mean 0 and deviation 1 over the batch), or advantage=none",
            )

        if self.strategy.startswith("zero"):
            raise ConfigError(
                f"value_head=true with strategy={self.strategy}: a value head was never tried under ZeRO",
                fix="strategy=fsdp2, which divides as much as zero3, or ddp",
            )

    def _check_correction(self) -> None:
        mask = "" if self.mismatch_mask is None else f"mismatch_mask={self.mismatch_mask:g}"
        asked = mask if self.mismatch_correction == "off" else f"mismatch_correction={self.mismatch_correction}"
        if asked and self.old_logprobs == "recorded":
            raise ConfigError(
                f"{asked} with old_logprobs=recorded: the ratio is to the engine's logprobs already, there is nothing"
                " to correct",
                fix=f"old_logprobs=recomputed, or leave {asked.partition('=')[0]} out",
            )
        if self.recipe and self.recipe.objective == "score" and self.old_logprobs == "recomputed" and not asked:
            raise ConfigError(
                f"old_logprobs=recomputed with algorithm={self.algorithm}, which has no ratio to them, and without a"
                " correction",
                fix="leave old_logprobs out, or mismatch_correction=token",
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

    def _check_optimizer(self) -> None:
        if self.muon_lr is not None and self.optimizer != "muon":
            raise ConfigError(
                f"muon_lr={self.muon_lr:g} has no meaning for optimizer={self.optimizer}",
                fix="optimizer=muon, or leave muon_lr out",
            )
        if self.optimizer == "muon" and self.lora is not None:
            raise ConfigError(
                "optimizer=muon trains whole models: an adapter's step is the product of two matrices, and making each"
                " orthogonal does not make it so",
                fix="optimizer=adamw, or lora=false",
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
        if self.strategy == "zero3" and self.lora is not None and self.lora.experts:
            raise ConfigError(
                "strategy=zero3 gathers weights where a module of their own computes with them, and adapters on experts"
                " are computed with by the whole layer",
                fix="strategy=fsdp2, which divides weights as well, or lora.experts=false",
            )
        if self.strategy in ("fsdp2", "zero3") and self.teacher:
            raise ConfigError(
                f"strategy={self.strategy} with a teacher would hold it whole on every device",
                fix="strategy=ddp or zero2, where the model is whole on every device, too",
            )
        if self.attention == "flash_attention_2" and self.precision != "bf16":
            raise ConfigError("flash_attention_2 computes in 16 bits", fix="precision=bf16, or attention=rows")

    def _check_quantised(self) -> None:
        if self.quantise == "none":
            return
        in_checkpoint = self.quantise == "checkpoint"
        what = "the model's files hold" if in_checkpoint else f"model.quantise={self.quantise} holds"
        other = "the model as it was published" if in_checkpoint else "model.quantise=none"
        if self.lora is None:
            raise ConfigError(
                f"{what} weights in codes that no gradient moves, and all weights are to be trained",
                fix=f"train adapters on them (train.lora=true), or {other}",
            )
        if self.strategy != "ddp":
            raise ConfigError(
                f"{what} weights in codes, and strategy={self.strategy} divides numbers alone",
                fix=f"strategy=ddp, where each process has the whole of them, or {other}",
            )


def require_packages(settings: LearnSettings) -> None:
    """Raise `PrerequisiteError` for a package that these settings need and that is not installed."""
    require_train()
    wanted = {
        f"train.strategy={settings.strategy}": "deepspeed" if settings.strategy.startswith("zero") else "",
        f"train.optimizer={settings.optimizer}": "bitsandbytes" if settings.optimizer == "adamw_8bit" else "",
        f"model.quantise={settings.quantise}": "bitsandbytes" if settings.quantise == "nf4" else "",
    }
    for setting, extra in wanted.items():
        if extra:
            require_extra(extra, setting)
