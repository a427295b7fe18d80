"""Plan of `crrl sft`, made before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from coderepairrl import models
from coderepairrl.config import Config
from coderepairrl.config.sections.tasks import Tasks
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import LearnSettings, require_packages
from coderepairrl.plan import devices
from coderepairrl.plan.examples import Examples, read, steps
from coderepairrl.plan.learner import check_teacher, settings
from coderepairrl.plan.model import LocalModel, choose_engine, folder, writer
from coderepairrl.plan.numerics import resolved
from coderepairrl.plan.plan import AgentPlan, ServingPlan, evaluation, require_trackers
from coderepairrl.plan.problems import Problems
from coderepairrl.plan.sizing import GB, learner_alone

OF_ATTEMPTS = (
    *("train.advantage", "train.balance_kinds", "train.mask_truncated", "train.overlong_buffer"),
    *("train.tie_break", "rollout.tasks_per_step", "rollout.group_size", "rollout.max_staleness"),
    *("curriculum.easy_first", "curriculum.band", "curriculum.refill", "run.health"),
    *("tasks.verify", "tasks.verified_references", "engine.weights", "engine.weights_dir"),
)
"""Settings with a meaning only for learning from attempts (more: `learn.settings.OF_SAMPLES`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationPlan(ServingPlan):
    """A run that learns from examples."""

    model: LocalModel
    learner: LearnSettings
    devices: devices.Split
    examples: Examples
    rollouts: AgentPlan | None
    """Evaluations on tasks; None if no tasks are named, or none are due."""
    doubt: str
    """Warning that it may not fit."""


def resolve_imitation(config: Config) -> ImitationPlan:
    """Resolve and check every part of `config`; steps follow from `data.epochs`. Raises as `plan.plan.resolve`."""
    problems = Problems()
    problems.attempt(lambda: _check_meaning(config))
    model = problems.attempt(lambda: folder(config))
    adapter = problems.attempt(lambda: models.named(config.model.path).adapter)
    codec, forks = writer(config, model, problems)
    examples = problems.attempt(lambda: read(config.data, model.value, codec.value))
    if examples and config.data.epochs is not None:
        count = steps(config.data, len(examples.value.train))
        config = config.model_copy(update={"run": config.run.model_copy(update={"steps": count})})
    config = resolved(config)
    learner = problems.attempt(lambda: settings(config))
    if learner:
        problems.attempt(lambda: check_teacher(config, model.value))
        problems.attempt(lambda: require_packages(learner.value))
        problems.attempt(lambda: devices.require_secret(config))
    if examples:
        problems.attempt(lambda: _check_measured(config, examples.value))
    engine, needs = choose_engine(config, problems)
    chosen = problems.attempt(
        lambda: LocalModel(model.value, codec.value, forks.value, engine.value, needs.value, adapter.value)
    )
    when = config.eval.before or config.eval.after or bool(config.eval.every)
    due = when and (config.tasks != Tasks() or bool(config.eval.source))
    split = problems.attempt(lambda: devices.split(config, due and engine.value.capabilities.uses_gpus))
    rollouts = None
    if due:
        problems.attempt(lambda: engine.value.check_model(model.value))
        problems.attempt(lambda: engine.value.require())
        rollouts = evaluation(config, chosen, problems)
        config = rollouts.value.config if rollouts else config
    else:
        problems.attempt(lambda: require_trackers(config.log))
    doubt = problems.attempt(lambda: _doubt(config, learner.value, examples.value.longest))
    problems.report()
    return ImitationPlan(
        config=config,
        model=chosen.value,
        learner=learner.value,
        devices=split.value,
        examples=examples.value,
        rollouts=rollouts.value if rollouts else None,
        doubt=doubt.value,
    )


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
            f"data.held_out={data.held_out:g} of the tasks is none of {len({each.task for each in examples.train})}",
            fix="raise it, or set data.held_out=0",
        )


def _doubt(config: Config, learner: LearnSettings, longest: int) -> str:
    """Warning that the learner may not fit on a GPU, or an empty string."""
    estimate = learner_alone(config, learner, longest)
    if estimate is None or estimate[0] <= estimate[1]:
        return ""
    needed, limit = (size / GB for size in estimate)
    return (
        f"this may not fit: a learner needs about {needed:.0f} GB for rows of {longest:,} tokens, and a GPU has"
        f" {limit:.0f}; train adapters (train.lora=true), set train.gradient_checkpointing=true, lower data.max_tokens,"
        " or share the model among processes (train.strategy=fsdp2)"
    )
