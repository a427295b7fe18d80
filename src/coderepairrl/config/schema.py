"""Typed settings of a run by section, with defaults, bounds and meaning; implementations are given by name.

A section written as a string is its `name`: `engine=tiny` is `engine.name=tiny`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from os.path import expanduser
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from coderepairrl.types import SideCalls

GateName = Literal[
    "skipped", "nothing_sampled", "zero_reward", "no_gradient", "perplexity", "kl", "over_optimisation",
]  # fmt: skip
Route = Literal["gloo", "nccl"]
"""Transport of whole models to an engine without a file."""
Algorithm = Literal["gspo", "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "ppo", "rloo", "reinforce", "sft"]
OldLogprobs = Literal["recorded", "recomputed"]
Precision = Literal["fp32", "bf16"]
Quantise = Literal["none", "nf4"]
OptimizerName = Literal["adamw", "adamw_8bit"]
Strategy = Literal["ddp", "fsdp2", "zero2", "zero3"]
Correction = Literal["off", "token"]
Baseline = Literal["zscore", "mean", "leave_one_out", "batch", "none"]
_VARIED = {"source", "split", "options", "tasks", "attempts", "temperature", "top_p", "top_k", "min_p", "agent"}
"""Settings that an evaluation of `also` may change; steps, reward and limits are those of `eval`."""
Tracker = Literal["tensorboard", "trackio", "wandb"]
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
KIND_NAME = r"^[a-z][a-z0-9_-]*$"


class Section(BaseModel):
    """Base of all sections: rejects unknown keys; values are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


Short = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
"""A section written as its `name`."""
Folder = Annotated[str, AfterValidator(expanduser)]
"""A folder; `~` is expanded, since shells do not expand it in ``KEY=~/VALUE``."""
OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
"""A list written as its one item."""
Words = BeforeValidator(lambda value: [word.strip() for word in value.split(",")] if isinstance(value, str) else value)
"""A list written with commas."""
Weights = BeforeValidator(lambda value: {value: 1.0} if isinstance(value, str) else value)
"""Weights written as one name, with weight 1."""
Switch = BeforeValidator(lambda value: ({} if value else None) if isinstance(value, bool) else value)
"""A section written as `true` (defaults) or `false` (none)."""


class Health(Section):
    """Health gates: rules that stop a run which does not learn or whose numbers are unsound (exit code 4, resumable;
    docs/guides/training.md).
    """

    action: Literal["stop", "warn"] = "stop"
    """`stop` stops the run, since one that cannot learn costs GPU-hours; `warn` only warns."""
    patience: int = Field(default=10, ge=2)
    """Consecutive steps with a problem before the run stops; after half as many it warns. Single steps are noise."""
    off: tuple[GateName, ...] = ()
    """Gates to switch off (docs/guides/training.md lists them)."""


class Run(Section):
    """Name, place and length of a run."""

    name: str = Field(min_length=1, pattern=RUN_NAME)
    """Name of the run's folder in `dir`. Required: it is how a run is found."""
    dir: Folder = "runs"
    """Folder that holds the run folders."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of all randomness: task order, sampling, random weights."""
    steps: int = Field(default=20, ge=0, le=1_000_000)
    """Training steps; each attempts a batch of tasks and updates the weights. The default is a trial, not a
    training."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always has one. A resumed run recomputes later steps from its log."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep; the second serves if the newest is damaged."""
    health: Health = Health()
    """Warnings and stops for runs that learn badly or not at all."""
    retries: int = Field(default=2, ge=0)
    """Retries of a void episode (one that the infrastructure broke), and restarts in a row of a dead engine or
    learner."""


class Gpu(Section):
    """Assumptions about each GPU in the plan of `--dry-run`; nothing else uses them (docs/guides/plan.md)."""

    memory_gb: float = Field(default=0.0, ge=0)
    """Memory in GB (10^9 bytes). 0 asks the driver; without a driver, memory is not checked."""
    tflops: float = Field(default=312.0, gt=0)
    """Peak speed in dense bf16 TFLOP/s; the default is an A100's."""
    bandwidth_gb: float = Field(default=2_000.0, gt=0)
    """Memory bandwidth in GB/s; the default is that of an A100 with 80 GB."""


class Plan(Section):
    """Assumptions about episodes and speeds in the plan of `--dry-run`; nothing else uses them
    (docs/guides/plan.md).
    """

    tokens: int = Field(default=0, ge=0)
    """Mean tokens per episode. 0 assumes the most that `rollout.tokens` and `rollout.seconds` allow."""
    engine_tokens_per_second: float = Field(default=0.0, ge=0)
    """Tokens that the engine samples per second for all episodes together: a short run's metric `tokens_per_second`.
    0 estimates it from `gpu`."""
    learner_tokens_per_second: float = Field(default=0.0, ge=0)
    """Tokens per second of all learner processes together: a short run's `learn/row_tokens` divided by
    `learn_seconds`. 0 estimates it from `gpu`."""


class Agent(Section):
    """The agent that works on tasks."""

    name: str = "nano"
    """An agent of `crrl agents list`, a recipe file, or `module:Class`."""
    options: dict[str, Any] = {}
    """Options of the agent (docs/guides/nano.md, docs/guides/agents.md)."""


class Sandbox(Section):
    """The sandbox of the agent's commands."""

    name: str = "auto"
    """Backend: `bwrap`, `sandlock`, `docker`, `podman` or `module:Class`. `auto` takes bwrap if it works, else
    sandlock. `unsafe-local` isolates nothing, so it must be named."""
    options: dict[str, Any] = {}
    """Limits on memory, processes, files and time, and options of the backend (docs/guides/sandbox.md)."""


class Engine(Section):
    """The inference engine, which samples the policy's tokens."""

    name: str = "tiny"
    """`tiny` (on the CPU), `vllm`, or `module:Class` (docs/guides/engines.md)."""
    options: dict[str, Any] = {}
    """Options of the engine, for example `context` (docs/guides/engines.md)."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the server that `crrl` starts, as indices among those that it sees; empty takes all
    (docs/guides/cluster.md)."""
    share_devices: bool | Literal["turns"] = False
    """Whether engine and learner may use the same GPU. `true`: both stay in its memory, so limit the engine. `turns`
    (`vllm`, one learner process; untested on GPUs): the engine sleeps while the learner steps, and the learner's state
    is in host memory while the engine samples (docs/guides/cluster.md)."""
    weights: Literal["file", Route] = "file"
    """How full weights reach the engine: as a file, or, for `vllm`, as tensors by `gloo` (host memory of one machine)
    or `nccl` (between GPUs; untested). `file` works everywhere. Adapters are always files."""
    weights_dir: Folder = ""
    """Folder for weights on their way to the engine; empty is `/dev/shm`. An engine on another machine needs a folder
    on a shared file system."""


class RayCluster(Section):
    """Episodes on a Ray cluster: actors, each with a gateway, agents and sandboxes (docs/guides/cluster.md)."""

    address: str = "auto"
    """`auto` (the cluster of this machine), `HOST:PORT`, or `local`, which starts one on this machine."""
    episodes: int = Field(default=8, ge=1)
    """Concurrent episodes per actor, which claims one CPU; `rollout.concurrency` decides the number of actors."""


class Rollout(Section):
    """Batches and limits of episodes."""

    executor: Literal["local", "ray"] = "local"
    """Run episodes on this machine, or on a Ray cluster (docs/guides/cluster.md)."""
    ray: RayCluster = RayCluster()
    """The Ray cluster, for `executor = "ray"`."""

    tasks_per_step: int = Field(default=4, ge=1)
    """Tasks per step; the default makes 32 episodes, the thesis's batch of an update."""
    group_size: int = Field(default=8, ge=2)
    """Attempts per task, compared with each other; the default is the thesis's."""
    concurrency: int = Field(default=16, ge=1)
    """Episodes at a time; the default is the thesis's."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest number of policy versions between the weights that sampled and those that learn. 0: engine and learner
    take turns, and all samples are on-policy; above 0 they work at the same time (docs/guides/training.md)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training episodes; 1 samples the distribution that is trained."""
    calls: int = Field(default=30, ge=1)
    """Most tool calls of an episode; the default is the thesis's."""
    tokens: int = Field(default=10_240, ge=16)
    """Longest sequence of an episode in tokens, prompt and tool results included; the default is the thesis's."""
    seconds: float = Field(default=60.0, gt=0)
    """Wall time of an episode in seconds, from the opening of its sandbox; the default is the thesis's."""
    turn_tokens: int = Field(default=4_096, ge=1)
    """Most tokens of a reply; the default is the thesis's."""
    side_calls: SideCalls | None = None
    """Which calls outside the agent's main conversation (titles, summaries, sub-agents) are trained: none (`mask`),
    those with tools (`tools`), all (`train`). Unset: as the agent's recipe says (docs/guides/agents.md)."""


class TaskKind(Section):
    """Settings for the tasks whose field `kind` is NAME; unset ones are the run's."""

    agent: Annotated[Agent | None, Short] = None
    """Agent of these tasks."""
    reward: Annotated[dict[str, float], Weights] = {}
    """Rewards of these tasks with their weights; weight 0 only measures."""
    calls: int | None = Field(default=None, ge=1)
    """Replaces `rollout.calls`."""
    tokens: int | None = Field(default=None, ge=16)
    """Replaces `rollout.tokens`, which it must not exceed."""
    seconds: float | None = Field(default=None, gt=0)
    """Replaces `rollout.seconds`."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """Replaces `rollout.turn_tokens`."""
    weight: float = Field(default=1.0, gt=0)
    """Factor on the advantages of these tasks; with `train.balance_kinds`, their share of the loss."""


class Source(Section):
    """One of several sources of training tasks that share the batches."""

    source: str
    """A task source of `crrl tasks list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Options of the source."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the tasks of a batch, relative to the sum of all weights."""
    kind: str = ""
    """Kind (section `kinds`) of its tasks that name none; empty: the run's settings."""


class Tasks(Section):
    """The training tasks."""

    source: str = "jsonl"
    """A task source of `crrl tasks list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Options of the source, for example `path`."""
    split: str = "train"
    """Split of the training tasks."""
    sources: tuple[Source, ...] = ()
    """Several weighted sources instead of `source`, as `[[tasks.sources]]`."""
    verify: bool = True
    """Test the reward before the first step, since a broken grader looks like a policy that repairs nothing: a
    reference must earn 1, a patch that changes nothing 0 (docs/guides/rewards.md). Up to 50 references, all are tested;
    beyond, 3 per environment; results are cached until task, checks, sandbox or packages change."""
    verified_references: int | None = Field(default=None, ge=0)
    """Repairs per task, made by the policy, that pass the checks and become further references of `patch_edits`,
    `patch_lines` and `hybrid` (docs/guides/rewards.md); checks must run, if only as `reward.tests=0`. Unset: 4 if
    `reward` is empty, all tasks have checks and references, and tasks are attempted twice; else 0."""
    holdout: float | None = Field(default=None, ge=0, le=1)
    """Share of the tasks, by MD5 of their ids, that `crrl collect` attempts and training leaves out. Unset: `crrl
    collect` attempts a quarter, and training takes all."""
    learned: Literal["refuse", "train"] = "refuse"
    """Refuse, or train on, tasks whose attempts the model was fine-tuned on (`crrl sft`): it may know them by heart."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """For training tasks whose first request leaves no tokens for a reply: refuse the run, or drop them. Evaluated
    tasks are never dropped, since that would change the benchmark."""

    @model_validator(mode="after")
    def _check_sources(self) -> Tasks:
        if self.sources and (self.source != "jsonl" or self.options):
            raise ValueError("sources replace source and options: leave these out")
        kinds: dict[tuple[str, str], str] = {}
        for each in self.sources:  # evaluated tasks of a source take its kind, so it must have one only
            if kinds.setdefault((each.source, repr(each.options)), each.kind) != each.kind:
                raise ValueError(
                    f"source {each.source!r} has two kinds with the same options: write `kind` in its tasks"
                )
        return self


class EasyFirst(Section):
    """Draw tasks from a pool that begins with the easiest and grows to all; then take all in epochs. Tasks need a
    `difficulty`, or `curriculum.probe`.
    """

    steps: int = Field(default=20, ge=1)
    """Steps until the pool has all tasks."""


class Band(Section):
    """Prefer tasks whose success rate over recent attempts is within a band, since a group that always succeeds or
    always fails teaches nothing. A success is a repair that passes its checks; without checks the reward counts.
    """

    low: float = Field(default=0.15, ge=0, le=1)
    """Least success rate, with one success and one failure added: 8 failures give 0.1."""
    high: float = Field(default=0.85, ge=0, le=1)
    """Greatest success rate."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Band:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} exceeds high={self.high:g}")
        return self


class Curriculum(Section):
    """Order of the tasks (docs/guides/curriculum.md); by default epochs in an order drawn by `run.seed`."""

    easy_first: Annotated[EasyFirst | None, Switch] = None
    """The easiest tasks first: `true`, or a table. Not with `band`."""
    band: Annotated[Band | None, Switch] = None
    """Tasks that the policy sometimes solves: `true`, or a table. Not with `easy_first`."""
    probe: Folder = ""
    """A run folder of `crrl eval` with earlier attempts (docs/guides/curriculum.md). Their success rate replaces
    `difficulty` for `easy_first`, and counts for `band` until the run has attempted the task."""
    refill: int = Field(default=0, ge=0)
    """Most further groups per step, which replace groups of equal rewards until `rollout.tasks_per_step` groups have
    different ones (dynamic sampling, arXiv 2503.14476); the loss averages over these alone. 0 is off: refilling
    costs attempts. Excludes `train.value_head`, which learns from every episode."""

    @model_validator(mode="after")
    def _check_order(self) -> Curriculum:
        if self.easy_first is not None and self.band is not None:
            raise ValueError("easy_first and band are two orders: leave one out")
        if self.probe and self.easy_first is None and self.band is None:
            raise ValueError("probe is read by easy_first and band alone: add one of them, or leave it out")
        return self


class Data(Section):
    """Examples for `crrl sft` (docs/guides/sft.md)."""

    paths: Annotated[tuple[str, ...], OneOrMore] = ()
    """Runs of `crrl collect`, or Parquet files of such examples."""
    batch: int = Field(default=32, ge=1)
    """Examples per step."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the examples, each in a new order; they decide the number of steps. Unset: `run.steps` does."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tasks, by salted MD5 of their ids, whose examples are not trained on; their loss is measured before
    the first step and after each epoch."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest example in tokens; unset is the model's context."""
    unfit: Literal["refuse", "drop"] = "refuse"
    """Examples longer than `max_tokens`, or that the template cannot render: refuse the run, or drop, count and
    name them."""


class Model(Section):
    """The policy."""

    path: str = "builtin:tiny"
    """A folder in Hugging Face layout, `org/name@revision` of the hub, or `builtin:NAME` for a shipped model."""
    init: Literal["weights", "random"] = "weights"
    """`weights` loads the model's; `random` draws them by `run.seed` and needs only config.json and a tokenizer."""
    quantise: Quantise = "none"
    """`nf4` holds the learner's base weights, under adapters (`train.lora`), in 4 bits (package bitsandbytes). The
    engine has the same values, rounded, in 16 or 32 bits (docs/guides/memory.md). It costs quality and time."""
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
    """AdamW's learning rate between warm-up and decay; the default suits adapters, 1e-5 all weights."""
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
    """Weight of the KL divergence from the initial weights, by the k3 estimator over sampled tokens
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
    advantage: Baseline | None = None
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
    """Tokens per forward pass, with shared prefixes counted once; they decide the activations' memory. Gradients
    accumulate over the batch."""
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
    def _check_listen_or_devices(self) -> Train:
        if self.listen and self.devices:
            raise ValueError(
                "devices are those of processes that the run starts: with listen, leave it out, and"
                " start torchrun with CUDA_VISIBLE_DEVICES"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Train:
        if self.warmup_ratio is not None and (self.warmup_updates or self.decay_updates):
            raise ValueError("warmup_ratio replaces warmup_updates and decay_updates: leave these out")
        return self


class Eval(Section):
    """Evaluation on held-out tasks, before, during and after training."""

    every: int = Field(default=0, ge=0)
    """Training steps between evaluations; 0 evaluates only before and after."""
    before: bool = True
    """Evaluate before the first step, so that the change can be measured."""
    after: bool = True
    """Evaluate after the last step."""
    source: str = ""
    """Source of the evaluated tasks; empty is `tasks.source`."""
    options: dict[str, Any] = {}
    """Options of the source; empty is `tasks.options`, for the same source."""
    split: str = "test"
    """Split of the evaluated tasks."""
    tasks: int = Field(default=0, ge=0)
    """Number of tasks, drawn by `run.seed` and the same at every evaluation; 0 takes all."""
    attempts: int = Field(default=1, ge=1)
    """Attempts per task; more tasks narrow an interval better than more attempts."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy, the default is that of training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Least probability of a token, as a share of the likeliest one's; 0 is off."""
    reward: Annotated[dict[str, float], Weights] = {}
    """Rewards to measure, with their weights. Empty: those of `reward`, or, if that is empty too, what the evaluated
    tasks allow (docs/guides/rewards.md)."""
    agent: Annotated[Agent | None, Short] = None
    """Agent; unset is the run's. `kinds.NAME.agent` comes first."""
    also: dict[str, dict[str, Any]] = {}
    """Further evaluations at the same steps, by name, each with its own settings: `{greedy = {temperature = 0}}`."""

    @property
    def is_due(self) -> bool:
        """Whether training evaluates at all."""
        return self.before or self.after or bool(self.every)

    @property
    def each(self) -> dict[str, Eval]:
        """All evaluations by name, this one as ``eval``; those of `also` extend its `options`, or name a source."""
        base = self.model_dump(exclude={"also"})
        return {"eval": self} | {
            name: Eval(
                **base | other | {"options": ({} if "source" in other else self.options) | other.get("options", {})}
            )
            for name, other in self.also.items()
        }

    @field_validator("also")
    @classmethod
    def _check_also(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        problems = []
        for name, other in value.items():
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in ("eval", "train"):
                problems.append(
                    f"an evaluation cannot be called {name!r}: use lower-case letters, digits and _, not eval or train"
                )
            varied = ", ".join(sorted(_VARIED))
            problems += [
                f"{name}.{key}: a further evaluation varies {varied}" for key in sorted(other.keys() - _VARIED)
            ]
            try:
                Eval(**{key: other[key] for key in other.keys() & _VARIED})
            except ValidationError as error:
                problems += [f"{name}.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        if problems:
            raise ValueError("\n".join(problems))
        return value


class Keep(Section):
    """Attempts that `crrl collect` keeps; filters apply in this order (docs/guides/collect.md)."""

    endings: Annotated[tuple[Literal["done", "limit", "crash"], ...], Words, Field(min_length=1)] = ("done",)
    """Endings of attempts to keep, as a list or comma-separated; at a limit an attempt is unfinished."""
    above: float = 0.0
    """Keep attempts with a higher reward. A negative value also keeps attempts without a reward, such as published
    trajectories."""
    passed: bool = False
    """Keep only attempts whose patch passed the task's checks."""
    best: int = Field(default=0, ge=0)
    """Attempts to keep per task, by highest reward; 0 keeps all."""
    total: int = Field(default=0, ge=0)
    """Most attempts to keep, drawn in turn from languages, repositories and tasks; 0 keeps all."""


class Config(Section):
    """A run's configuration (docs/reference/config.md)."""

    run: Run
    model: Model = Model()
    tasks: Tasks = Tasks()
    curriculum: Curriculum = Curriculum()
    agent: Annotated[Agent, Short] = Agent()
    sandbox: Annotated[Sandbox, Short] = Sandbox()
    engine: Annotated[Engine, Short] = Engine()
    reward: Annotated[dict[str, float], Weights] = {}
    """Rewards by weight; 0 only measures. If empty, the training tasks decide (docs/guides/rewards.md):
    `hybrid` if all have checks and references."""
    rollout: Rollout = Rollout()
    kinds: dict[Annotated[str, Field(pattern=KIND_NAME)], TaskKind] = {}
    """Settings by kind of task, as `[kinds.NAME]`."""
    data: Data = Data()
    train: Train = Train()
    eval: Eval = Eval()
    keep: Keep = Keep()
    gpu: Gpu = Gpu()
    plan: Plan = Plan()
    log: Annotated[tuple[Tracker, ...], OneOrMore] = ()
    """Trackers of step and evaluation metrics besides the run folder, as `log = ["tensorboard"]` above all sections
    (docs/guides/trackers.md). `crrl export RUN --to wandb` sends missing ones later."""

    @field_validator("log")
    @classmethod
    def _drop_repeated_trackers(cls, value: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _check_sections(self) -> Config:
        """Check sections against each other; the error has a line for each mistake."""
        if problems := [*self._find_wrong_limits(), *self._find_value_head_problems(), *self._find_batch_problems()]:
            raise ValueError("\n".join(problems))
        return self

    def _find_wrong_limits(self) -> Iterator[str]:
        if self.reward and not any(self.reward.values()):
            yield "reward: at least one weight must differ from 0"
        if self.rollout.turn_tokens > self.rollout.tokens:
            yield "rollout.turn_tokens exceeds rollout.tokens"
        for name, kind in self.kinds.items():
            tokens = kind.tokens or self.rollout.tokens
            if tokens > self.rollout.tokens:
                yield f"kinds.{name}.tokens exceeds rollout.tokens, which bounds a row of the batch"
            if (kind.turn_tokens or 0) > tokens:
                yield f"kinds.{name}.turn_tokens exceeds its tokens"
            if kind.reward and not any(kind.reward.values()):
                yield f"kinds.{name}.reward: at least one weight must differ from 0"

    def _find_value_head_problems(self) -> Iterator[str]:
        train = self.train
        if self.curriculum.refill and train.value_head:
            yield (
                "curriculum.refill replaces groups that teach nothing, and a value head learns from every episode:"
                " leave one of them out"
            )
        if train.balance_kinds and train.value_head:
            yield (
                "train.balance_kinds scales advantages by what a batch has of each kind, and a value head would learn"
                " returns whose scale changes from batch to batch: leave one of them out (kinds.NAME.weight is a"
                " constant factor)"
            )

    def _find_batch_problems(self) -> Iterator[str]:
        train, episodes = self.train, self.rollout.tasks_per_step * self.rollout.group_size
        limits = {"rollout.tokens": self.rollout.tokens}
        limits |= {f"kinds.{name}.tokens": kind.tokens for name, kind in self.kinds.items() if kind.tokens}
        shortest = min(limits, key=lambda name: limits[name])
        if train.overlong_buffer >= limits[shortest]:
            yield f"train.overlong_buffer={train.overlong_buffer} is no less than {shortest}"
        measured = {*self.reward}.union(*(kind.reward for kind in self.kinds.values()))
        if self.reward and (unknown := sorted({*train.tie_break} - measured)):
            yield f"train.tie_break: {unknown[0]} is not measured: add it to reward, with weight 0"
        if train.minibatches > episodes:
            yield f"train.minibatches={train.minibatches} exceeds the {episodes} episodes of a step"
        if self.data.epochs is None and (problem := self.describe_early_decay()):  # else examples decide the steps
            yield problem

    def describe_early_decay(self) -> str:
        """Describe a learning rate that falls to zero before the last update; "" if it does not."""
        train = self.train
        updates = self.run.steps * train.updates_per_batch * train.minibatches
        if 0 < train.decay_updates < updates - train.warmup_updates:
            return f"train.decay_updates={train.decay_updates} ends before the run's {updates} updates"
        return ""
