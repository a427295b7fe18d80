"""Tasks of a run: read, split and sampled, and their workspaces checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from coderepairrl import models, tasks
from coderepairrl.config import Config, validate_config
from coderepairrl.config.schema import Curriculum, Eval, Source, Tasks
from coderepairrl.environments.verify import check_environments
from coderepairrl.errors import CodeRepairError, ConfigError, TaskError
from coderepairrl.plan.parts import collect_errors, make_each, raise_errors
from coderepairrl.printable import format_count
from coderepairrl.rewards import Weighted
from coderepairrl.rollout.curriculum import WeightedTasks, spread_sources
from coderepairrl.rollout.episodes import derive_seed
from coderepairrl.runs import read_learned
from coderepairrl.sandbox.contents import check_workspace
from coderepairrl.sandbox.workspace import find_environment
from coderepairrl.tasks.prepare import rewrite_references
from coderepairrl.tasks.select import is_held_out
from coderepairrl.types import Task

COLLECTED_SHARE = 0.25
"""Share of tasks that `crrl collect` attempts if `tasks.holdout` is not set."""
_MOST_ERRORS = 3
"""Unopenable workspaces that are shown one by one; the others are counted."""
VERIFIED_REFERENCES = 4
"""Verified repairs of each task that become references if `hybrid` is the default."""


class TaskReader:
    """Tasks of training and of evaluations; each source is read once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sources = config.tasks.sources or (Source(source=config.tasks.source, options=config.tasks.options),)
        self._kinds = {_source_key(each.source, each.options): each.kind for each in self.sources}
        self._results: dict[str, _SourceTasks | CodeRepairError] = {}

    def read(self, source: str, options: Mapping[str, Any]) -> _SourceTasks:
        """Read the tasks of a source. Raises the same `CodeRepairError` each time."""
        key = _source_key(source, options)
        if key not in self._results:
            try:
                self._results[key] = _read_source(source, options, self._kinds.get(key, ""))
            except CodeRepairError as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, CodeRepairError):
            raise result
        return result

    def training_tasks(self) -> tuple[WeightedTasks, ...]:
        """Training tasks by source, without those held out. Raises `TaskError` if none is left."""
        return self._read_shares(self.config.tasks.holdout or 0.0)

    def _read_shares(self, holdout: float) -> tuple[WeightedTasks, ...]:
        shares = tuple(make_each(lambda each: self._read_share(each, holdout), self.sources))
        _check_unique(task for share in shares for task in share.tasks)
        return shares

    def _read_share(self, named: Source, holdout: float) -> WeightedTasks:
        source, split = self.read(named.source, named.options), self.config.tasks.split
        tasks.check_trainable(source.evaluation_set)
        selected = _tasks_of_split(source.tasks, split)
        if not selected:
            splits = ", ".join(sorted({task.split for task in source.tasks}))
            raise TaskError(f"{named.source} has no task in split {split!r}", fix=f"splits it has: {splits or 'none'}")
        kept = tuple(task for task in selected if not is_held_out(task.id, holdout))
        if not kept:
            raise TaskError(
                f"tasks.holdout={holdout:g} leaves none of the {len(selected)} tasks of {named.source}",
                fix="hold out less: crrl collect takes what is held out, training the rest",
            )
        return WeightedTasks(rewrite_references(kept), named.weight)

    def evaluated_tasks(self) -> dict[str, tuple[Task, ...]]:
        """Tasks of each evaluation: all of its split, or a sample."""
        evaluations = self.config.eval.each
        return dict(zip(evaluations, make_each(self._read_evaluation_tasks, evaluations.values()), strict=True))

    def _read_evaluation_tasks(self, evaluation: Eval) -> tuple[Task, ...]:
        sources = [(evaluation.source, evaluation.options)]
        if not evaluation.source:  # the training tasks' sources
            sources = [(each.source, evaluation.options or each.options) for each in self.sources]
        distinct = {_source_key(*each): each for each in sources}.values()  # training may name a source twice
        everything = [task for each in distinct for task in self.read(*each).tasks]
        selected = draw_task_sample(
            _tasks_of_split(everything, evaluation.split), evaluation.tasks, self.config.run.seed
        )
        selected = rewrite_references(selected)
        _check_unique(selected)
        return selected

    def collected_tasks(self) -> dict[str, tuple[Task, ...]]:
        """Tasks that `crrl collect` attempts, by evaluation."""
        share = collected_share(self.config)
        shares = self._read_shares(0.0)
        collected = [
            replace(each, tasks=tuple(task for task in each.tasks if is_held_out(task.id, share))) for each in shares
        ]
        if not any(each.tasks for each in collected):
            raise TaskError(
                f"none of the {sum(len(each.tasks) for each in shares)} tasks is in the share of {share:g} that"
                " crrl collect attempts",
                fix="collect from a larger share: tasks.holdout=0.5",
            )
        seed, evaluations = self.config.run.seed, self.config.eval.each
        return {name: sample_sources(collected, evaluation.tasks, seed) for name, evaluation in evaluations.items()}


def collected_share(config: Config) -> float:
    """Share of the training tasks that `crrl collect` attempts."""
    return COLLECTED_SHARE if config.tasks.holdout is None else config.tasks.holdout


class _SourceTasks(NamedTuple):
    """Tasks of a source, and its name if it is an evaluation set."""

    tasks: list[Task]
    evaluation_set: str


def _source_key(source: str, options: Mapping[str, Any]) -> str:
    return json.dumps([source, options], sort_keys=True, default=repr)


def _read_source(source: str, options: Mapping[str, Any], kind: str) -> _SourceTasks:
    if (source, dict(options)) == (Tasks().source, {}):
        raise ConfigError(
            "no tasks are named",
            fix="tasks.source=NAME, of `crrl tasks list`, or tasks.options.path=FILE; to measure a model:"
            " crrl eval SOURCE --policy MODEL",
        )
    task_source = tasks.make_source(source, **options)
    task_source.prepare()
    tasks_read = [replace(task, kind=task.kind or kind) for task in task_source] if kind else list(task_source)
    return _SourceTasks(tasks_read, task_source.evaluation_set)


def _tasks_of_split(everything: Sequence[Task], split: str) -> tuple[Task, ...]:
    return tuple(task for task in everything if task.split == split)


def _check_unique(tasks: Iterable[Task]) -> None:
    for name, count in Counter(task.id for task in tasks).items():
        if count > 1:
            raise TaskError(f"there are {count} tasks {name}", fix="leave all but one out: ids are unique in a run")


def check_workspaces(everything: Sequence[Task], check_image: Callable[[str], None] = lambda _: None) -> None:
    """Raise the errors of workspaces that cannot be opened, a few by name, and of changed environments."""

    def check_files(task: Task) -> None:
        try:
            for workspace in filter(None, (task.workspace, task.checks.workspace)):
                check_workspace(workspace, check_image)
        except TaskError as error:
            raise TaskError(f"task {task.id}: {error}", fix=error.fix) from error

    distinct = {task.workspace: task for task in everything if task.workspace}.values()
    errors = collect_errors([partial(check, task) for task in distinct for check in (find_environment, check_files)])
    if (more := len(errors) - _MOST_ERRORS) > 0:
        counted = TaskError(f"{more} more workspaces cannot be opened", fix="crrl tasks verify SOURCE lists them")
        errors = [*errors[:_MOST_ERRORS], counted]
    raise_errors([*errors, *collect_errors([partial(check_environments, everything)])])


def draw_task_sample(tasks: Sequence[Task], n: int, seed: int) -> tuple[Task, ...]:
    """Draw `n` of `tasks` without replacement; all, in order, for 0 or too large an `n`.

    Draws are by `seed` and id alone: the source's order has no effect, and a larger `n` extends a smaller sample.
    """
    if not 0 < n < len(tasks):
        return tuple(tasks)
    return tuple(sorted(tasks, key=lambda task: (derive_seed(seed, "eval", task.id), task.id))[:n])


def sample_sources(sources: Sequence[WeightedTasks], n: int, seed: int) -> tuple[Task, ...]:
    """Draw `n` tasks by `draw_task_sample` from each source, in proportion to the weights; all for 0.

    A source with too few tasks leaves its places to the others.
    """
    sizes = Counter({at: len(source.tasks) for at, source in enumerate(sources)})
    if 0 < n < sizes.total():
        sizes = Counter(at for at, _ in spread_sources(sources, n, repeats=False))
    drawn = (draw_task_sample(source.tasks, sizes[at], seed) for at, source in enumerate(sources) if sizes[at])
    return tuple(chain.from_iterable(drawn))


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
            fix="give patch_edits, patch_lines or hybrid a weight, or leave the setting out",
        )
    if not is_attempted_twice(config, len(tasks)):
        raise ConfigError(
            f"{key}, and none of the {len(tasks)} training tasks is attempted in two steps: {config.run.steps} steps of"
            f" {config.rollout.tasks_per_step} tasks end before the second epoch",
            fix="train on fewer tasks or for more steps, or set tasks.verified_references=0",
        )


def is_attempted_twice(config: Config, tasks: int) -> bool:
    """Whether any of `tasks` training tasks may be attempted in two steps."""
    drawn = config.run.steps * config.rollout.tasks_per_step
    # a curriculum may draw a task again before all were drawn; without steps nothing is known
    return config.curriculum != Curriculum() or not 0 < drawn <= tasks


def read_tasks_learned_by_model(model: str) -> frozenset[str]:
    """Ids of the tasks whose trajectories `model`, or the run it began from, has learned.

    Raises `UsageError` for an unknown model, `RunError` for damage.
    """
    named_model = models.resolve_model(model)
    return read_learned(named_model.run or named_model.adapter or named_model.folder)


def check_learned(config: Config, tasks: Iterable[Task]) -> None:
    """Raise `TaskError` if the model has learned trajectories of training `tasks`, unless ``tasks.learned=train``."""
    if config.tasks.learned == "train" or config.model.init == "random":
        return
    learned_ids = read_tasks_learned_by_model(config.model.path)
    ids = [task.id for task in tasks]
    learned = [name for name in ids if name in learned_ids]
    if not learned:
        return
    share = collected_share(config)
    others = "train on others"
    if all(is_held_out(name, share) for name in learned) and not all(is_held_out(name, share) for name in ids):
        others = f"train on the others: tasks.holdout={share:g}"
    raise TaskError(
        f"{config.model.path} was fine-tuned on trajectories of {len(learned)} of the {len(ids)} training tasks,"
        f" for example {learned[0]}: its reward on these says little about learning",
        fix=f"{others}; if you mean it, tasks.learned=train",
    )


def resolve_rewards(
    config: Config, training_tasks: Iterable[Task], evaluated_tasks: Iterable[Task]
) -> tuple[Config, dict[str, str]]:
    """Fill in rewards and ``tasks.verified_references``, and describe them. The tasks matter if no reward is named.

    Raises `ConfigError` if the tasks have no common measure, or a setting contradicts the rewards.
    """
    verified, reasons = config.tasks.verified_references or 0, {"train": "", "evaluations": ""}
    if not config.reward:
        trained = _tasks_without_own_reward(config, training_tasks)
        data = config.model_dump(exclude_none=True)
        data["reward"] = choose_reward(trained, for_training=True)
        reasons["train"] = f" (no reward is named, and of {_describe_tasks(trained)})"
        if config.tasks.verified_references is None and "hybrid" in data["reward"]:
            verified = VERIFIED_REFERENCES if is_attempted_twice(config, len(trained)) else 0
        if not config.eval.reward:
            held_out = _tasks_without_own_reward(config, evaluated_tasks)
            data["eval"]["reward"] = choose_reward(held_out)
            reasons["evaluations"] = f" (eval.reward names none, and of {_describe_tasks(held_out)})"
        validate_config(data, "the reward that follows from the tasks")
        # not the validated copy, in which every setting counts as given by the user
        evaluation = config.eval.model_copy(update={"reward": data["eval"]["reward"]})
        config = config.model_copy(update={"reward": data["reward"], "eval": evaluation})
    config = config.model_copy(update={"tasks": config.tasks.model_copy(update={"verified_references": verified})})
    training, evaluations = (
        ", ".join(f"{name} {weight:g}" for name, weight in reward.items())
        for reward in (config.reward, config.eval.reward or config.reward)
    )
    if verified:
        training += f", with up to {verified} verified references of each task"
    return config, {"train": training + reasons["train"], "evaluations": evaluations + reasons["evaluations"]}


def resolve_measured_reward(config: Config, tasks: Iterable[Task]) -> Config:
    """Fill in the rewards that evaluations on `tasks` measure. Raises as `choose_reward`."""
    measured = choose_reward(_tasks_without_own_reward(config, tasks))
    return config.model_copy(update={"eval": config.eval.model_copy(update={"reward": measured})})


def choose_reward(tasks: Sequence[Task], *, for_training: bool = False) -> dict[str, float]:
    """Weighted rewards that recognise repairs of `tasks`, by checks, else references, else answers.

    `for_training` adds references to the checks: a group that never passes would teach nothing. Raises `ConfigError`
    without a common measure.
    """
    references = all(task.reference.strip() for task in tasks)
    if tasks and all(task.checks for task in tasks):
        if for_training and references:
            return {"hybrid": 1.0}
        return {"tests": 1.0} | ({"patch_edits": 0.0} if references else {})
    if references:
        return {"patch_edits": 1.0}
    if all(task.answer for task in tasks):
        return {"label": 1.0}
    raise ConfigError(
        "some tasks lack checks, some references: there is no one measure of all",
        fix=f"name it: {'reward' if for_training else 'eval.reward'}=NAME",
    )


def _tasks_without_own_reward(config: Config, tasks: Iterable[Task]) -> list[Task]:
    """Tasks whose kind names no reward."""
    return [task for task in tasks if not (task.kind in config.kinds and config.kinds[task.kind].reward)]


def _describe_tasks(tasks: Sequence[Task]) -> str:
    checks = sum(bool(task.checks) for task in tasks)
    references = sum(bool(task.reference.strip()) for task in tasks)
    return f"{format_count(len(tasks), 'task')} {checks} have checks and {references} have a reference"
