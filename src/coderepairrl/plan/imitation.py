"""Plan of `crrl sft`, made before anything starts."""

from __future__ import annotations

from coderepairrl.config import Config
from coderepairrl.config.sections.tasks import Tasks
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import LearnSettings, require_packages
from coderepairrl.plan import devices
from coderepairrl.plan.devices import Split
from coderepairrl.plan.examples import Examples, read_training_examples, steps
from coderepairrl.plan.learner import learn_settings, resolve_numerics
from coderepairrl.plan.parts import Check, part, raise_all
from coderepairrl.plan.plan import EvaluationPlan, PolicyPlan, require_trackers
from coderepairrl.plan.sizing import GB, learner_alone
from coderepairrl.plan.terms import AgentPlan

OF_ATTEMPTS = (
    *("train.advantage", "train.balance_kinds", "train.mask_truncated", "train.overlong_buffer"),
    *("train.tie_break", "rollout.tasks_per_step", "rollout.group_size", "rollout.max_staleness"),
    *("curriculum.easy_first", "curriculum.band", "curriculum.refill", "run.health"),
    *("tasks.verify", "tasks.verified_references", "engine.weights", "engine.weights_dir"),
)
"""Settings with a meaning only for learning from attempts (more: `learn.settings.OF_SAMPLES`)."""


class ImitationPlan(PolicyPlan):
    """A run that learns from examples."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.given = config

    @part
    def examples(self) -> Examples:
        """Examples to learn from."""
        return read_training_examples(self.given.data, self.folder, self.codec)

    @part
    def timed(self) -> Config:
        """Configuration with the steps that follow from `data.epochs`."""
        config, data = self.given, self.given.data
        if data.epochs is not None and self.can_make("examples"):
            run = config.run.model_copy(update={"steps": steps(data, len(self.examples.train))})
            config = config.model_copy(update={"run": run})
        return resolve_numerics(config)

    @part
    def learner(self) -> LearnSettings:
        """Settings of the learner."""
        return learn_settings(self.timed)

    @part
    def evaluates(self) -> bool:
        """Whether tasks are attempted."""
        evaluation = self.given.eval
        return evaluation.is_due and (self.given.tasks != Tasks() or bool(evaluation.source))

    @part
    def devices(self) -> Split:
        """GPUs of engine and learner."""
        return devices.split_devices(self.given, self.evaluates and self.engine.capabilities.uses_gpus)

    @part
    def rollouts(self) -> AgentPlan | None:
        """Evaluations on tasks; None if no tasks are named, or none are due."""
        if not self.evaluates:
            return None
        plan = EvaluationPlan(self)
        plan.given = self.timed
        raise_all(plan.errors())
        return plan

    @part
    def config(self) -> Config:
        """Configuration with what is measured, and with steps."""
        return self.rollouts.config if self.rollouts else self.timed

    @part
    def doubt(self) -> str:
        """Warning that the learner may not fit on a GPU, or an empty string."""
        longest = self.examples.longest
        estimate = learner_alone(self.timed, self.learner, longest)
        if estimate is None or estimate[0] <= estimate[1]:
            return ""
        needed, limit = (size / GB for size in estimate)
        return (
            f"this may not fit: a learner needs about {needed:.0f} GB for rows of {longest:,} tokens, and a GPU has"
            f" {limit:.0f}; train adapters (train.lora=true), set train.gradient_checkpointing=true, lower"
            " data.max_tokens, or share the model among processes (train.strategy=fsdp2)"
        )

    def _checks(self) -> list[Check]:
        return [
            *super()._checks(),
            lambda: _check_meaning(self.given),
            lambda: require_packages(self.learner),
            lambda: devices.require_secret(self.given),
            lambda: _check_measured(self.given, self.examples),
            lambda: require_trackers(self.given.log),
            lambda: self.engine.check_model(self.folder) if self.evaluates else None,
            lambda: self.engine.require() if self.evaluates else None,
        ]


def resolve_imitation(config: Config) -> ImitationPlan:
    """Resolve and check every part of `config`; steps follow from `data.epochs`. Raises as `plan.plan.plan_run`."""
    plan = ImitationPlan(config)
    raise_all(plan.errors())
    return plan


def _check_meaning(config: Config) -> None:
    if config.train.algorithm != "sft":
        raise ConfigError(
            f"train.algorithm={config.train.algorithm} learns from rewards: crrl train does that",
            fix='begin with sft-tiny, sft-thesis, or a file with train.algorithm = "sft"',
        )
    for key in OF_ATTEMPTS:
        name, _, field = key.partition(".")
        section = getattr(config, name)
        if (getattr(section, field) or None) != (type(section).model_fields[field].get_default() or None):
            raise ConfigError(
                f"{key} has no meaning for train.algorithm=sft, which learns from no attempts", fix=f"leave {key} out"
            )


def _check_measured(config: Config, examples: Examples) -> None:
    data = config.data
    if data.held_out and not examples.held_out:
        raise UsageError(
            f"data.held_out={data.held_out:g} holds out none of {len({each.task for each in examples.train})} tasks",
            fix="raise it, or set data.held_out=0",
        )
