"""Plans of commands: parts are made and checked, but not started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from coderepairrl import models
from coderepairrl.config import Config
from coderepairrl.config.schema import Data
from coderepairrl.errors import ConfigError, PrerequisiteError, TaskError
from coderepairrl.learn import LearnSettings, require_packages
from coderepairrl.plan import devices
from coderepairrl.plan.curriculum import make_curriculum
from coderepairrl.plan.devices import DeviceSplit
from coderepairrl.plan.few_shot import fill_in_examples, has_examples
from coderepairrl.plan.learner import check_clip, check_teacher, describe_clip, make_learn_settings, resolve_numerics
from coderepairrl.plan.model import (
    LocalModel,
    LocalPlan,
    ModelCommand,
    RemoteModel,
    ServingPlan,
    find_initial_model,
    plan_model,
)
from coderepairrl.plan.parts import Check, collect_errors, make_each, part, raise_errors
from coderepairrl.plan.prompts import LongestPrompt, check_overlong_buffer, check_prompts, drop_too_long
from coderepairrl.plan.tasks import (
    TaskReader,
    check_learned,
    check_references,
    check_workspaces,
    resolve_measured_reward,
    resolve_rewards,
)
from coderepairrl.plan.terms import (
    AgentPlan,
    JudgedPlan,
    check_executor,
    check_kinds,
    check_rewards,
    require_ray,
)
from coderepairrl.processes.installs import require_extra
from coderepairrl.processes.meter import VISIBLE_GPUS
from coderepairrl.rollout.curriculum import Curriculum, WeightedTasks
from coderepairrl.rollout.episodes import AttemptSettings
from coderepairrl.types import EngineNeeds, Task

EVALUATION = ModelCommand(
    "crrl eval",
    used=(
        *("agent", "sandbox", "engine", "model", "tasks", "reward", "kinds", "rollout"),
        *("gateway", "eval", "run", "log"),
    ),
    defaults=("run.name=evaluation",),
)
COLLECTION = ModelCommand("crrl collect", used=(*EVALUATION.used, "keep"), defaults=("run.name=collection",))


class ServedModelPlan(ServingPlan):
    """A plan for a model that another plan serves."""

    def __init__(self, served: ServingPlan) -> None:
        super().__init__()
        self.served = served

    @part
    def raw_config(self) -> Config:
        """Configuration of the model."""
        return self.served.config

    @part
    def model(self) -> LocalModel | RemoteModel:
        """The model."""
        return self.served.model


class TaskPlan(JudgedPlan):
    """Attempts at the tasks that a configuration names."""

    @part
    def reader(self) -> TaskReader:
        """Reader of the tasks."""
        return TaskReader(self.raw_config)

    @part
    def sources(self) -> tuple[WeightedTasks, ...]:
        """Training tasks by source; none if nothing needs them."""
        needed = self.learns or has_examples(self.raw_config, drawn=True)
        return self.reader.training_tasks() if needed else ()

    @part
    def eval_tasks(self) -> dict[str, tuple[Task, ...]]:
        """Held-out tasks by name of the evaluation: all, or a sample."""
        return self.reader.evaluated_tasks()

    @part
    def evaluated_tasks(self) -> tuple[Task, ...]:
        """Held-out tasks of all evaluations."""
        return tuple(chain.from_iterable(self.eval_tasks.values()))

    @part
    def agent_config(self) -> Config:
        """Configuration with the examples that agents are shown."""
        if not has_examples(self.raw_config):
            return self.raw_config
        return fill_in_examples(self.raw_config, flatten_shares(self.sources), self.evaluated_tasks)

    def check_workspaces(self, tasks: Sequence[Task]) -> None:
        """Raise the errors of workspaces that cannot be opened, and of images that the sandbox cannot open."""
        if self.can_make("agent_setup"):
            check_workspaces(tasks, self.agent_setup.sandbox.check_image)
        else:
            check_workspaces(tasks)


class EvaluationPlan(ServedModelPlan, TaskPlan):
    """Evaluation of a model; with `collects`, on the training tasks that training leaves out."""

    learns = False

    def __init__(self, served: ServingPlan, *, collects: bool = False) -> None:
        super().__init__(served)
        self.collects = collects

    @part
    def eval_tasks(self) -> dict[str, tuple[Task, ...]]:
        """Tasks by name of the evaluation: all, or a sample."""
        return self.reader.collected_tasks() if self.collects else self.reader.evaluated_tasks()

    @part
    def config(self) -> Config:
        """Configuration with the measured rewards."""
        config = self.agent_config
        return config if config.eval.reward or config.reward else resolve_measured_reward(config, self.evaluated_tasks)

    def check_any_tasks(self) -> None:
        """Raise `TaskError` if no evaluation has a task."""
        if not self.evaluated_tasks:
            raise TaskError(
                "no evaluation has a held-out task",
                fix="name a source and a split with tasks, such as eval.split=train (see crrl tasks list SOURCE)",
            )

    def check_prompts(self, name: str) -> None:
        """Raise `ConfigError` for prompts of the evaluation `name` that leave no room for a reply."""
        kinds = {kind: terms.for_phase(name) for kind, terms in self.kinds.items()}
        check_local_prompts(self, kinds, self.eval_tasks[name])

    def _checks(self) -> list[Check]:
        return [
            *super()._checks(),
            lambda: check_kinds(self.kinds, self.evaluated_tasks),
            lambda: check_rewards(self.kinds, self.eval_tasks),
            lambda: self.check_workspaces(self.evaluated_tasks),
            lambda: make_each(self.check_prompts, self.eval_tasks),
            lambda: require_trackers(self.raw_config.log),
            lambda: check_executor(self.raw_config, remote=isinstance(self.model, RemoteModel)),
            lambda: require_ray(self.raw_config),
            self.check_any_tasks,
        ]


class PolicyPlan(LocalPlan):
    """A policy to train, and its learner."""

    @part
    def folder(self) -> Path:
        """Folder of the initial model."""
        return find_initial_model(self.raw_config)

    @part
    def adapter(self) -> Path | None:
        """Folder of the model's adapters."""
        return models.resolve_model(self.raw_config.model.path).adapter

    @part
    def learner(self) -> LearnSettings:
        """Settings of the learner."""
        return make_learn_settings(self.raw_config)

    @part
    def ranks(self) -> list[int]:
        """Rank of the trained adapters."""
        lora = self.raw_config.train.lora
        return [] if lora is None else [lora.rank]

    def _checks(self) -> list[Check]:
        return [*super()._checks(), lambda: check_teacher(self.raw_config, self.folder)]


class Plan(PolicyPlan, TaskPlan):
    """A training run; `resumed` leaves out the checks of a run's start."""

    learns = True

    def __init__(self, config: Config, *, resumed: bool) -> None:
        super().__init__()
        self.raw_config, self.resumed = resolve_numerics(config), resumed

    @part
    def devices(self) -> DeviceSplit:
        """GPUs of engine and learner."""
        return devices.split_devices(self.raw_config, self.engine.capabilities.uses_gpus)

    @part
    def needs(self) -> EngineNeeds:
        """Requirements of adapters, GPUs, and sleep if engine and learner take turns on these."""
        gpus = self.devices.engine.get(VISIBLE_GPUS)
        devices.check_turns(self.raw_config, self.engine)
        return replace(self.adapter_needs, gpus=gpus, sleep=devices.has_turns(self.raw_config))

    @part
    def has_shared_gpus(self) -> bool:
        """Whether engine and learner share a GPU, and so start one after the other."""
        shared = devices.find_shared_gpus(self.raw_config, self.engine.capabilities.uses_gpus)
        return devices.has_turns(self.raw_config) or bool(shared)

    @part
    def resolved_rewards(self) -> tuple[Config, dict[str, str]]:
        """Configuration with rewards, and a description of these."""
        config = self.agent_config
        if config.reward:
            return resolve_rewards(config, (), ())
        return resolve_rewards(config, flatten_shares(self.sources), () if config.eval.reward else self.evaluated_tasks)

    @part
    def config(self) -> Config:
        """Configuration with rewards, and with ``auto`` resolved."""
        return self.resolved_rewards[0]

    @part
    def reward_descriptions(self) -> dict[str, str]:
        """Description of the rewards of training and of evaluations, with reasons for defaults."""
        return self.resolved_rewards[1]

    @part
    def kept_sources(self) -> tuple[WeightedTasks, ...]:
        """Training tasks by source, without those whose prompts are too long (`tasks.too_long`)."""
        if self.raw_config.tasks.too_long != "drop":
            return self.sources
        return drop_too_long(self.config, self.model, self.kinds, self.sources)

    @part
    def kept_tasks(self) -> tuple[Task, ...]:
        """Tasks of `kept_sources`, before the curriculum."""
        return flatten_shares(self.kept_sources)

    @part
    def too_long(self) -> tuple[str, ...]:
        """Training tasks that were left out because their prompts are too long."""
        kept_ids = {task.id for task in self.kept_tasks}
        return tuple(task.id for task in flatten_shares(self.sources) if task.id not in kept_ids)

    @part
    def curriculum(self) -> Curriculum:
        """Training tasks, and their order."""
        return make_curriculum(self.config, self.kept_sources)

    @property
    def train_tasks(self) -> tuple[Task, ...]:
        """Training tasks of the curriculum."""
        return flatten_shares(self.curriculum.sources)

    @part
    def prompt(self) -> LongestPrompt | None:
        """The longest prompt; None for a resumed run, which was checked at its start."""
        if self.resumed:
            return None
        prompted = (*self.evaluated_tasks, *self.kept_tasks) if self.config.eval.is_due else self.kept_tasks
        return check_prompts(self.config, self.model, self.kinds, prompted)

    @part
    def clip(self) -> str:
        """Description of when the importance ratio is clipped."""
        return describe_clip(self.config, self.learner)

    @part
    def missing_prerequisites(self) -> tuple[PrerequisiteError, ...]:
        """Prerequisites of engine or learner that this machine lacks."""
        checks: list[Check] = [
            lambda: require_trackers(self.raw_config.log),
            lambda: require_ray(self.raw_config),
            lambda: self.engine.require(self.needs),
            lambda: require_packages(self.learner),
            lambda: devices.require_secret(self.raw_config),
        ]
        errors = (each for error in collect_errors(checks) for each in error.problems)
        return tuple(each for each in errors if isinstance(each, PrerequisiteError))

    @property
    def episodes_per_step(self) -> int:
        """Episodes whose groups make up a step."""
        return self.config.rollout.tasks_per_step * self.config.rollout.group_size

    @property
    def refilled_per_step(self) -> int:
        """Most further episodes of a step, in place of groups that teach nothing."""
        return self.config.curriculum.refill * self.config.rollout.group_size

    def require(self) -> None:
        """Raise `PrerequisiteError` (or `CombinedError`) if this machine lacks something."""
        raise_errors(self.missing_prerequisites)

    def _checks(self) -> list[Check]:
        at_start: list[Check] = [
            lambda: check_clip(self.raw_config),
            lambda: check_references(self.config, self.kept_tasks, self.training_rewards),
            lambda: check_learned(self.raw_config, self.kept_tasks) if self.folder else None,
        ]
        return [
            *super()._checks(),
            *([] if self.resumed else at_start),
            lambda: check_learns_from_rewards(self.raw_config),
            lambda: check_executor(self.raw_config),
            lambda: devices.check_route(self.raw_config, self.engine),
            lambda: self.engine.check_model(self.folder),
            lambda: check_kinds(self.kinds, (*self.evaluated_tasks, *self.kept_tasks)),
            lambda: check_rewards(self.kinds, {"train": self.kept_tasks, **self.eval_tasks}),
            lambda: self.check_workspaces(
                [
                    task
                    for name in ("evaluated_tasks", "kept_tasks")
                    if self.can_make(name)
                    for task in getattr(self, name)
                ]
            ),
            lambda: check_overlong_buffer(self.config, self.model, self.kinds),  # a resumed run may have new limits
        ]


def plan_run(config: Config, *, resumed: bool = False) -> Plan:
    """Resolve and check every part of `config`. Raises as `raise_errors`.

    What the machine lacks for engine and learner is not an error here (`Plan.missing_prerequisites`).
    """
    plan = Plan(config, resumed=resumed)
    if errors := plan.errors():
        raise_errors([*errors, *plan.missing_prerequisites])
    return plan


def resolve_evaluation(
    name: str, overrides: Sequence[str] = (), *, settings_of: Path | None = None, collects: bool = False
) -> AgentPlan:
    """Resolve the model `name`, its settings, and held-out tasks (of `settings_of` if given) and how they are judged.

    Without a named reward the tasks decide (`choose_reward`). With `collects`, the training tasks left out of training
    replace the held-out ones. Raises `TaskError` without tasks, and as `raise_errors`.
    """
    served = plan_model(name, overrides, COLLECTION if collects else EVALUATION, settings_of)
    plan = EvaluationPlan(served, collects=collects)
    raise_errors([*served.errors(), *plan.errors()])
    model = plan.config.model.model_copy(update={"path": _pin_model_name(name, plan)})
    return plan.replace(config=plan.config.model_copy(update={"model": model}))


def _pin_model_name(name: str, plan: AgentPlan) -> str:
    """A name that finds the same model again."""
    if Path(name).suffix == ".toml":
        return plan.config.model.path
    if not isinstance(plan.model, LocalModel) or name.startswith("builtin:"):
        return name
    return f"{name.partition('@')[0]}@{plan.model.folder.name}" if models.is_hub_name(name) else plan.model.name


def resolve_serving(name: str, overrides: Sequence[str], use: ModelCommand, *checks: Check) -> ServingPlan:
    """Resolve the model `name` and its serving settings. Raises as `raise_errors`, with errors of `checks`."""
    plan = plan_model(name, overrides, use)
    raise_errors([*collect_errors(checks), *plan.errors()])
    return plan


def check_local_prompts(plan: AgentPlan, kinds: Mapping[str, AttemptSettings], tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` for prompts that leave no room for a reply of a model that is served here."""
    if isinstance(plan.model, LocalModel):
        check_prompts(plan.config, plan.model, kinds, tasks)


def flatten_shares(shares: Iterable[WeightedTasks]) -> tuple[Task, ...]:
    """Tasks of all sources."""
    return tuple(chain.from_iterable(share.tasks for share in shares))


def require_trackers(names: Sequence[str]) -> None:
    """Raise `PrerequisiteError` (`CombinedError` for more) for trackers that are not installed."""
    make_each(lambda name: require_extra(name, f"log={name}"), names)


def check_learns_from_rewards(config: Config) -> None:
    """Raise `ConfigError` for settings of `crrl sft`."""
    if config.train.algorithm == "sft":
        raise ConfigError(
            "train.algorithm=sft learns from examples, not from attempts at tasks",
            fix="crrl sft FILE, or another train.algorithm",
        )
    if config.data != Data():
        raise ConfigError("crrl train learns from tasks, and not from [data]", fix="crrl sft FILE, or leave it out")
