"""`[model]` and `[train]`: the policy, and how a batch becomes an update of it."""

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
    """A folder in Hugging Face layout, `org/name@revision` of the hub, or `builtin:NAME` for one that ships with the
    package."""
    init: Literal["weights", "random"] = "weights"
    """`random` draws the weights from the run's seed and needs only config.json and a tokenizer."""
    renderer: str = "auto"
    """How messages become tokens: a renderer of the package `renderers` by its name, `template` (the model's own chat
    template), or by the model's architecture."""
    quantise: Quantise = "none"
    """`nf4` holds the weights below adapters (`train.lora`) in 4 bits (needs the package bitsandbytes). They are
    rounded once, and engine and learner have the same numbers (docs/guides/memory.md); the engine holds them written
    out, in 16 or 32 bits."""
    thinking: bool = False
    """Let the model reason before it answers, where its template has a switch."""


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on linear layers, without dropout, for the engine samples without."""

    rank: int = Field(default=32, ge=1)
    """Of the adapters' two matrices."""
    alpha: int = Field(default=64, ge=1)
    """Their product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """The linear layers that get one, by name. Left as it is, it is those of them that the model has, and the
    projections of its linear attention."""

    @property
    def scaling(self) -> float:
        """Factor on the adapters' product.

        >>> Lora(rank=8).scaling
        8.0
        """
        return self.alpha / self.rank


class Learning(Section):
    """How a batch becomes an update, as the learner's process reads it, too."""

    algorithm: Algorithm = "gspo"
    """The loss (docs/reference/algorithms.md); `sft`, of `crrl sft`, is cross-entropy on the examples of `data`."""
    lr: float = Field(default=1e-4, gt=0)
    """Learning rate of AdamW, after warm-up and before decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """AdamW's moment decays."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled, on matrices only."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises."""
    decay_updates: int = Field(default=0, ge=0)
    """Updates after warm-up over which it falls to zero along half a cosine; 0: it stays."""
    max_grad_norm: float = Field(default=0.1, gt=0)
    """Gradients are clipped to this norm."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the initial weights, estimated from the sampled tokens by k3
    (docs/reference/algorithms.md). For `sft` it is over the whole vocabulary, KL(initial || trained)."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of a bonus for the entropy over the vocabulary, the mean over the trained tokens (exploration)."""
    value_head: bool = False
    """With `ppo`: predict the return of each context by a linear head on the policy's last hidden state, as the
    baseline of each token (docs/reference/algorithms.md)."""
    teacher: str = ""
    """A model whose distribution over the next token is learned (docs/guides/sft.md): a folder, a run that trained all
    weights, or `builtin:NAME`, with the same tokenizer and template. Empty: none."""
    teacher_weight: float = Field(default=1.0, gt=0, le=1)
    """The part of the loss that is the divergence from it; the other part is the algorithm's own: 1 learns nothing
    from rewards, or from the sampled tokens of examples."""
    advantage: Kind | None = None
    """What is made of a reward: minus the mean of its group (`mean`), divided by the group's standard deviation
    (`zscore`), minus the mean of the others in the group (`leave_one_out`), minus the mean of the batch's episodes of
    its kind and divided by their standard deviation (`batch`), or the reward itself (`none`). Unset is the algorithm's
    own (docs/reference/algorithms.md)."""
    eps_low: float | None = Field(default=None, ge=0, lt=1)
    """The importance ratio is clipped below 1 - eps_low; unset is the algorithm's own."""
    eps_high: float | None = Field(default=None, ge=0)
    """And above 1 + eps_high."""
    delta: float | None = Field(default=None, gt=1)
    """Second clip of the ratio, above 1 + eps_high: for negative advantages, whose gradient has no bound otherwise
    (INTELLECT-2, arXiv 2505.07291). Unset: none."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of a batch, of whole episodes, on which a pass makes one optimiser update each. Old logprobs are those from
    before the first, so the clip acts from the second on."""
    old_logprobs: OldLogprobs = "recorded"
    """Denominator of the ratio: the engine's recorded logprobs, or the learner's own before its first update."""
    micro_tokens: int = Field(default=8_192, ge=16)
    """Tokens of one forward pass, common beginnings of rows counted once; gradients are accumulated over the batch."""
    lora: Annotated[Lora | None, Switch] = None
    """Train adapters instead of all weights: `true`, or a table of `rank`, `alpha` and `targets`."""
    precision: Precision = "fp32"
    """Of matrix products, but those with the output head, which are float32. Trained weights, gradients and optimiser
    state are float32; with `bf16` the weights below adapters, and all weights that an engine is given, are bfloat16."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and compute the rest again in the backward pass."""
    optimizer: OptimizerName = "adamw"
    """`adamw_8bit` keeps its moments in 8 bits, and needs the package bitsandbytes."""
    processes: int = Field(default=1, ge=1)
    """Learner processes, one per device, that share each batch: on this machine, or those of `train.listen`."""
    strategy: Strategy = "ddp"
    """What they share beside it: nothing, with `zero2` gradients and optimiser state, with `fsdp2` or `zero3` weights
    too. `zero2` and `zero3` need the package deepspeed."""


class Train(Learning):
    """How episodes become an update."""

    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    """In place of `warmup_updates` and `decay_updates`: the share of the run's updates over which the learning rate
    rises; over the others it falls to zero along half a cosine."""

    balance_kinds: bool = False
    """Give each kind of tasks in a batch its part of the loss by `kinds.NAME.weight`, and not by how many episodes it
    has, or tokens where the loss adds these up: one with few short replies is not drowned by the others. Not with a
    `value_head`, which learns rewards as they are."""
    mismatch_correction: Literal["auto", Correction] = "auto"
    """With `recomputed`: weight each `token` by learner over engine, cut at 2. `auto` is `token` with `recomputed`
    where either computes in half precision, else `off`."""
    mask_truncated: bool = False
    """Do not train attempts that a limit ended; their rewards are compared all the same."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Over the last so many tokens before its limit of tokens, the reward of an attempt falls by up to 1 (soft overlong
    punishment, arXiv 2503.14476); 0: it does not."""
    tie_break: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Scores, by weight, that tell attempts of equal rewards apart: what a score has above the mean of the attempts
    that are equal to this one, times the weight, is added to its advantage, for example `{file_match = 0.1}`. `reward`
    is to measure them, with weight 0."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the learner, one for each process; empty is the first ones that `crrl` sees (docs/guides/cluster.md)."""
    listen: str = ""
    """HOST:PORT of this machine where the run waits for learner processes that torchrun starts, on one or more machines
    (docs/guides/cluster.md). Empty: the run starts its own."""
    patience: float = Field(default=3600.0, gt=0)
    """Seconds that the learner may take for one step, or to send or save weights: after that it is taken for hung,
    killed and restarted (run.retries). With `listen` also how long the run waits for torchrun's processes."""

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
