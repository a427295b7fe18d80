"""Every setting of a run, typed. Each field works or is refused; implementations are names.

A section given as a plain string is short for its `name`: `engine=tiny` is `engine.name=tiny`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from coderepairrl.types import HistoryPolicy, SideCalls

Algorithm = Literal[
    "gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "bnpo", "dppo", "cispo", "ppo", "rloo", "reinforce", "sft"
]
OldLogprobs = Literal["recorded", "recomputed"]
Precision = Literal["fp32", "bf16"]
Head = Literal["fp32", "model"]
Quantise = Literal["none", "nf4", "int8"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
Attention = Literal["rows", "flash_attention_2"]
Strategy = Literal["ddp", "fsdp2", "zero2", "zero3"]
Correction = Literal["off", "token", "sequence", "icepop"]
Kind = Literal["zscore", "mean", "leave_one_out", "batch", "none"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["loss", "reward"]
Denominator = Literal["episodes", "informative"]
Tracker = Literal["tensorboard", "trackio", "wandb"]
Route = Literal["gloo", "ipc", "nccl"]
"""How whole models reach an engine that takes them without a file."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are final."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


GateName = Literal[
    "skipped", "nothing_sampled", "zero_reward", "no_gradient", "entropy", "perplexity", "kl", "drift", "throughput"
]


class Health(Section):
    """Health gates: what is wrong with each of several steps in a row is warned of after half of them, and stops the
    run (exit code 4, resumable) after all of them (docs/guides/training.md)."""

    action: Literal["stop", "warn"] = "stop"
    """`warn` stops nothing."""
    patience: int = Field(default=10, ge=2)
    """Steps in a row."""
    skips: int = Field(default=3, ge=1)
    """Gate `skipped`: so many batches in a row without a finite gradient. Each is skipped, and leaves the weights as
    they are."""
    entropy: float = Field(default=0.02, gt=0, lt=1)
    """Gate `entropy`: the mean surprisal of sampled tokens is below this share of what it was in the first 5 steps, and
    the reward does not rise. While it rises, little of it may be left in sound runs, too (arXiv 2505.22617)."""
    perplexity: float = Field(default=5.0, gt=1)
    """Gate `perplexity`: e to the mean surprisal of sampled tokens is above so many times what it was in the first 5
    steps, and the reward does not rise."""
    kl: float = Field(default=10.0, gt=1)
    """Gate `kl`: the KL against the initial policy is above so many times its running median, which counts as at least
    0.1 nats a token. Needs `train.beta` above 0."""
    drift: float = Field(default=0.2, gt=0)
    """Gate `drift`: the mean absolute difference between the engine's logprobs and the learner's is above so many nats
    a token. In float32 it is about 1e-7. Rounded to bfloat16, logits of 16 to 32 are off by 0.03 on the average."""
    throughput: float = Field(default=0.1, gt=0, lt=1)
    """Gate `throughput`: tokens a second are below this share of their running median, in steps that take no less time
    than usual."""
    off: tuple[GateName, ...] = ()
    """Gates that are not asked. Those without a setting of their own: `nothing_sampled`, `zero_reward` (every attempt
    earned 0) and `no_gradient` (all attempts at a task earned the same)."""


class Run(Section):
    """What this run is called and when it does what."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run below `dir`. Mandatory: a number without a name cannot be cited."""
    dir: str = "runs"
    """Where run folders live."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """All randomness derives from it: task order, request seeds, random weights."""
    steps: int = Field(default=20, ge=0, le=1_000_000)
    """Training steps: batches of episodes, each followed by an update."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The newest so many are kept, and the last one always is."""
    void_limit: float = Field(default=0.5, gt=0, le=1)
    """Stop (exit code 4) when more than this fraction of a step's episodes is void after all retries."""
    over_optimisation: Literal["warn", "stop", "off"] = "warn"
    """What to do when the reward rises while tests passed per patch fall (docs/guides/rewards.md), where tests are
    measured: say so, or also stop (exit code 4)."""
    health: Health = Health()
    """When a run that does not learn, or not soundly, is warned of and stopped."""
    retries: int = Field(default=2, ge=0)
    """How often a void episode is tried again, and how often in a row a dead engine or learner is restarted."""


class Model(Section):
    """The policy."""

    path: str = "builtin:tiny"
    """A folder in Hugging Face layout, or `builtin:NAME` for one that ships with the package."""
    init: Literal["weights", "random"] = "weights"
    """`random` draws the weights from the run's seed and needs only config.json and a tokenizer."""
    renderer: str = "auto"
    """How messages become tokens: a renderer of the package `renderers` by its name, `template` (the model's own chat
    template), or by the model's architecture."""
    quantise: Quantise = "none"
    """Hold the weights below adapters (`train.lora`) in 4 bits, `nf4` (needs the package bitsandbytes), or in `int8`.
    They are rounded once, and engine and learner have the same numbers (docs/guides/training.md); the engine holds them
    written out, in 16 or 32 bits."""
    thinking: bool = False
    """Let the model reason before it answers, where its template has a switch."""


class Source(Section):
    """One of several sources of training tasks, whose tasks share the batches."""

    source: str
    """A task source of `crrl data list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Passed to the source."""
    split: str = "train"
    """Tasks of this split are trained on."""
    weight: float = Field(default=1.0, gt=0)
    """Its part of the batches, over the sum of all weights."""
    kind: str = ""
    """The kind of its tasks that have none themselves."""
    first_step: int = Field(default=1, ge=1)
    """Its tasks are in the batches from this step on,"""
    last_step: int | None = Field(default=None, ge=1)
    """and up to this one; unset is to the end."""

    @model_validator(mode="after")
    def _in_order(self) -> Source:
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(f"last_step={self.last_step} comes before first_step={self.first_step}")
        return self


class Tasks(Section):
    """What is trained on."""

    source: str = "jsonl"
    """A task source of `crrl data list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Passed to the source, for example `path`."""
    split: str = "train"
    """Tasks of this split are trained on."""
    sources: tuple[Source, ...] = ()
    """Several sources in place of the one above, as `[[tasks.sources]]`, each with its part of the batches."""
    verify: bool = True
    """Before the first step, ask every reward that measures repair about references, in the sandbox
    (docs/guides/rewards.md): all up to 50, else 3 of each environment. One that earns less than 1 is refused, and so is
    a patch without effect that earns more than 0. What held is remembered until task, checks, sandbox or packages
    change."""
    verified_references: int = Field(default=0, ge=0)
    """So many repairs of the policy's own that passed a task's checks in earlier steps become further references of the
    task; `patch_edits`, `patch_lines` and `hybrid` compare with the nearest (docs/guides/rewards.md). Needs checks to
    be run: `reward.tests=0` at least."""
    holdout: float | None = Field(default=None, ge=0, le=1)
    """Share of the tasks, by the MD5 of their ids, that `crrl collect` attempts and training leaves out. Unset,
    `crrl collect` takes a quarter, and training leaves out none."""
    learned: Literal["refuse", "train"] = "refuse"
    """Of tasks whose trajectories the model was fine-tuned on (`crrl sft`): refuse to train on them again, or do so."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Of training tasks whose first request leaves no room for a reply, in tokens: refuse the run, or leave them out.
    Held-out ones are never left out: it would be another benchmark."""

    @model_validator(mode="after")
    def _one_or_several(self) -> Tasks:
        if self.sources and (self.source != "jsonl" or self.options):
            raise ValueError("sources stand in place of source and options: leave these out")
        kinds: dict[tuple[str, str], str] = {}
        for each in self.sources:  # held-out tasks of the source have its kind, too: it must be one
            if kinds.setdefault((each.source, repr(each.options)), each.kind) != each.kind:
                raise ValueError(f"source {each.source!r} has two kinds with the same options: give its tasks theirs")
        for step in (1, *(each.last_step + 1 for each in self.sources if each.last_step)):
            if self.sources and not any(each.first_step <= step <= (each.last_step or step) for each in self.sources):
                raise ValueError(
                    f"no source has tasks for step {step}: leave out the last_step of one, or set it higher"
                )
        return self


class EasyFirst(Section):
    """Easy tasks first: tasks are drawn at random from a pool that begins with the easiest and grows step by step; once
    it has all of them come epochs. Tasks need a `difficulty`, or `probe` says how often each was solved."""

    steps: int = Field(default=20, ge=1)
    """The step from which on all tasks are in."""
    probe: str = ""
    """A file of attempts at the tasks (docs/guides/curriculum.md): one that was solved less often is harder. Empty is
    the tasks' own difficulty."""


class Band(Section):
    """Tasks of middling difficulty for the policy as it is: those whose running success rate lies within a band. A
    success is a repair that passed its checks; where none are run, the reward stands for it."""

    low: float = Field(default=0.15, ge=0, le=1)
    """The rate is at least this. One success and one failure are added to it: of 8 failures it is 0.1."""
    high: float = Field(default=0.85, ge=0, le=1)
    """And at most this."""
    explore: float = Field(default=0.5, ge=0, lt=1)
    """The part of the batches that goes to tasks never attempted, while there are any."""
    outside: float = Field(default=0.1, ge=0, lt=1)
    """The part that goes to tasks outside the band, which may have come into it; 0 never draws one again."""
    newest: int = Field(default=16, ge=1)
    """Newest attempts at a task that its rate is taken over."""
    probe: str = ""
    """A file of attempts before the run, as for `easy_first`: they count until there are newer ones."""

    @model_validator(mode="after")
    def _something_within(self) -> Band:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} exceeds high={self.high:g}")
        if self.explore + self.outside >= 1:
            raise ValueError("explore and outside leave nothing for the tasks within: let them sum to less than 1")
        return self


def _short(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Short = BeforeValidator(_short)


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


class Agent(Section):
    """Who works on a task."""

    name: str = "nano"
    """An agent of `crrl agents list`, a recipe file, or `module:Class`."""
    options: dict[str, Any] = {}
    """Passed to the agent: see docs/guides/agents.md."""


class Sandbox(Section):
    """Where the agent's commands run."""

    name: str = "auto"
    """`auto`: bwrap where it works, else sandlock where the kernel allows, never anything weaker; `unsafe-local` must
    be asked for by name."""
    options: dict[str, Any] = {}
    """Passed to the sandbox: limits on memory, processes, file size and output."""


class Engine(Section):
    """Who samples."""

    name: str = "tiny"
    """An inference engine: `tiny` (CPU, embedded), `vllm`, or `module:Class` (docs/guides/engines.md)."""
    options: dict[str, Any] = {}
    """Passed to the engine, for example `lora_rank`."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs that a server of ours sees, counted among those that `crrl` sees; empty is all of them
    (docs/guides/cluster.md)."""
    share_devices: bool | Literal["turns"] = False
    """Let engine and learner have the same GPUs. With `true` neither makes room for the other: limit the engine's
    memory. With `turns` the engine sleeps while the learner steps, and what the learner holds is in the host's memory
    while the engine samples (docs/guides/cluster.md): `vllm` and one learner process. Not yet run on a GPU."""
    weights: Literal["file", Route] = "file"
    """How full weights reach it: as files, or tensor by tensor without one, which only `vllm` takes: `gloo` through the
    host's memory, on one machine; `ipc` through memory that both have open, of the one GPU that they share, or of the
    host where there is none; `nccl` between GPUs. The last two have not yet run on any. Adapters are always files."""
    weights_dir: str = ""
    """A folder that the engine sees too, where weights lie on their way to it; empty is in memory. An engine on another
    machine needs one on a shared file system."""


class RayCluster(Section):
    """Episodes on a Ray cluster: actors, each with a gateway, agents and sandboxes of its own
    (docs/guides/cluster.md)."""

    address: str = "auto"
    """The cluster: `auto` is the one that this machine belongs to, `HOST:PORT` one by name, and `local` starts one on
    this machine alone."""
    episodes: int = Field(default=8, ge=1)
    """Episodes at once of an actor. As many actors are asked for as `rollout.concurrency` takes."""
    cpus: float = Field(default=1.0, gt=0)
    """Of a machine's CPUs what an actor claims, so how many Ray places on it."""
    patience: float = Field(default=300.0, gt=0)
    """Seconds that a run waits while the cluster has no actor for it, before it ends."""


class Rollout(Section):
    """How episodes are made."""

    executor: Literal["local", "ray"] = "local"
    """Where: on this machine, or on the machines of a Ray cluster (docs/guides/cluster.md)."""
    ray: RayCluster = RayCluster()

    tasks_per_step: int = Field(default=4, ge=1)
    """Tasks in a batch."""
    group_size: int = Field(default=8, ge=2)
    """Attempts at each task, which share a baseline."""
    concurrency: int = Field(default=16, ge=1)
    """Episodes in flight at once."""
    max_staleness: int = Field(default=0, ge=0)
    """By how many policy versions a training sample may be older than the weights that learn from it. 0: engine and
    learner take turns. Above 0 the engine goes on while the learner steps (docs/guides/training.md)."""
    temperature: float = Field(default=1.0, gt=0)
    """Of training samples. Nothing else may shape the distribution that is trained on."""
    calls: int = Field(default=30, ge=1)
    """Tool calls an episode may make."""
    tokens: int = Field(default=10_240, ge=16)
    """Longest sequence of an episode, prompt and tool results included."""
    seconds: float = Field(default=60.0, gt=0)
    """Wall time an episode may take."""
    turn_tokens: int = Field(default=4_096, ge=1)
    """Tokens of one reply."""
    history_policy: HistoryPolicy = "splice"
    """What the policy sees of its own replies: the tokens it sampled, wherever a client repeats their text, or the
    conversation as the client sent it, rendered anew at each call (docs/reference/gateway.md)."""
    side_calls: SideCalls | None = None
    """Which calls beside the agent's main conversation are trained: none (`mask`), those that were given tools
    (`tools`), all (`train`). Unset is what the agent's recipe says (docs/guides/agents.md)."""


class TaskKind(Section):
    """What is otherwise for the tasks of one kind (their field `kind`); what is left out is that of the run."""

    agent: Annotated[Agent | None, Short] = None
    """Who works on them."""
    reward: Annotated[dict[str, float], BeforeValidator(_weights)] = {}
    """What their attempts are paid for, and measured by."""
    calls: int | None = Field(default=None, ge=1)
    """As `rollout.calls`."""
    tokens: int | None = Field(default=None, ge=16)
    """As `rollout.tokens`, and no more than these."""
    seconds: float | None = Field(default=None, gt=0)
    """As `rollout.seconds`."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """As `rollout.turn_tokens`."""
    weight: float = Field(default=1.0, gt=0)
    """Factor on its advantages, and so on its part of the loss (`train.balance_kinds`)."""


class Gateway(Section):
    """What agents talk to."""

    accept: tuple[str, ...] = ()
    """Names of models that agents may ask for beside `policy`; empty allows every name. The policy replies under any
    of them, and each turn has the name that was asked for (docs/reference/gateway.md)."""


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
    experts: bool = False
    """Beside these, adapters of the same rank on every expert of a mixture (docs/reference/models.md)."""

    @property
    def scaling(self) -> float:
        """Factor on the adapters' product.

        >>> Lora(rank=8).scaling
        8.0
        """
        return self.alpha / self.rank


def _switch(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


class Curriculum(Section):
    """Which tasks are attempted when (docs/guides/curriculum.md); by default all of them in each epoch, in an order
    drawn by `run.seed`."""

    easy_first: Annotated[EasyFirst | None, BeforeValidator(_switch)] = None
    """`true`, or a table."""
    band: Annotated[Band | None, BeforeValidator(_switch)] = None
    """`true`, or a table. Not both."""
    refill: int = Field(default=0, ge=0)
    """Up to so many further groups a step in place of those whose attempts all earned the same, until
    `rollout.tasks_per_step` groups have something to teach (dynamic sampling, arXiv 2503.14476). Needs
    `train.denominator="informative"`, which leaves the others out of the batch's average; of no use with a
    `train.value_head`, which learns from them, too."""

    @model_validator(mode="after")
    def _one_order(self) -> Curriculum:
        if self.easy_first is not None and self.band is not None:
            raise ValueError("easy_first and band are two orders: leave one out")
        return self


class Learning(Section):
    """How a batch becomes an update, as the learner's process reads it, too."""

    algorithm: Algorithm = "gspo"
    """The loss (docs/reference/algorithms.md); `sft`, of `crrl sft`, is cross-entropy on the examples of `data`."""
    lr: float = Field(default=1e-4, gt=0)
    """Learning rate of AdamW, after warm-up and before decay (of Muon's matrices: `muon_lr`)."""
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
    """Weight of the KL term against the initial weights. For `sft` it is over the whole vocabulary, KL(initial ||
    trained)."""
    kl: KLEstimator | None = None
    """How it is estimated from the sampled tokens (docs/reference/algorithms.md); unset is `k3`, in the reward `k1`."""
    kl_in: KLPlace | None = None
    """Whether it is a term of the loss, or taken from the reward of each episode before rewards are compared; unset is
    the algorithm's own: `reward` for `rloo`, `loss` for the others."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of a bonus for the entropy over the vocabulary, the mean over the trained tokens (exploration)."""
    value_head: bool = False
    """With `ppo`: predict the return of each context by a linear head on the policy's last hidden state, as the
    baseline of each token (docs/reference/algorithms.md)."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """With `value_head`: what a reward is worth a token earlier; unset is 1."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """With `value_head`: how far an advantage looks at rewards before it takes values for them (arXiv 1506.02438);
    unset is 1: to the end."""
    value_weight: float | None = Field(default=None, gt=0)
    """Weight of the value loss; unset is 0.1."""
    value_clip: float | None = Field(default=None, gt=0)
    """How far a value may move in a batch before the loss no longer pulls it; unset is 0.2."""
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
    """The importance ratio is clipped below 1 - eps_low; unset is the algorithm's own. For `dppo` it is how far a
    token's probability may fall."""
    eps_high: float | None = Field(default=None, ge=0)
    """And above 1 + eps_high; for `dppo` how far a probability may rise."""
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
    mismatch_cap: float | None = Field(default=None, ge=1)
    """Truncation of the weights of `mismatch_correction`, at least 1; unset is 2."""
    mismatch_mask: float | None = Field(default=None, gt=1)
    """With `recomputed`: rows whose ratio of learner to engine, the geometric mean over their tokens, is above this or
    below its inverse are not learned from. Unset: all are."""
    micro_tokens: int = Field(default=8_192, ge=16)
    """Tokens of one forward pass, common beginnings of rows counted once; gradients are accumulated over the batch."""
    lora: Annotated[Lora | None, BeforeValidator(_switch)] = None
    """Train adapters instead of all weights: `true`, or a table of `rank`, `alpha` and `targets`."""
    precision: Precision = "fp32"
    """Of matrix products. Trained weights, gradients and optimiser state are float32; with `bf16` the weights below
    adapters, and all weights that an engine is given, are bfloat16."""
    head: Head = "fp32"
    """Of the products with the output head: float32 under `bf16` as well, or `model`: that of the other products."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and compute the rest again in the backward pass."""
    optimizer: OptimizerName = "adamw"
    """`adamw_8bit` keeps its moments in 8 bits, and needs the package bitsandbytes. `muon` (Jordan et al., 2024) moves
    matrices by their momentum made orthogonal, and embeddings, head and norms as AdamW does: for whole models, of small
    ones above all."""
    muon_lr: float | None = Field(default=None, gt=0)
    """With `optimizer="muon"`: the learning rate of matrices, with the schedule of `lr`; unset is 0.02."""
    attention: Attention = "rows"
    """`rows` is torch's own on any device; `flash_attention_2` needs a GPU, bf16 and the package flash-attn."""
    processes: int = Field(default=1, ge=1)
    """Learner processes, one per device, that share each batch: on this machine, or spread over `train.nodes`."""
    strategy: Strategy = "ddp"
    """What they share beside it: nothing, with `zero2` gradients and optimiser state, with `fsdp2` or `zero3` weights
    too. `zero2` and `zero3` need the package deepspeed."""


def _one(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Data(Section):
    """What `crrl sft` learns from (docs/guides/sft.md)."""

    paths: Annotated[tuple[str, ...], BeforeValidator(_one)] = ()
    """Runs of `crrl collect`, or Parquet files of such examples; several as a list."""
    batch: int = Field(default=32, ge=1)
    """Examples of a step."""
    epochs: float | None = Field(default=None, gt=0)
    """How often each example comes, in a new order each time; it decides `run.steps`. Unset: `run.steps` decides."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tasks whose examples are measured and not trained on: those whose ids have the lowest MD5, salted,
    so that they are others than those a source holds out."""
    every: int = Field(default=0, ge=0)
    """Steps between two measurements of the held-out examples; 0: before the first step and after the last."""
    patience: int = Field(default=0, ge=0)
    """Stop after so many measurements without a new lowest held-out loss; only steps that have one leave a checkpoint.
    0: never."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest sequence; unset: as long as the model reads."""
    unfit: Literal["refuse", "drop"] = "refuse"
    """What becomes of examples that are longer, or that the model's template cannot write: nothing starts, or they are
    left out, counted and named."""


class Train(Learning):
    """How episodes become an update."""

    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    """In place of `warmup_updates` and `decay_updates`: the share of the run's updates over which the learning rate
    rises; over the others it falls to zero along half a cosine."""

    denominator: Denominator = "episodes"
    """What the loss is averaged over: all episodes that are not void, as in the papers, or only those of groups whose
    rewards differ. With `beta` above 0, `episodes` also trains groups whose rewards are all equal, at advantage 0."""
    balance_kinds: bool = False
    """Give each kind of tasks in a batch its part of the loss by `kinds.NAME.weight`, and not by how many episodes it
    has, or tokens where the loss adds these up: one with few short replies is not drowned by the others. Not with a
    `value_head`, which learns rewards as they are."""
    mismatch_correction: Literal["auto", Correction] = "auto"
    """With `recomputed`: weight each token, or each row, by learner over engine, cut at `mismatch_cap`; `icepop` leaves
    out tokens whose weight is above it or below its inverse (IcePop). `auto` is `token` with `recomputed` where either
    computes in half precision, else `off`."""
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
    nodes: int = Field(default=1, ge=1)
    """Machines that the learner's processes are on, this one included, as many on each (docs/guides/cluster.md)."""
    rendezvous: str = ""
    """With `nodes`: HOST:PORT of this machine where the others find it, with `crrl learner HOST:PORT --node N`."""
    learner: str = ""
    """The socket of a learner that several runs of adapters share, with one copy of the frozen model
    (docs/guides/training.md); empty: one of the run's own."""
    node_seconds: float = Field(default=600.0, gt=0)
    """With `nodes`: how long the others may take to come, at the start and after one has left."""
    patience: float = Field(default=3600.0, gt=0)
    """Seconds that the learner may take for one step, or to send or save weights: after that it is taken for hung,
    killed and restarted (run.retries)."""

    @property
    def processes_here(self) -> int:
        """Learner processes on this machine."""
        return self.processes // self.nodes

    @model_validator(mode="after")
    def _on_nodes(self) -> Train:
        if self.processes % self.nodes:
            raise ValueError(f"nodes={self.nodes} do not divide processes={self.processes}: as many are on each")
        if (self.nodes > 1) != bool(self.rendezvous):
            raise ValueError("nodes, if there are several, and rendezvous belong together: set both or neither")
        return self

    @model_validator(mode="after")
    def _shares_its_learner(self) -> Train:
        if not self.learner:
            return self
        if self.lora is None:
            raise ValueError("a learner that several runs share holds a frozen model: lora=true, or leave learner out")
        if self.processes > 1:
            raise ValueError(f"processes={self.processes}, and a learner that several runs share is one process")
        if self.devices:
            raise ValueError(
                "devices are those of a learner of the run's own: leave it out, and start the shared one with"
                " CUDA_VISIBLE_DEVICES"
            )
        return self

    @model_validator(mode="after")
    def _one_schedule(self) -> Train:
        if self.warmup_ratio is not None and (self.warmup_updates or self.decay_updates):
            raise ValueError("warmup_ratio stands in place of warmup_updates and decay_updates: leave these out")
        return self


class Gpu(Section):
    """What each GPU is taken to be by the plan of `--dry-run` (docs/guides/training.md). Nothing else depends on it."""

    memory_gb: float = Field(default=0.0, ge=0)
    """GB (10^9 bytes) of memory; 0 asks the driver. Where neither says it, nothing is refused."""
    tflops: float = Field(default=312.0, gt=0)
    """Peak of dense bf16 products in TFLOP/s; the default is an A100's."""
    bandwidth_gb: float = Field(default=2_000.0, gt=0)
    """Memory bandwidth in GB/s; the default is an A100's of 80 GB."""
    utilisation: float = Field(default=0.0, ge=0, le=1)
    """The share of both that training and sampling are taken to reach; 0 is what the learner's products reached on an
    H100 with a model of this size, or the next smaller one (docs/measurements/performance.md)."""


class Plan(Section):
    """What the plan of `--dry-run` takes attempts to be (docs/guides/training.md). Nothing else depends on it."""

    run: str = ""
    """The folder of a run: its training attempts are drawn, turn by turn, in place of what the settings below say, and
    where it had the same model and engine, these are taken to be as fast as they were in it."""
    calls: float = Field(default=0.0, ge=0)
    """Calls of an attempt to the model, on average; 0: it goes on until a limit ends it."""
    prompt: int = Field(default=1000, ge=1)
    """Tokens that an attempt begins with, and shares with its group."""
    call_tokens: int = Field(default=0, ge=0)
    """That a further call adds, half of them sampled; 0: so many that the calls allowed reach the tokens allowed."""
    call_seconds: float = Field(default=0.2, ge=0)
    """Between a reply and the next call, for the tools."""
    attempt_seconds: float = Field(default=1.0, ge=0)
    """To open a sandbox, take the diff and grade it."""


class Eval(Section):
    """Evaluation on held-out tasks: before the first step, every so many, and after the last."""

    every: int = Field(default=0, ge=0)
    """0: before and after only."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    source: str = ""
    """Task source of the held-out tasks; empty is that of `tasks`."""
    options: dict[str, Any] = {}
    """Its options; empty is those of `tasks`, if it is the same source."""
    split: str = "test"
    """Tasks of this split are evaluated."""
    tasks: int = Field(default=0, ge=0)
    """A sample of so many held-out tasks, drawn by `run.seed`, the same at every evaluation; 0 is all of them."""
    attempts: int = Field(default=1, ge=1)
    """Attempts at each held-out task."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Only the k likeliest tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this likely relative to the likeliest; 0 is off."""
    reward: dict[str, float] = {}
    """What is measured; empty is the training reward."""
    agent: Annotated[Agent | None, Short] = None
    """Who works on the tasks; empty is the run's agent. Kinds of tasks with an agent of their own keep it."""
    also: dict[str, dict[str, Any]] = {}
    """Further evaluations at the same steps, by name, and what each does otherwise: `{greedy = {temperature = 0}}`."""

    @property
    def each(self) -> dict[str, Eval]:
        """Every evaluation by name: this one is ``eval``. Further ones add to its `options`, but where they name a
        source of their own."""
        base = self.model_dump(exclude={"also"})
        return {"eval": self} | {
            name: Eval(
                **base | other | {"options": ({} if "source" in other else self.options) | other.get("options", {})}
            )
            for name, other in self.also.items()
        }

    @field_validator("also")
    @classmethod
    def _further(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, other in value.items():
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in ("eval", "train"):
                raise ValueError(f"an evaluation cannot be called {name!r}: small letters, and not eval or train")
            if unknown := set(other) - _VARIED:
                raise ValueError(f"{name}.{min(unknown)}: a further evaluation varies {', '.join(sorted(_VARIED))}")
            Eval(**other)
        return value

    @field_validator("reward", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {value: 1.0} if isinstance(value, str) else value


def _words(value: Any) -> Any:
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


class Keep(Section):
    """What `crrl collect` and `crrl select` keep of the attempts, filter after filter in this order
    (docs/guides/collect.md)."""

    endings: Annotated[tuple[Literal["done", "limit", "crash"], ...], BeforeValidator(_words), Field(min_length=1)] = (
        "done",
    )
    """Only attempts that ended so; several as a list, or with commas between them."""
    holdout: float = Field(default=1.0, gt=0, le=1)
    """Only tasks that training with this `tasks.holdout` leaves out; 1 is all of them."""
    models: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    """Of a server: only attempts all of whose replies are by models of these names, as the server calls them."""
    well_formed: bool = True
    """Only conversations whose every tool call has a JSON object as arguments and names a tool that was offered."""
    above: float = 0.0
    """Only attempts that earned more."""
    passed: bool = False
    """Only attempts whose patch passed the task's checks."""
    scores: dict[str, float] = {}
    """Only attempts with at least this score of each reward, for example `{build = 1}`."""
    unjudged: bool = False
    """The three above let through what was never judged, such as published trajectories without a verdict."""
    distinct: Literal["patch", "conversation", "no"] = "patch"
    """Of attempts at a task that made the same patch, or had the same conversation, only the one with the highest
    reward. Empty patches count as different where the conversations are."""
    best: int = Field(default=0, ge=0)
    """Of each task the so many attempts with the highest reward; 0 is all of them, here and below."""
    per_repository: int = Field(default=0, ge=0)
    """At most so many attempts of a repository, in turn from its tasks."""
    per_language: int = Field(default=0, ge=0)
    """At most so many attempts of a language, in turn from its repositories."""
    total: int = Field(default=0, ge=0)
    """At most so many attempts, in turn from the languages."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Draws which ones, where the last three leave some out."""


_VARIED = {"source", "split", "options", "tasks", "attempts", "temperature", "top_p", "top_k", "min_p", "agent"}
"""What a further evaluation may do otherwise: it shares its steps, its reward and all limits with the first."""


class Config(Section):
    """A whole run. See docs/reference/config.md."""

    run: Run
    model: Model = Model()
    tasks: Tasks = Tasks()
    curriculum: Curriculum = Curriculum()
    agent: Annotated[Agent, Short] = Agent()
    sandbox: Annotated[Sandbox, Short] = Sandbox()
    engine: Annotated[Engine, Short] = Engine()
    reward: dict[str, float] = {"patch_edits": 1.0}
    """Rewards by name with their weights; weight 0 measures without paying."""
    rollout: Rollout = Rollout()
    kinds: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")], TaskKind] = {}
    """By kind of task, as `[kinds.NAME]`."""
    gateway: Gateway = Gateway()
    data: Data = Data()
    train: Train = Train()
    eval: Eval = Eval()
    keep: Keep = Keep()
    gpu: Gpu = Gpu()
    plan: Plan = Plan()
    log: Annotated[tuple[Tracker, ...], BeforeValidator(_several)] = ()
    """Trackers that get the metrics of each step and evaluation beside the run folder, as `log = ["tensorboard"]` above
    all sections (docs/guides/trackers.md). What they lack can be sent later: `crrl export RUN --to wandb`."""

    @field_validator("reward", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {value: 1.0} if isinstance(value, str) else value

    @field_validator("log")
    @classmethod
    def _once(cls, value: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if not any(self.reward.values()):
            raise ValueError("reward: at least one weight must differ from 0")
        if self.rollout.turn_tokens > self.rollout.tokens:
            raise ValueError("rollout.turn_tokens exceeds rollout.tokens")
        for name, kind in self.kinds.items():
            tokens = kind.tokens or self.rollout.tokens
            if tokens > self.rollout.tokens:
                raise ValueError(f"kinds.{name}.tokens exceeds rollout.tokens, which bounds a row of the batch")
            if (kind.turn_tokens or 0) > tokens:
                raise ValueError(f"kinds.{name}.turn_tokens exceeds its tokens")
            if kind.reward and not any(kind.reward.values()):
                raise ValueError(f"kinds.{name}.reward: at least one weight must differ from 0")
        train, episodes = self.train, self.rollout.tasks_per_step * self.rollout.group_size
        if self.curriculum.refill and train.value_head:
            raise ValueError(
                "curriculum.refill replaces groups that teach nothing, and a value head learns from every episode:"
                " leave one of them out"
            )
        if train.balance_kinds and train.value_head:
            raise ValueError(
                "train.balance_kinds scales advantages by what a batch has of each kind, and a value head would learn"
                " returns whose scale changes from batch to batch: leave one of them out (kinds.NAME.weight is a"
                " constant factor)"
            )
        if self.curriculum.refill and train.denominator != "informative":
            raise ValueError(
                "curriculum.refill leaves groups out of the batch that train.denominator='episodes' averages over: set"
                " train.denominator='informative'"
            )
        if train.value_head and train.denominator == "informative":
            raise ValueError(
                "train.denominator='informative' leaves out groups of equal rewards, and a value head learns from every"
                " episode: leave it out"
            )
        limits = {"rollout.tokens": self.rollout.tokens}
        limits |= {f"kinds.{name}.tokens": kind.tokens for name, kind in self.kinds.items() if kind.tokens}
        shortest = min(limits, key=lambda name: limits[name])
        if train.overlong_buffer >= limits[shortest]:
            raise ValueError(f"train.overlong_buffer={train.overlong_buffer} is no less than {shortest}")
        measured = {*self.reward}.union(*(kind.reward for kind in self.kinds.values()))
        if unknown := sorted({*train.tie_break} - measured):
            raise ValueError(f"train.tie_break: {unknown[0]} is not measured: add it to reward, with weight 0")
        if train.minibatches > episodes:
            raise ValueError(f"train.minibatches={train.minibatches} of the {episodes} episodes of a step")
        updates = self.run.steps * train.updates_per_batch * train.minibatches
        if 0 < train.decay_updates < updates - train.warmup_updates:
            raise ValueError(f"train.decay_updates={train.decay_updates} ends before the run's {updates} updates")
        return self
