"""`[run]`, `[gpu]` and `[plan]`: what a run is called, when it stops, and what its plan assumes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coderepairrl.config.sections.base import Section

GateName = Literal[
    "skipped", "nothing_sampled", "zero_reward", "no_gradient", "entropy", "perplexity", "kl", "drift", "throughput",
    "over_optimisation",
]  # fmt: skip


class Health(Section):
    """Health gates: what is wrong with each of several steps in a row is warned of after half of them, and stops the
    run (exit code 4, resumable) after all of them (docs/guides/training.md)."""

    action: Literal["stop", "warn"] = "stop"
    """`warn` stops nothing."""
    patience: int = Field(default=10, ge=2)
    """Steps in a row."""
    off: tuple[GateName, ...] = ()
    """Gates that are switched off (docs/guides/training.md lists them)."""


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
    health: Health = Health()
    """When a run that does not learn, or not soundly, is warned of and stopped."""
    retries: int = Field(default=2, ge=0)
    """How often a void episode is tried again, and how often in a row a dead engine or learner is restarted."""


class Gpu(Section):
    """What each GPU is taken to be by the plan of `--dry-run` (docs/guides/plan.md). Nothing else depends on it."""

    memory_gb: float = Field(default=0.0, ge=0)
    """GB (10^9 bytes) of memory; 0 asks the driver. Where neither says it, nothing is refused."""
    tflops: float = Field(default=312.0, gt=0)
    """Peak of dense bf16 products in TFLOP/s; the default is an A100's."""
    bandwidth_gb: float = Field(default=2_000.0, gt=0)
    """Memory bandwidth in GB/s; the default is an A100's of 80 GB."""


class Plan(Section):
    """What the plan of `--dry-run` takes episodes and speeds to be (docs/guides/plan.md). Nothing else depends on
    it."""

    tokens: int = Field(default=0, ge=0)
    """Tokens of an episode on average; 0: all that `rollout.tokens` and `rollout.seconds` allow."""
    engine_tokens_per_second: float = Field(default=0.0, ge=0)
    """What the engine samples in all episodes together, as a short run's metric `tokens_per_second` has it; 0: assumed
    by the section `gpu`."""
    learner_tokens_per_second: float = Field(default=0.0, ge=0)
    """What all learner processes together train on, as a short run has it: `learn/row_tokens` over `learn_seconds`; 0:
    assumed by the section `gpu`."""
