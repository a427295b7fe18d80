"""Tasks of a run: read, split and sampled, and their workspaces checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from coderepairrl import tasks
from coderepairrl.config import Config
from coderepairrl.config.sections.evaluation import Eval
from coderepairrl.config.sections.tasks import Curriculum, Source, Tasks
from coderepairrl.environments import check_environments
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.plan.place import Place
from coderepairrl.plan.problems import Made, Problems
from coderepairrl.rewards import Weighted
from coderepairrl.rollout import Share, derive_seed
from coderepairrl.sandbox.contents import check_workspace
from coderepairrl.sandbox.workspace import environment_of
from coderepairrl.tasks.prepare import with_diffed_references
from coderepairrl.tasks.select import held_out
from coderepairrl.types import Task

COLLECTED = 0.25
"""Share of tasks that `crrl collect` attempts if `tasks.holdout` is not set."""
_TASKS_NAMED = 3
"""Number of tasks that cannot be opened with a message each; the others are counted."""


def read_tasks(
    config: Config, problems: Problems, *, training: bool = True
) -> tuple[Made[tuple[Share, ...]], Made[Mapping[str, tuple[Task, ...]]]]:
    """Training tasks by source, and held-out ones by evaluation."""
    settings, sources_read = config.tasks, dict[str, Made[_Source]]()
    sources = settings.sources or (Source(source=settings.source, options=settings.options),)

    def key(source: str, options: Mapping[str, Any]) -> str:
        return json.dumps([source, options], sort_keys=True, default=repr)

    kinds = {key(each.source, each.options): each.kind for each in sources}

    def read(source: str, options: Mapping[str, Any]) -> Made[_Source]:
        at = key(source, options)
        if at not in sources_read:
            sources_read[at] = problems.attempt(lambda: _read(source, options, kinds.get(at, "")))
        return sources_read[at]

    def train() -> tuple[Share, ...]:
        shares = []
        for each in sources:
            there = read(each.source, each.options).value
            tasks.check_trainable(there.evaluation_set)
            everything = there.tasks
            selected = _split(everything, settings.split)
            if not selected:
                splits = ", ".join(sorted({task.split for task in everything}))
                raise TaskError(
                    f"{each.source} has no task in split {settings.split!r}", fix=f"splits it has: {splits or 'none'}"
                )
            left = tuple(task for task in selected if not held_out(task.id, settings.holdout or 0.0))
            if not left:
                raise TaskError(
                    f"tasks.holdout={settings.holdout:g} leaves none of the {len(selected)} tasks of {each.source}",
                    fix="hold out less: crrl collect takes what is held out, training the rest",
                )
            shares.append(Share(with_diffed_references(left), each.weight))
        _once(task for share in shares for task in share.tasks)
        return tuple(shares)

    def measured() -> Mapping[str, tuple[Task, ...]]:
        selected = {}
        for name, there in config.eval.each.items():
            named = [(there.source, there.options)]
            if not there.source:  # that of the training tasks, or all of them
                named = [(each.source, there.options or each.options) for each in sources]
            named = list({key(*each): each for each in named}.values())  # training may take two splits of one source
            everything = [task for source, options in named for task in read(source, options).value.tasks]
            selected[name] = with_diffed_references(
                sample(_split(everything, there.split), there.tasks, config.run.seed)
            )
            _once(selected[name])
        return selected

    return problems.attempt(train) if training else Made([]), problems.attempt(measured)


def read_collected(config: Config, problems: Problems) -> Made[Mapping[str, tuple[Task, ...]]]:
    """Tasks that `crrl collect` attempts, by evaluation."""
    share = collected_share(config)
    without_holdout = {"tasks": config.tasks.model_copy(update={"holdout": None}), "eval": Eval()}
    sources, _ = read_tasks(config.model_copy(update=without_holdout), problems)

    def collected() -> Mapping[str, tuple[Task, ...]]:
        left_out = [
            replace(each, tasks=tuple(task for task in each.tasks if held_out(task.id, share)))
            for each in sources.value
        ]
        _once(task for each in left_out for task in each.tasks)
        if not any(each.tasks for each in left_out):
            raise TaskError(
                f"none of the {sum(len(each.tasks) for each in sources.value)} tasks is among the {share:g} that are"
                " collected from",
                fix="collect from a larger share: tasks.holdout=0.5",
            )
        return {
            name: sample_sources(left_out, evaluation.tasks, config.run.seed)
            for name, evaluation in config.eval.each.items()
        }

    return problems.attempt(collected)


def collected_share(config: Config) -> float:
    """Share of the training tasks that `crrl collect` attempts."""
    return COLLECTED if config.tasks.holdout is None else config.tasks.holdout


class _Source(NamedTuple):
    """Tasks of a source, and its name if it is an evaluation set."""

    tasks: list[Task]
    evaluation_set: str


def _read(source: str, options: Mapping[str, Any], kind: str) -> _Source:
    if (source, dict(options)) == (Tasks().source, {}):
        raise ConfigError(
            "no tasks are named",
            fix="tasks.source=NAME, of `crrl tasks list`, or tasks.options.path=FILE; to measure a model:"
            " crrl eval SOURCE --policy MODEL",
        )
    task_source = tasks.make(source, **options)
    task_source.prepare()
    tasks_read = [replace(task, kind=task.kind or kind) for task in task_source] if kind else list(task_source)
    return _Source(tasks_read, task_source.evaluation_set)


def _split(everything: Sequence[Task], split: str) -> tuple[Task, ...]:
    return tuple(task for task in everything if task.split == split)


def _once(some: Iterable[Task]) -> None:
    for name, count in Counter(task.id for task in some).items():
        if count > 1:
            raise TaskError(f"there are {count} tasks {name}", fix="leave all but one out: ids are unique in a run")


def check_workspaces(everything: Iterable[Task], place: Made[Place], problems: Problems) -> None:
    """Report workspaces that cannot be opened, a few by name, and changed environments."""
    everything = list(everything)
    check_image = place.value.sandbox.check_image if place else lambda _: None
    refused = list(_refused({task.workspace: task for task in everything if task.workspace}.values(), check_image))
    for error in refused[:_TASKS_NAMED]:
        problems.add(error)
    if (more := len(refused) - _TASKS_NAMED) > 0:
        problems.add(TaskError(f"{more} more workspaces cannot be opened", fix="crrl tasks verify lists them"))
    problems.attempt(lambda: check_environments(everything))


def _refused(some: Iterable[Task], check_image: Callable[[str], None]) -> Iterator[TaskError]:
    for task in some:
        try:
            environment_of(task)
        except TaskError as error:
            yield error
        try:
            check_workspace(task.workspace, check_image)
            if task.checks.workspace:
                check_workspace(task.checks.workspace, check_image)
        except TaskError as error:
            yield TaskError(f"task {task.id}: {error}", fix=error.fix)


def sample(tasks: Sequence[Task], n: int, seed: int) -> tuple[Task, ...]:
    """Draw `n` of `tasks` without replacement; all, in order, for 0 or too large an `n`.

    Draws are by `seed` and id alone: the source's order has no effect, and a larger `n` extends a smaller sample.
    """
    if not 0 < n < len(tasks):
        return tuple(tasks)
    return tuple(sorted(tasks, key=lambda task: (derive_seed(seed, "eval", task.id), task.id))[:n])


def sample_sources(sources: Sequence[Share], n: int, seed: int) -> tuple[Task, ...]:
    """Draw `n` tasks as `sample` does from each source, in proportion to the weights; all for 0.

    A source with too few tasks leaves its places to the others.
    """
    sizes = [len(source.tasks) for source in sources]
    if 0 < n < sum(sizes):
        total, counts = sum(source.weight for source in sources), [0] * len(sources)
        for place in range(1, n + 1):
            lags = {
                at: place * source.weight / total - counts[at]
                for at, source in enumerate(sources)
                if counts[at] < sizes[at]
            }
            counts[max(lags, key=lags.__getitem__)] += 1
        sizes = counts
    drawn = (sample(source.tasks, size, seed) for source, size in zip(sources, sizes, strict=True) if size)
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
            fix="pay for patch_edits, patch_lines or hybrid, or leave it out",
        )
    if not is_attempted_twice(config, len(tasks)):
        raise ConfigError(
            f"{key}, and none of the {len(tasks)} training tasks is attempted in two steps: {config.run.steps} steps of"
            f" {config.rollout.tasks_per_step} tasks end before the second epoch",
            fix="train on fewer tasks or for more steps, or set tasks.verified_references=0",
        )


def is_attempted_twice(config: Config, tasks: int) -> bool:
    """Whether any of this many training `tasks` may be attempted in two steps."""
    attempts = config.run.steps * config.rollout.tasks_per_step
    return config.curriculum != Curriculum() or not 0 < attempts <= tasks
