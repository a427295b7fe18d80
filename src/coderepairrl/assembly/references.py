"""Whether further references (``tasks.verified_references``) can have an effect."""

from __future__ import annotations

from collections.abc import Sequence

from coderepairrl.config import Config
from coderepairrl.config.sections.tasks import Curriculum
from coderepairrl.errors import ConfigError
from coderepairrl.rewards import Weighted
from coderepairrl.types import Task


def check_references(config: Config, tasks: Sequence[Task], weighted: Sequence[Weighted]) -> None:
    """Raise `ConfigError` where ``tasks.verified_references`` cannot have an effect."""
    if not (most := config.tasks.verified_references):
        return
    key = f"tasks.verified_references={most}"
    if not any(reward.runs_checks for reward, _ in weighted):
        raise ConfigError(
            f"{key}, and no reward runs the tasks' checks, so no repair is ever verified",
            fix="measure them: reward.tests=0, or reward.sampled_tests=0 for a quarter of the groups",
        )
    if not any(weight and reward.takes_verified for reward, weight in weighted):
        raise ConfigError(
            f"{key}, and no reward with a weight compares patches with further references",
            fix="pay for patch_edits, patch_lines or hybrid, or leave it out",
        )
    attempts = config.run.steps * config.rollout.tasks_per_step
    epochs = config.curriculum == Curriculum()
    if epochs and 0 < attempts <= len(tasks):
        raise ConfigError(
            f"{key}, and none of the {len(tasks)} training tasks is attempted in two steps: {config.run.steps} steps of"
            f" {config.rollout.tasks_per_step} tasks end before the second epoch",
            fix="train on fewer tasks or for more steps, or leave it out",
        )
