"""Groups of attempts at a task, retried after infrastructure faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any, TypeVar

from coderepairrl.errors import HealthGateError
from coderepairrl.rollout.curriculum import Curriculum, Outcomes
from coderepairrl.rollout.episodes import PlannedAttempt, Rollout, derive_seed
from coderepairrl.types import Ending, Episode, Sampling, Task, VerifiedRepair

T = TypeVar("T")
Tried = dict[tuple[str, int], int]  # tries of an attempt, by group and number


@dataclass(frozen=True, slots=True)
class Group:
    """Attempts at one task with a common baseline. `void` counts void episodes."""

    id: str
    task: Task
    episodes: tuple[Episode, ...]
    void: int = 0


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Planned group (slot): its place in a run's order, and a seed per attempt.

    It is scheduled for the optimiser step `step` (in evaluations the number of earlier updates); another step may
    consume it.
    """

    group: str
    task: Task
    phase: str
    step: int
    seeds: tuple[int, ...]


def plan_groups(phase: str, step: int, tasks: Sequence[Task], attempts: int, seed: int) -> list[PlannedGroup]:
    """Plan a group per task; repeated tasks get different seeds."""
    planned = []
    for position, task in enumerate(tasks):
        earlier_attempts = attempts * sum(earlier.id == task.id for earlier in tasks[:position])
        seeds = tuple(derive_seed(seed, phase, step, task.id, earlier_attempts + number) for number in range(attempts))
        planned.append(PlannedGroup(group_name(phase, step, position), task, phase, step, seeds))
    return planned


def group_name(phase: str, step: int, position: int) -> str:
    """Name of the group at `position` (0, 1, ...) of `step`.

    >>> group_name("train", 3, 0)
    'train-00003-000'
    """
    return f"{phase}-{step:05d}-{position:03d}"


def plan_due_groups(
    curriculum: Curriculum,
    attempts: int,
    wanted: int,
    consumed: Container[str],
    outcomes: Outcomes = MappingProxyType({}),
    taken: Collection[str] = (),
    tasks_by_id: Mapping[str, Task] = MappingProxyType({}),
) -> list[PlannedGroup]:
    """Plan the first `wanted` unconsumed groups in the run's order (`Curriculum.schedule`).

    Depends only on the log: names of `consumed` groups, and `outcomes`. `taken` are task ids already in the batch,
    `tasks_by_id` the tasks of groups begun before, by group id.
    """
    per_step, due = curriculum.per_step, list[PlannedGroup]()
    if not wanted:  # nothing to draw, and drawing for a later step may be impossible
        return due
    for step in count(1):
        if all(group_name("train", step, position) in consumed for position in range(per_step)):
            continue
        tasks = curriculum.schedule(step, outcomes, [*taken, *(slot.task.id for slot in due)])
        tasks = [tasks_by_id.get(group_name("train", step, position), task) for position, task in enumerate(tasks)]
        scheduled = plan_groups("train", step, tasks, attempts, curriculum.seed)
        due += [slot for slot in scheduled if slot.group not in consumed]
        if len(due) >= wanted:
            break
    return due[:wanted]


async def make_groups(
    rollout: Rollout,
    slots: Sequence[PlannedGroup],
    *,
    sampling: Sampling,
    retries: int,
    finished: Iterable[Episode] = (),
    tried: Tried | None = None,
    verified: Mapping[str, tuple[VerifiedRepair, ...]] = MappingProxyType({}),
) -> list[Group]:
    """Make all groups concurrently with `make_group`."""
    finished, tried = tuple(finished), {} if tried is None else tried
    return await gather_or_cancel(
        make_group(rollout, slot, sampling=sampling, retries=retries, finished=finished, tried=tried, verified=verified)
        for slot in slots
    )


async def make_group(
    rollout: Rollout,
    slot: PlannedGroup,
    *,
    sampling: Sampling,
    retries: int,
    finished: Iterable[Episode],
    tried: Tried,
    verified: Mapping[str, tuple[VerifiedRepair, ...]],
    began: Callable[[], None] = lambda: None,
) -> Group:
    """Make the attempts of `slot`, as concurrently as the rollout allows.

    Void episodes are retried up to `retries` times with the same seed. `finished` are episodes of an interrupted group.
    `tried`, which is updated, counts attempts begun. `began` is called as each begins.
    """
    done = {(episode.group, episode.attempt): episode for episode in finished if episode.ending is not Ending.VOID}

    async def attempt(number: int) -> tuple[Episode, int]:
        key = (slot.group, number)
        if key in done and done[key].task_id == slot.task.id:  # otherwise the tasks have changed
            return done[key], 0
        planned = PlannedAttempt(
            slot.task,
            slot.phase,
            slot.step,
            slot.group,
            number,
            slot.seeds[number],
            sampling,
            verified=verified.get(slot.task.id, ()),
        )
        for void in range(retries + 1):
            retry = tried.get(key, 0)  # counts earlier runs too, so that no two episodes of a log share an id
            tried[key] = retry + 1
            episode = await rollout.run(replace(planned, retry=retry), began)
            if episode.ending is not Ending.VOID:
                return episode, void
        return episode, retries + 1

    attempts = await gather_or_cancel(attempt(number) for number in range(len(slot.seeds)))
    episodes = tuple(episode for episode, _ in attempts)
    return Group(slot.group, slot.task, episodes, void=sum(void for _, void in attempts))


async def gather_or_cancel(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all `jobs` concurrently. Raises the first error, after the other jobs are cancelled."""
    try:
        async with asyncio.TaskGroup() as pending:
            tasks = [pending.create_task(job) for job in jobs]
    except BaseExceptionGroup as several:  # the first is the cause; the others were cancelled or followed from it
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


def list_episodes(groups: Iterable[Group]) -> list[Episode]:
    """Episodes of all groups."""
    return [episode for group in groups for episode in group.episodes]


def check_health(groups: Sequence[Group]) -> None:
    """Raise `HealthGateError` when more than half of the episodes are void."""
    episodes = list_episodes(groups)
    void = [episode for episode in episodes if episode.ending is Ending.VOID]
    if 2 * len(void) > len(episodes):
        faults = sorted({episode.fault.splitlines()[0] for episode in void})
        raise HealthGateError(
            f"{len(void)} of {len(episodes)} episodes are void: {'; '.join(faults[:3])}",
            fix="remove the cause (log.jsonl and logs/ in the run folder say more), then continue with --resume",
        )
