"""`[eval]` and `[keep]`: what is measured, and which attempts are kept."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from coderepairrl.config.sections.base import Section, Short, Weights, Words
from coderepairrl.config.sections.episodes import Agent

_VARIED = {"source", "split", "options", "tasks", "attempts", "temperature", "top_p", "top_k", "min_p", "agent"}
"""Settings that a further evaluation may change; it shares steps, reward and limits with the first."""


class Eval(Section):
    """Evaluation on held-out tasks, before, during and after training."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before and after."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    source: str = ""
    """Task source of held-out tasks; empty is `tasks.source`."""
    options: dict[str, Any] = {}
    """Options of the source; empty is `tasks.options`, for the same source."""
    split: str = "test"
    """Split of the evaluated tasks."""
    tasks: int = Field(default=0, ge=0)
    """Sample size of held-out tasks, drawn by `run.seed`, equal at every evaluation; 0 takes all."""
    attempts: int = Field(default=1, ge=1)
    """Attempts per held-out task."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Least probability of a token relative to the likeliest; 0 is off."""
    reward: Annotated[dict[str, float], Weights] = {}
    """Measured rewards by weight; empty is the training reward, else what follows from the held-out tasks."""
    agent: Annotated[Agent | None, Short] = None
    """Agent; unset is the run's. Kinds of tasks keep their agent."""
    also: dict[str, dict[str, Any]] = {}
    """Further evaluations at the same steps, by name, with their differences: `{greedy = {temperature = 0}}`."""

    @property
    def is_due(self) -> bool:
        """Whether training evaluates at all."""
        return self.before or self.after or bool(self.every)

    @property
    def each(self) -> dict[str, Eval]:
        """All evaluations by name, this one as ``eval``; further ones extend its `options`, or name a source."""
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


class Keep(Section):
    """Attempts that `crrl collect` and `crrl select` keep; filters apply in this order (docs/guides/collect.md)."""

    endings: Annotated[tuple[Literal["done", "limit", "crash"], ...], Words, Field(min_length=1)] = ("done",)
    """Endings of attempts to keep, as a list or comma-separated."""
    above: float = 0.0
    """Keep attempts with a higher reward; a negative value also keeps unjudged ones, such as published trajectories."""
    passed: bool = False
    """Keep only attempts whose patch passed the task's checks."""
    best: int = Field(default=0, ge=0)
    """Attempts to keep per task, by highest reward; 0 keeps all."""
    total: int = Field(default=0, ge=0)
    """Most attempts to keep, balanced over languages, repositories and tasks; 0 keeps all."""
