"""`[run]`, `[gpu]`, `[plan]`: a run's name and length, and its plan's assumptions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coderepairrl.config.sections.base import Section

GateName = Literal[
    "skipped", "nothing_sampled", "zero_reward", "no_gradient", "entropy", "perplexity", "kl", "drift", "throughput",
    "over_optimisation",
]  # fmt: skip


class Health(Section):
    """Health gates: rules that stop a run which does not learn or whose numbers are unsound (exit code 4, resumable;
    docs/guides/training.md).
    """

    action: Literal["stop", "warn"] = "stop"
    """`stop` stops the run, `warn` only warns. Default: a run that cannot learn costs GPU-hours."""
    patience: int = Field(default=10, ge=2)
    """Consecutive steps with a problem before the run stops; half of them warn. Single steps are noise."""
    off: tuple[GateName, ...] = ()
    """Gates to switch off (docs/guides/training.md lists them)."""


class Run(Section):
    """Name, place and length of a run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder in `dir`. Required: it is how a run is found."""
    dir: str = "runs"
    """Folder that holds the run folders."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of all randomness: task order, sampling, random weights."""
    steps: int = Field(default=20, ge=0, le=1_000_000)
    """Training steps; each attempts a batch of tasks and updates the weights. The default is a trial, not a
    training."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always has one. A resumed run computes the steps since the newest one
    again from its log."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep; the second serves if the newest is damaged."""
    health: Health = Health()
    """Warnings and stops for runs that learn badly or not at all."""
    retries: int = Field(default=2, ge=0)
    """Retries of a void episode (one that the infrastructure broke), and restarts in a row of a dead engine or
    learner."""


class Gpu(Section):
    """Assumptions of the plan of `--dry-run` about each GPU; nothing else uses them (docs/guides/plan.md)."""

    memory_gb: float = Field(default=0.0, ge=0)
    """Memory in GB (10^9 bytes). 0 asks the driver; without a driver memory is not checked."""
    tflops: float = Field(default=312.0, gt=0)
    """Peak speed in dense bf16 TFLOP/s; the default is an A100's."""
    bandwidth_gb: float = Field(default=2_000.0, gt=0)
    """Memory bandwidth in GB/s; the default is that of an A100 with 80 GB."""


class Plan(Section):
    """Assumptions of the plan of `--dry-run` about episodes and speeds; nothing else uses them
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
