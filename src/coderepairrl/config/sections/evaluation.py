"""`[eval]` and `[keep]`: what is measured, and which attempts are kept."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from coderepairrl.config.sections.base import Section, Short, Weights, Words
from coderepairrl.config.sections.episodes import Agent

_VARIED = {"source", "split", "options", "tasks", "attempts", "temperature", "top_p", "top_k", "min_p", "agent"}
"""What a further evaluation may do otherwise: it shares its steps, its reward and all limits with the first."""


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
    reward: Annotated[dict[str, float], Weights] = {}
    """What is measured; empty is the training reward, or, where that is empty, what follows from the held-out tasks."""
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


class Keep(Section):
    """What `crrl collect` and `crrl select` keep of the attempts, filter after filter in this order
    (docs/guides/collect.md)."""

    endings: Annotated[tuple[Literal["done", "limit", "crash"], ...], Words, Field(min_length=1)] = ("done",)
    """Only attempts that ended so; several as a list, or with commas between them."""
    above: float = 0.0
    """Only attempts that earned more; below 0 also those that were never judged, such as published trajectories without
    a verdict."""
    passed: bool = False
    """Only attempts whose patch passed the task's checks."""
    best: int = Field(default=0, ge=0)
    """Attempts of each task to keep, those with the highest reward; 0 is all of them."""
    total: int = Field(default=0, ge=0)
    """Attempts to keep at most, taken in turn from the languages, repositories and tasks; 0 is all of them."""
