"""`[eval]` and `[keep]`: evaluations, and the attempts to keep."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from coderepairrl.config.sections.base import Section, Short, Weights, Words
from coderepairrl.config.sections.episodes import Agent

_VARIED = {"source", "split", "options", "tasks", "attempts", "temperature", "top_p", "top_k", "min_p", "agent"}
"""Settings that an evaluation of `also` may change; steps, reward and limits are those of the first."""


class Eval(Section):
    """Evaluation on held-out tasks, before, during and after training."""

    every: int = Field(default=0, ge=0)
    """Training steps between evaluations; 0 evaluates only before and after."""
    before: bool = True
    """Evaluate before the first step: the change needs it."""
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
    """Further evaluations at the same steps, by name, each with what differs: `{greedy = {temperature = 0}}`."""

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
        for name, other in value.items():
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in ("eval", "train"):
                raise ValueError(f"an evaluation cannot be called {name!r}: small letters, and not eval or train")
            if unknown := set(other) - _VARIED:
                raise ValueError(f"{name}.{min(unknown)}: a further evaluation varies {', '.join(sorted(_VARIED))}")
            Eval(**other)
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
