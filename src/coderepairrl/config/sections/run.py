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
    """Health gates: a problem in several consecutive steps warns after half of them and stops the run (exit code 4,
    resumable) after all of them (docs/guides/training.md).
    """

    action: Literal["stop", "warn"] = "stop"
    """`stop` stops the run, `warn` only warns."""
    patience: int = Field(default=10, ge=2)
    """Consecutive steps with a problem before the run stops."""
    off: tuple[GateName, ...] = ()
    """Disabled gates (listed in docs/guides/training.md)."""


class Run(Section):
    """Name, place and length of a run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run below `dir`; required, since only a named run can be cited."""
    dir: str = "runs"
    """Folder of run folders."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Source of all randomness: task order, request seeds, random weights."""
    steps: int = Field(default=20, ge=0, le=1_000_000)
    """Training steps, each a batch of episodes and its update."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints to keep; the last step's is always kept."""
    health: Health = Health()
    """Warnings and stops for runs that learn badly or not at all."""
    retries: int = Field(default=2, ge=0)
    """Retries of a void episode, and consecutive restarts of a dead engine or learner."""


class Gpu(Section):
    """Assumptions of the plan of `--dry-run` about each GPU; nothing else uses them (docs/guides/plan.md)."""

    memory_gb: float = Field(default=0.0, ge=0)
    """Memory in GB (10^9 bytes); 0 asks the driver, and if that fails, nothing is refused."""
    tflops: float = Field(default=312.0, gt=0)
    """Peak dense bf16 TFLOP/s; the default is an A100's."""
    bandwidth_gb: float = Field(default=2_000.0, gt=0)
    """Memory bandwidth in GB/s; the default is that of an A100 with 80 GB."""


class Plan(Section):
    """Assumptions of the plan of `--dry-run` about episodes and speeds; nothing else uses them
    (docs/guides/plan.md).
    """

    tokens: int = Field(default=0, ge=0)
    """Mean tokens per episode; 0 assumes all that `rollout.tokens` and `rollout.seconds` allow."""
    engine_tokens_per_second: float = Field(default=0.0, ge=0)
    """Engine speed over all episodes, from a short run's metric `tokens_per_second`; 0 derives it from `gpu`."""
    learner_tokens_per_second: float = Field(default=0.0, ge=0)
    """Speed of all learner processes together, from a short run: `learn/row_tokens` over `learn_seconds`; 0 derives it
    from `gpu`."""
