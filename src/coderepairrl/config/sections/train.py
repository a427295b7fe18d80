"""`[model]` and `[train]`: the policy, and its update from a batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from coderepairrl.config.sections.base import Section, Switch

Algorithm = Literal["gspo", "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "ppo", "rloo", "reinforce", "sft"]
OldLogprobs = Literal["recorded", "recomputed"]
Precision = Literal["fp32", "bf16"]
Quantise = Literal["none", "nf4"]
OptimizerName = Literal["adamw", "adamw_8bit"]
Strategy = Literal["ddp", "fsdp2", "zero2", "zero3"]
Correction = Literal["off", "token"]
Kind = Literal["zscore", "mean", "leave_one_out", "batch", "none"]


class Model(Section):
    """The policy."""

    path: str = "builtin:tiny"
    """A folder in Hugging Face layout, `org/name@revision` of the hub, or `builtin:NAME` for a shipped model."""
    init: Literal["weights", "random"] = "weights"
    """`weights` loads the model's; `random` draws them by `run.seed` and needs only config.json and a tokenizer."""
    renderer: str = "auto"
    """What writes messages as tokens: `auto` (by architecture), a renderer of the package `renderers`, or `template`
    (the model's chat template)."""
    quantise: Quantise = "none"
    """`nf4` holds the learner's base weights, under adapters (`train.lora`), in 4 bits (package bitsandbytes). The
    engine has the same values, rounded, in 16 or 32 bits (docs/guides/memory.md). `none`: it costs quality and time."""
    thinking: bool = False
    """Let the model reason before it answers, if its template has a switch; thoughts cost tokens."""


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on linear layers, without dropout, since the engine samples without."""

    rank: int = Field(default=32, ge=1)
    """Rank of the adapters' matrices; the default is the thesis's."""
    alpha: int = Field(default=64, ge=1)
    """The adapters' product is multiplied by alpha / rank; the default is the thesis's."""
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Names of the linear layers that get adapters. The default: all that the model has of these (attention and
    feed-forward), and the projections of linear attention."""

    @property
    def scaling(self) -> float:
        """Factor on the adapters' product.

        >>> Lora(rank=8).scaling
        8.0
        """
        return self.alpha / self.rank


class Learning(Section):
    """Update settings that the learner's process also reads."""

    algorithm: Algorithm = "gspo"
    """The loss (docs/reference/algorithms.md); the default is the thesis's. `sft` (`crrl sft`) is cross-entropy on the
    examples of `data`."""
    lr: float = Field(default=1e-4, gt=0)
    """AdamW's learning rate between warm-up and decay; the default is the thesis's, for adapters."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """AdamW's decay rates of the first and second moment; the default is the thesis's."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's weight decay, of matrices only; the default is the thesis's."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises from zero."""
    decay_updates: int = Field(default=0, ge=0)
    """Updates after warm-up over which the learning rate falls to zero along half a cosine; 0 keeps it constant."""
    max_grad_norm: float = Field(default=0.1, gt=0)
    """Norm to which gradients are clipped; the default is the thesis's."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the initial weights, estimated by k3 from sampled tokens
    (docs/reference/algorithms.md); 0 spares the reference policy's forward pass. For `sft`: KL(initial ‖ trained) over
    the whole vocabulary."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of a bonus for exploration: the entropy of the next-token distribution, averaged over trained tokens."""
    value_head: bool = False
    """With `ppo`, predict returns by a linear head on the last hidden state, as each token's baseline
    (docs/reference/algorithms.md)."""
    teacher: str = ""
    """Model whose next-token distribution is learned (docs/guides/sft.md): a folder, a run that trained all weights, or
    `builtin:NAME`, with the same tokenizer and template. Empty: none."""
    teacher_weight: float = Field(default=1.0, gt=0, le=1)
    """Share of the loss that is the divergence from the teacher; 1 leaves out the rewards, or the examples' tokens."""
    advantage: Kind | None = None
    """What an episode's reward is compared with: its group's mean (`mean`), also divided by the group's standard
    deviation (`zscore`), the mean of the group's other attempts (`leave_one_out`), mean and deviation of the batch's
    episodes of its kind (`batch`), or nothing (`none`). Unset: as the algorithm says (docs/reference/algorithms.md)."""
    eps_low: float | None = Field(default=None, ge=0, lt=1)
    """The importance ratio is clipped below 1 - eps_low; unset is the algorithm's."""
    eps_high: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped above 1 + eps_high; unset is the algorithm's."""
    delta: float | None = Field(default=None, gt=1)
    """Second clip of the ratio, greater than 1 + eps_high, which bounds gradients of negative advantages (INTELLECT-2,
    arXiv 2505.07291). Unset: none."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch; with one pass and one minibatch all data are on-policy."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of a batch, of whole episodes, with one optimiser update each per pass. Old logprobs are those from before
    the first update, so the clip acts from the second."""
    old_logprobs: OldLogprobs = "recorded"
    """Denominator of the ratio: the engine's logprobs (`recorded`), or the learner's from before the first update
    (`recomputed`), which half precision needs and which cost a forward pass."""
    micro_tokens: int = Field(default=8_192, ge=16)
    """Distinct tokens per forward pass, which decide the activations' memory; gradients accumulate over the batch."""
    lora: Annotated[Lora | None, Switch] = None
    """Train adapters instead of all weights: `true`, or a table of `rank`, `alpha` and `targets`."""
    precision: Precision = "fp32"
    """Precision of matrix products, except the output head's; trained weights, gradients and optimiser state are always
    float32. With `bf16`, base weights under adapters and the engine's weights are bfloat16: half the memory, with
    rounding."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and recompute the others in the backward pass: less memory, more time."""
    optimizer: OptimizerName = "adamw"
    """`adamw_8bit` keeps moments in 8 bits (package bitsandbytes): less memory, with rounding."""
    processes: int = Field(default=1, ge=1)
    """Learner processes, one per device, that share each batch, on this machine or at `train.listen`."""
    strategy: Strategy = "ddp"
    """What is divided between the processes: nothing (`ddp`, the least communication), gradients and optimiser state
    (`zero2`), weights too (`fsdp2`, `zero3`). `zero2` and `zero3` need the package deepspeed."""


class Train(Learning):
    """Update of the policy from episodes."""

    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    """Share of the run's updates over which the learning rate rises; over the others it falls to zero along half a
    cosine. Replaces `warmup_updates` and `decay_updates`."""

    balance_kinds: bool = False
    """Weight each kind of tasks in a batch by `kinds.NAME.weight`, not by its number of episodes or tokens, so that a
    kind with few short replies counts. Excludes `value_head`, which learns unscaled rewards."""
    mismatch_correction: Literal["auto", Correction] = "auto"
    """With `old_logprobs = "recomputed"`: `token` multiplies each token's loss by the ratio of learner to engine
    probability, at most 2. `auto` does so if either computes in half precision."""
    mask_truncated: bool = False
    """Do not train attempts that a limit ended; their rewards still count in the baseline."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Number of tokens before an attempt's token limit over which its reward falls by up to 1 (soft overlong
    punishment, arXiv 2503.14476); 0 is off."""
    tie_break: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Scores, by weight, that rank attempts of equal reward: weight times the score's difference from their mean is
    added to the advantage, for example `{file_match = 0.1}`. `reward` must measure them, with weight 0."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the learner, one per process; empty takes the first that `crrl` sees (docs/guides/cluster.md)."""
    listen: str = ""
    """HOST:PORT of this machine at which the run waits for learner processes that torchrun starts
    (docs/guides/cluster.md). Empty: the run starts its learner."""
    patience: float = Field(default=3600.0, gt=0)
    """Seconds for one learner step, or for sending or saving weights, before the learner is killed and restarted
    (`run.retries`). Also the time to wait for torchrun's processes."""

    @model_validator(mode="after")
    def _listens_for_gpus_elsewhere(self) -> Train:
        if self.listen and self.devices:
            raise ValueError(
                "devices are those of processes that the run starts: with listen, leave it out, and"
                " start torchrun with CUDA_VISIBLE_DEVICES"
            )
        return self

    @model_validator(mode="after")
    def _one_schedule(self) -> Train:
        if self.warmup_ratio is not None and (self.warmup_updates or self.decay_updates):
            raise ValueError("warmup_ratio stands in place of warmup_updates and decay_updates: leave these out")
        return self
