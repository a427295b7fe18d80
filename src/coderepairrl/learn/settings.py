"""What the learner may be told, checked before any process starts. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

from coderepairrl.errors import ConfigError, PrerequisiteError
from coderepairrl.registry import nearest

Algorithm = Literal["gspo", "grpo", "dr_grpo"]
OldLogprobs = Literal["recorded", "recomputed"]
Correction = Literal["off", "token", "sequence"]
Precision = Literal["fp32", "bf16"]
Head = Literal["fp32", "model"]
OptimizerName = Literal["adamw", "adamw_8bit"]
Attention = Literal["rows", "flash_attention_2"]
Strategy = Literal["ddp", "fsdp2", "zero2", "zero3"]
Form = Literal["model", "adapter"]
"""What an engine is given: a whole model, or adapters on the model it has."""
Route = Literal["gloo", "ipc", "nccl"]
"""How whole models reach an engine that takes them without a file."""

LOGITS = 1 << 26
"""Logits (tokens times vocabulary) that are held at once: 256 MiB in float32."""
BUCKET = 1 << 26
"""Numbers that ZeRO reduces or gathers at once: 256 MiB in float32."""
CLIP: dict[Algorithm, tuple[float, float]] = {
    "gspo": (2e-5, 4e-4),  # a length-normalised ratio hardly moves
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
}
"""Default ``(eps_low, eps_high)``: the ratios of the algorithms live on different scales."""
CAP = 2.0
"""Default `LearnSettings.mismatch_cap`, the one of Yao et al. 2025 (`losses.truncated`)."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Low-rank adapters (arXiv 2106.09685) on linear layers, as in the thesis run.

    There is no dropout: the engine samples without, so the learner would train on other logprobs than were sampled.

    >>> LoraSettings(rank=8).scaling
    8.0
    """

    rank: int = 32
    alpha: int = 64
    """The adapters' product is multiplied by ``alpha / rank``."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get one, wherever they occur."""

    @property
    def scaling(self) -> float:
        """Factor on the adapters' product."""
        return self.alpha / self.rank

    def __post_init__(self) -> None:
        """Refuse what cannot work. Raises `ConfigError`."""
        if self.rank < 1 or self.alpha < 1 or not self.targets:
            raise ConfigError(f"lora needs a positive rank and alpha, and targets: {self}")


@dataclass(frozen=True, slots=True)
class LearnSettings:
    """How the policy is trained. Defaults are those of the thesis run, full weights in fp32.

    >>> LearnSettings().clip, LearnSettings(algorithm="grpo", eps_high=0.28).clip
    ((2e-05, 0.0004), (0.2, 0.28))
    """

    algorithm: Algorithm = "gspo"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    """Decoupled, on matrices only: norms and biases are not decayed."""
    warmup_updates: int = 0
    """The learning rate rises linearly over so many optimiser updates. The first is never zero."""
    decay_updates: int = 0
    """Then it falls to zero along half a cosine over so many updates; 0: it stays."""
    max_grad_norm: float = 0.1
    beta: float = 0.0
    """Weight of the KL term against the initial weights, of which a copy is held only when ``beta > 0``."""
    eps_low: float | None = None
    eps_high: float | None = None
    """The ratio is clipped to ``[1 - eps_low, 1 + eps_high]``; None means the algorithm's own (`CLIP`)."""
    max_completion_tokens: int | None = None
    """Dr. GRPO's constant denominator per episode; it belongs to that algorithm alone."""
    updates_per_batch: int = 1
    """Passes over each batch (the paper's mu): each makes an optimiser update of every minibatch."""
    minibatches: int = 1
    """Disjoint parts of a batch, whole episodes each, that a pass updates on one after the other (`pack.minibatches`),
    as TRL's ``steps_per_generation``. Old logprobs are those from before the first: from the second update on, ratios
    move away from 1 and the clip acts."""
    old_logprobs: OldLogprobs = "recorded"
    """Denominator of the importance ratio: ``recorded`` by the engine when it sampled, which also corrects
    stale samples, or ``recomputed`` by the learner before its first update on the batch, which hides numerical
    differences between engine and learner (a bf16 engine may need it) and any staleness with them."""
    mismatch_correction: Correction = "off"
    """What to do about those differences with ``recomputed`` (`losses.truncated`): nothing, or to weight a token's or a
    row's loss by learner over engine, so that it is an estimate for the learner's policy again."""
    mismatch_cap: float | None = None
    """Such a weight is cut above this, at least 1; None is `CAP`."""
    temperature: float = 1.0
    """Of the sampling: logprobs are those of ``softmax(logits / temperature)``."""
    micro_tokens: int = 8192
    """Tokens in one forward and backward pass. A longer row goes alone: `stitch` bounds the length of rows."""
    lora: LoraSettings | None = None
    """Train adapters and leave the weights alone; None trains all weights."""
    seed: int = 0
    """Of the adapters' initial weights. With dropout off the learner draws no other random number."""
    precision: Precision = "fp32"
    """``bf16`` multiplies matrices in bfloat16 (autocast). Trained weights, gradients, optimiser state and logprobs
    stay in float32; weights that only carry adapters are held in bfloat16, and weights are published in it."""
    head: Head = "fp32"
    """Of the products with the output head (`learn.head`): float32 whatever the rest is, or ``model``: `precision`."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and compute the others again in the backward pass."""
    optimizer: OptimizerName = "adamw"
    """``adamw_8bit`` (bitsandbytes) holds the moments of matrices in 8 bits, those of small ones in 32."""
    attention: Attention = "rows"
    """``rows`` is torch's own, row by row, on any device; ``flash_attention_2`` is one variable-length kernel."""
    processes: int = 1
    """Learner processes, one per device, that share each batch."""
    strategy: Strategy = "ddp"
    """What the processes share beside the batch: nothing; with ``zero2`` gradients and optimiser state; with ``fsdp2``
    or ``zero3`` weights too."""

    @property
    def clip(self) -> tuple[float, float]:
        """``(eps_low, eps_high)`` with the algorithm's defaults filled in."""
        low, high = CLIP[self.algorithm]
        return (low if self.eps_low is None else self.eps_low, high if self.eps_high is None else self.eps_high)

    @property
    def updates(self) -> int:
        """Optimiser updates of a batch, at most: a minibatch without a row has none."""
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

    def __post_init__(self) -> None:
        """Refuse what cannot work. Raises `ConfigError`."""
        if self.algorithm not in CLIP:
            raise ConfigError(f"unknown algorithm {self.algorithm!r}", fix=nearest(self.algorithm, CLIP))
        if self.old_logprobs not in ("recorded", "recomputed"):
            raise ConfigError(f"old_logprobs is 'recorded' or 'recomputed', not {self.old_logprobs!r}")
        if (self.algorithm == "dr_grpo") != (self.max_completion_tokens is not None):
            raise ConfigError(
                f"max_completion_tokens={self.max_completion_tokens} with algorithm={self.algorithm}",
                fix="dr_grpo needs max_completion_tokens, its constant denominator; the others have no use for it.",
            )
        self._check_correction()
        self._check_processes()
        positive = {
            "processes": self.processes,
            "temperature": self.temperature,
            "max_grad_norm": self.max_grad_norm,
            "updates_per_batch": self.updates_per_batch,
            "minibatches": self.minibatches,
            "micro_tokens": self.micro_tokens,
            "max_completion_tokens": 1 if self.max_completion_tokens is None else self.max_completion_tokens,
        }
        natural = {
            "lr": self.lr,
            "beta": self.beta,
            "weight_decay": self.weight_decay,
            "warmup_updates": self.warmup_updates,
            "decay_updates": self.decay_updates,
            "eps_low": self.clip[0],
            "eps_high": self.clip[1],
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name} must be positive, not {value}")
        for name, value in natural.items():
            if not value >= 0:
                raise ConfigError(f"{name} must not be negative, is {value}")
        if self.clip[0] >= 1:
            raise ConfigError(
                f"eps_low={self.clip[0]:g}: a ratio is above 0, so a clip below 1 - eps_low never acts",
                fix="eps_low below 1: 0.2 for token-level ratios, 2e-5 for gspo",
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must lie in [0, 1), are {self.betas}")

    def _check_correction(self) -> None:
        if self.mismatch_correction not in get_args(Correction):
            raise ConfigError(
                f"unknown mismatch_correction {self.mismatch_correction!r}",
                fix=nearest(self.mismatch_correction, get_args(Correction)),
            )
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
        if not 1 <= self.cap < math.inf:
            raise ConfigError(f"mismatch_cap={self.cap:g} would cut what needs no correction", fix="1 or more")

    def _check_processes(self) -> None:
        for name, value, known in (
            ("precision", self.precision, get_args(Precision)),
            ("head", self.head, get_args(Head)),
            ("optimizer", self.optimizer, get_args(OptimizerName)),
            ("attention", self.attention, get_args(Attention)),
            ("strategy", self.strategy, get_args(Strategy)),
        ):
            if value not in known:
                raise ConfigError(f"unknown {name} {value!r}", fix=nearest(value, known))
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
