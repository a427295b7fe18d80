"""Plans of commands: parts named, made and checked, but not started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from coderepairrl import models, rewards
from coderepairrl.config import Config
from coderepairrl.config.sections.tasks import Data
from coderepairrl.errors import ConfigError, PrerequisiteError, TaskError, several
from coderepairrl.learn import LearnSettings, require_packages
from coderepairrl.plan import devices
from coderepairrl.plan.curriculum import curriculum
from coderepairrl.plan.few_shot import has_examples, with_examples
from coderepairrl.plan.kinds import check_kinds, make_kinds
from coderepairrl.plan.learned import check_learned
from coderepairrl.plan.learner import check_teacher, settings
from coderepairrl.plan.model import LocalModel, RemoteModel, Use, choose_engine, folder, named, writer
from coderepairrl.plan.numerics import check_clip, clip, resolved
from coderepairrl.plan.place import Place, choose_place, limits
from coderepairrl.plan.problems import Made, Problems
from coderepairrl.plan.prompts import LongestPrompt, check_overlong, check_prompts, without_too_long
from coderepairrl.plan.rewarding import settle_measure, settle_rewards
from coderepairrl.plan.route import check_route
from coderepairrl.plan.tasks import check_references, check_workspaces, read_collected, read_tasks
from coderepairrl.plan.workers import check_executor, require_ray
from coderepairrl.processes.extras import require_extra
from coderepairrl.protocols import EngineSpec
from coderepairrl.rollout import Curriculum, Share, Terms
from coderepairrl.types import EngineNeeds, Limits, Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """A model that replies to external agents (``crrl serve``)."""

    config: Config
    """Configuration with ``auto`` resolved."""
    model: LocalModel | RemoteModel

    @property
    def limits(self) -> Limits:
        """Limits of an episode."""
        return limits(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan(ServingPlan):
    """An agent that works on tasks with the model (``crrl fix``, evaluation)."""

    place: Place
    kinds: Mapping[str, Terms]
    """Terms of attempts by kind of task; ``""`` is for all others."""
    eval_tasks: Mapping[str, tuple[Task, ...]]
    """Held-out tasks by name of the evaluation: all, or a sample."""

    @property
    def reward_versions(self) -> dict[str, int]:
        """Formula version of each reward, by name."""
        weighted = (each for terms in self.kinds.values() for phase in terms.rewards.values() for each in phase)
        return rewards.versions_of(reward for reward, _ in weighted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(AgentPlan):
    """A training run."""

    model: LocalModel
    """The initial policy, or the shape of a random one. Its engine is on the run's own GPUs."""
    curriculum: Curriculum
    """Training tasks, and their order."""
    learner: LearnSettings
    devices: devices.Split
    in_turn: bool
    """Engine and learner share a GPU, and the engine measures free memory as it starts."""
    clip: str
    """Description of when the importance ratio is clipped."""
    rewards_in_words: Mapping[str, str]
    """Description of training rewards and of what evaluations measure, with reasons for defaults."""
    prompt: LongestPrompt | None
    """The longest prompt; None for a resumed run, which was checked at its start."""
    too_long: tuple[str, ...]
    """Training tasks left out because their prompts are longer (`tasks.too_long`)."""
    lacking: tuple[PrerequisiteError, ...]
    """Prerequisites of engine or learner that this machine lacks."""

    @property
    def train_tasks(self) -> tuple[Task, ...]:
        """Training tasks of all sources."""
        return tuple(chain.from_iterable(source.tasks for source in self.curriculum.sources))

    def require(self) -> None:
        """Raise `PrerequisiteError` (or `Several`) if this machine lacks something."""
        if self.lacking:
            raise several(self.lacking)


def resolve_serving(model: str, overrides: Sequence[str], use: Use, problems: Problems) -> ServingPlan:
    """Resolve `model` and the settings it is served with. Raises as `Problems.report`."""
    config, chosen = named(model, overrides, use, problems)
    problems.report()
    return ServingPlan(config=config.value, model=chosen.value)


def resolve_attempt(model: str, overrides: Sequence[str], use: Use, task: Made[Task], problems: Problems) -> AgentPlan:
    """Like `resolve_serving`, with an agent for `task` and no rewards."""
    config, chosen = named(model, overrides, use, problems)
    if not config:
        problems.report()
    place = choose_place(config.value, problems)
    kinds = problems.attempt(lambda: {"": Terms(place.value.agent, place.value.sandbox, limits(config.value), {})})
    problems.attempt(lambda: _check_prompts(config.value, chosen.value, kinds.value, [task.value]))
    problems.report()
    return AgentPlan(config=config.value, model=chosen.value, place=place.value, kinds=kinds.value, eval_tasks={})


def _check_prompts(
    config: Config, model: LocalModel | RemoteModel, kinds: Mapping[str, Terms], tasks: Sequence[Task]
) -> LongestPrompt | None:
    return check_prompts(config, model, kinds, tasks) if isinstance(model, LocalModel) else None


def resolve_evaluation(
    model: str,
    overrides: Sequence[str],
    use: Use,
    *,
    settings_of: Path | None = None,
    collects: bool = False,
) -> AgentPlan:
    """Like `resolve_serving`, with held-out tasks (of `settings_of` if given) and how they are judged.

    Without a named reward the tasks decide (`reward_for`). With `collects`, the training tasks that training leaves out
    replace the held-out ones. Raises `TaskError` without tasks.
    """
    problems = Problems()
    base_config, chosen = named(model, overrides, use, problems, settings_of=settings_of)
    if not base_config:
        problems.report()
    plan = evaluation(base_config.value, chosen, problems, collects=collects)
    problems.report()
    config = plan.value.config
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": _pinned(model, config, chosen)})}
    )
    return replace(plan.value, config=config)


def evaluation(
    config: Config,
    chosen: Made[LocalModel] | Made[LocalModel | RemoteModel],
    problems: Problems,
    *,
    collects: bool = False,
) -> Made[AgentPlan]:
    """Evaluations of the model `chosen`, as in `resolve_evaluation`."""
    if collects:
        eval_tasks = read_collected(config, problems)
        train = read_tasks(config, problems)[0] if has_examples(config, drawn=True) else Made[tuple[Share, ...]]([()])
    else:
        train, eval_tasks = read_tasks(config, problems, training=has_examples(config, drawn=True))
    everything = tuple(chain(*_or(eval_tasks, {}).values()))
    config = _shown_examples(config, train, everything, problems)
    place = choose_place(config, problems)
    settled = problems.attempt(lambda: settle_measure(config, everything))
    config = _or(settled, config)

    def check_first_requests(name: str, tasks: Sequence[Task]) -> None:
        problems.attempt(
            lambda: _check_prompts(config, chosen.value, {k: terms.of(name) for k, terms in kinds.value.items()}, tasks)
        )

    measured = problems.attempt(lambda: rewards.make(settled.value.eval.reward or config.reward))
    kinds = make_kinds(config, (measured, measured, place), eval_tasks, problems)
    problems.attempt(lambda: check_kinds(kinds.value, everything) if eval_tasks else None)
    check_workspaces(everything, place, problems)
    for name, held_out in _or(eval_tasks, {}).items():
        check_first_requests(name, held_out)
    problems.attempt(lambda: require_trackers(config.log))
    problems.attempt(lambda: check_executor(config, remote=isinstance(chosen.value, RemoteModel)))
    problems.attempt(lambda: require_ray(config))
    if eval_tasks and not everything:
        problems.add(
            TaskError(
                "no evaluation has a held-out task",
                fix="name a source and a split that has: eval.split=train, say (crrl tasks list SOURCE has the splits)",
            )
        )
    return problems.attempt(
        lambda: AgentPlan(
            config=config, model=chosen.value, place=place.value, kinds=kinds.value, eval_tasks=eval_tasks.value
        )
    )


def _shown_examples(
    config: Config, train: Made[tuple[Share, ...]], evaluated: Sequence[Task], problems: Problems
) -> Config:
    if not has_examples(config):
        return config
    trained = [task for share in _or(train, ()) for task in share.tasks]
    changed = problems.attempt(lambda: with_examples(config, trained, evaluated))
    return _or(changed, config)


def _pinned(model: str, config: Config, chosen: Made[LocalModel | RemoteModel]) -> str:
    """A name that finds the same model again."""
    if Path(model).suffix == ".toml":
        return config.model.path
    if models.is_hub_name(model) and isinstance(chosen.value, LocalModel):
        return f"{model.partition('@')[0]}@{chosen.value.folder.name}"
    run = isinstance(chosen.value, LocalModel) and not model.startswith("builtin:")
    return chosen.value.name if run else model


def resolve(config: Config, *, resumed: bool = False) -> Plan:
    """Resolve and check every part of `config`. Raises as `Problems.report`.

    What the machine lacks for engine and learner is no error by itself (`Plan.lacking`). `resumed` skips checks of a
    run's start.
    """
    config = resolved(config)
    problems = Problems()
    if not resumed:
        problems.attempt(lambda: check_clip(config))
    problems.attempt(lambda: _check_learns_from_rewards(config))
    problems.attempt(lambda: check_executor(config))
    learner = problems.attempt(lambda: settings(config))
    model = problems.attempt(lambda: folder(config))
    if learner:
        problems.attempt(lambda: check_teacher(config, model.value))
    adapter = problems.attempt(lambda: models.named(config.model.path).adapter)
    codec, forks = writer(config, model, problems)
    read, eval_tasks = read_tasks(config, problems)
    sources = read
    config = _shown_examples(config, read, tuple(chain(*_or(eval_tasks, {}).values())), problems)
    place = choose_place(config, problems)
    engine, needs, split = _engine(config, model, problems)
    settled = problems.attempt(lambda: settle_rewards(config, read, eval_tasks))
    config = settled.value[0] if settled else config
    paid = problems.attempt(lambda: rewards.make(settled.value[0].reward))
    measured = problems.attempt(lambda: rewards.make(config.eval.reward)) if config.eval.reward else paid
    kinds = make_kinds(config, (paid, measured, place), eval_tasks, problems)
    policy = problems.attempt(
        lambda: LocalModel(model.value, codec.value, forks.value, engine.value, needs.value, adapter.value)
    )
    if config.tasks.too_long == "drop":
        sources = problems.attempt(lambda: without_too_long(config, policy.value, kinds.value, read.value))
    if not resumed:
        problems.attempt(
            lambda: check_references(config, [task for share in sources.value for task in share.tasks], paid.value)
        )
    ordered = problems.attempt(lambda: curriculum(config, sources.value))
    trained = tuple(chain(*(source.tasks for source in _or(sources, ()))))
    if not resumed:
        problems.attempt(lambda: check_learned(config, trained) if model else None)
    everything = (*chain(*_or(eval_tasks, {}).values()), *trained)
    problems.attempt(lambda: check_kinds(kinds.value, everything) if sources and eval_tasks else None)
    check_workspaces(everything, place, problems)
    prompted_tasks = everything if config.eval.before or config.eval.every or config.eval.after else trained
    prompt = problems.attempt(
        lambda: None if resumed else check_prompts(config, policy.value, kinds.value, prompted_tasks)
    )
    problems.attempt(lambda: check_overlong(config, policy.value, kinds.value))  # a resumed run may have new limits
    lacking = _lacking(config, engine, needs, learner)
    if problems.found:
        for each in lacking:
            problems.add(each)
        problems.report()
    return Plan(
        config=config,
        model=policy.value,
        curriculum=ordered.value,
        eval_tasks=eval_tasks.value,
        place=place.value,
        kinds=kinds.value,
        learner=learner.value,
        devices=split.value,
        in_turn=devices.have_turns(config) or bool(devices.shared(config, engine.value.capabilities.uses_gpus)),
        clip=clip(config, learner.value),
        rewards_in_words=settled.value[1],
        prompt=prompt.value,
        too_long=_left_out(read.value, sources.value),
        lacking=lacking,
    )


def _left_out(read: Sequence[Share], kept: Sequence[Share]) -> tuple[str, ...]:
    """Ids of the tasks in `read` that `kept` lacks, by source."""
    pairs = ((source, {task.id for task in share.tasks}) for source, share in zip(read, kept, strict=True))
    return tuple(task.id for source, ids in pairs for task in source.tasks if task.id not in ids)


def require_trackers(names: Sequence[str]) -> None:
    """Raise `PrerequisiteError` (`Several` for more) for trackers that are not installed."""
    absent = Problems()
    for name in names:
        absent.attempt(lambda name=name: require_extra(name, f"log={name}"))  # type: ignore[misc]
    absent.report()


def _check_learns_from_rewards(config: Config) -> None:
    if config.train.algorithm == "sft":
        raise ConfigError(
            "train.algorithm=sft learns from examples, not from attempts at tasks",
            fix="crrl sft FILE, or another train.algorithm",
        )
    if config.data != Data():
        raise ConfigError("data is what crrl sft learns from, and a run of tasks has no use for it", fix="leave it out")


def _engine(
    config: Config, model: Made[Path], problems: Problems
) -> tuple[Made[EngineSpec], Made[EngineNeeds], Made[devices.Split]]:
    """Engine, what the run needs of it, and the GPUs of each child process."""

    def needed() -> EngineNeeds:
        gpus = split.value.engine.get(devices.VISIBLE)
        devices.check_turns(config, engine.value)
        return replace(room.value, gpus=gpus, sleep=devices.have_turns(config))

    engine, room = choose_engine(config, problems)
    split = problems.attempt(lambda: devices.split(config, engine.value.capabilities.uses_gpus))
    problems.attempt(lambda: check_route(config, engine.value))
    problems.attempt(lambda: engine.value.check_model(model.value))
    return engine, problems.attempt(needed), split


def _lacking(
    config: Config, engine: Made[EngineSpec], needs: Made[EngineNeeds], learner: Made[LearnSettings]
) -> tuple[PrerequisiteError, ...]:
    absent = Problems()
    absent.attempt(lambda: require_trackers(config.log))
    absent.attempt(lambda: require_ray(config))
    absent.attempt(lambda: engine.value.require(needs.value))
    absent.attempt(lambda: require_packages(learner.value))
    absent.attempt(lambda: devices.require_secret(config))
    return tuple(each for each in absent.found if isinstance(each, PrerequisiteError))


def _or(made: Made[T], otherwise: T) -> T:
    return made.value if made else otherwise
