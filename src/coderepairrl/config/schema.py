"""Settings of a run, typed; implementations are names.

A section written as a string is its `name`: `engine=tiny` is `engine.name=tiny`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from coderepairrl.config.sections import (
    Agent,
    Curriculum,
    Data,
    Engine,
    Eval,
    Gpu,
    Keep,
    Model,
    Plan,
    Rollout,
    Run,
    Sandbox,
    Section,
    Several,
    Short,
    TaskKind,
    Tasks,
    Train,
    Weights,
)

Tracker = Literal["tensorboard", "trackio", "wandb"]


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
    """Rewards by weight; 0 measures without paying. Empty follows from the training tasks (docs/guides/rewards.md):
    `hybrid` if all have checks and references."""
    rollout: Rollout = Rollout()
    kinds: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")], TaskKind] = {}
    """Settings by kind of task, as `[kinds.NAME]`."""
    data: Data = Data()
    train: Train = Train()
    eval: Eval = Eval()
    keep: Keep = Keep()
    gpu: Gpu = Gpu()
    plan: Plan = Plan()
    log: Annotated[tuple[Tracker, ...], Several] = ()
    """Trackers of step and evaluation metrics besides the run folder, as `log = ["tensorboard"]` above all sections
    (docs/guides/trackers.md). `crrl export RUN --to wandb` sends missing ones later."""

    @field_validator("log")
    @classmethod
    def _once(cls, value: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _rewards_and_limits(self) -> Config:
        if self.reward and not any(self.reward.values()):
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
        return self

    @model_validator(mode="after")
    def _one_average(self) -> Config:
        train = self.train
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
        return self

    @model_validator(mode="after")
    def _within_a_batch(self) -> Config:
        train, episodes = self.train, self.rollout.tasks_per_step * self.rollout.group_size
        limits = {"rollout.tokens": self.rollout.tokens}
        limits |= {f"kinds.{name}.tokens": kind.tokens for name, kind in self.kinds.items() if kind.tokens}
        shortest = min(limits, key=lambda name: limits[name])
        if train.overlong_buffer >= limits[shortest]:
            raise ValueError(f"train.overlong_buffer={train.overlong_buffer} is no less than {shortest}")
        measured = {*self.reward}.union(*(kind.reward for kind in self.kinds.values()))
        if self.reward and (unknown := sorted({*train.tie_break} - measured)):
            raise ValueError(f"train.tie_break: {unknown[0]} is not measured: add it to reward, with weight 0")
        if train.minibatches > episodes:
            raise ValueError(f"train.minibatches={train.minibatches} of the {episodes} episodes of a step")
        updates = self.run.steps * train.updates_per_batch * train.minibatches
        if 0 < train.decay_updates < updates - train.warmup_updates:
            raise ValueError(f"train.decay_updates={train.decay_updates} ends before the run's {updates} updates")
        return self
