"""Groups of attempts at the same task, with retries for what the infrastructure spoilt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any, TypeVar

from coderepairrl.errors import HealthGateError
from coderepairrl.rollout.curriculum import Curriculum, Outcomes
from coderepairrl.rollout.episodes import Rollout, Ticket, derive_seed
from coderepairrl.types import Ending, Episode, Sampling, Task, Verified

T = TypeVar("T")
Tried = dict[tuple[str, int], int]
"""How often each attempt was begun, by group and attempt."""


@dataclass(frozen=True, slots=True)
class Group:
    """Attempts at one task that share a baseline. `void` counts every void try, retried or not."""

    id: str
    task: Task
    episodes: tuple[Episode, ...]
    void: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A group that is to be made: its place in the order of a run, and a seed for each attempt.

    `step` is the optimiser step (of an evaluation: the number of updates before it) for which it was scheduled; a
    training step may consume groups that were scheduled for another.
    """

    group: str
    task: Task
    phase: str
    step: int
    seeds: tuple[int, ...]


def slots(phase: str, step: int, tasks: Sequence[Task], attempts: int, seed: int) -> list[Slot]:
    """A group of `attempts` for each of `tasks`. A task that the step has twice gets other seeds the second time."""
    made = []
    for position, task in enumerate(tasks):
        before = attempts * sum(earlier.id == task.id for earlier in tasks[:position])
        seeds = tuple(derive_seed(seed, phase, step, task.id, before + number) for number in range(attempts))
        made.append(Slot(group_name(phase, step, position), task, phase, step, seeds))
    return made


def group_name(phase: str, step: int, position: int) -> str:
    """Of the group at `position` (0, 1, ...) among those scheduled for `step`.

    >>> group_name("train", 3, 0)
    'train-00003-000'
    """
    return f"{phase}-{step:05d}-{position:03d}"


def due(
    curriculum: Curriculum,
    attempts: int,
    wanted: int,
    consumed: Container[str],
    outcomes: Outcomes = MappingProxyType({}),
    taken: Collection[str] = (),
    known: Mapping[str, Task] = MappingProxyType({}),
) -> list[Slot]:
    """Of the run's order the first `wanted` groups that no step has consumed.

    A function of the log, which has the names of the `consumed` groups and the `outcomes` of their attempts. Where
    every step consumes what was scheduled for it, that is the next step's share; a group that was left behind comes
    first. `taken` are ids of tasks that the batch has already. `known` are the tasks of groups that were begun before,
    which keep them whatever the order would draw by now.
    """
    per_step, left = curriculum.per_step, list[Slot]()
    if not wanted:  # what a later step would draw may not be possible
        return left
    for step in count(1):
        if all(group_name("train", step, position) in consumed for position in range(per_step)):
            continue
        tasks = curriculum.schedule(step, outcomes, [*taken, *(slot.task.id for slot in left)])
        tasks = [known.get(group_name("train", step, position), task) for position, task in enumerate(tasks)]
        scheduled = slots("train", step, tasks, attempts, curriculum.seed)
        left += [slot for slot in scheduled if slot.group not in consumed]
        if len(left) >= wanted:
            break
    return left[:wanted]


async def collect(
    rollout: Rollout,
    slots: Sequence[Slot],
    *,
    sampling: Sampling,
    retries: int,
    finished: Iterable[Episode] = (),
    tried: Tried | None = None,
    verified: Mapping[str, tuple[Verified, ...]] = MappingProxyType({}),
) -> list[Group]:
    """The groups of `slots`, all at once as far as the rollout's concurrency allows; otherwise as `make_group`."""
    terms: dict[str, Any] = {"sampling": sampling, "retries": retries, "finished": tuple(finished)}
    terms |= {"tried": {} if tried is None else tried, "verified": verified}
    return await _all(make_group(rollout, slot, **terms) for slot in slots)


async def make_group(
    rollout: Rollout,
    slot: Slot,
    *,
    sampling: Sampling,
    retries: int,
    finished: Iterable[Episode],
    tried: Tried,
    verified: Mapping[str, tuple[Verified, ...]],
    began: Callable[[], None] = lambda: None,
) -> Group:
    """The attempts of `slot`, all at once as far as the rollout's concurrency allows.

    A void episode is tried again up to `retries` times with the same seed. For a group that was interrupted, `finished`
    are its episodes, taken as they are. `tried` counts the attempts begun so far, and goes on counting. `verified` are
    further references by task id, the same for all attempts whichever ends first. `began` is called as each begins.
    """
    done = {(episode.group, episode.attempt): episode for episode in finished if episode.ending is not Ending.VOID}

    async def attempt(number: int) -> tuple[Episode, int]:
        """The episode, void only if all of ``1 + retries`` tries were; and how many were."""
        key = (slot.group, number)
        if key in done and done[key].task_id == slot.task.id:  # else the tasks have changed since
            return done[key], 0
        ticket = Ticket(
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
            again = tried.get(key, 0)  # a number of its own, so that no two episodes of a log share an id
            tried[key] = again + 1
            episode = await rollout.run(replace(ticket, retry=again), began)
            if episode.ending is not Ending.VOID:
                return episode, void
        return episode, retries + 1

    attempts = await _all(attempt(number) for number in range(len(slot.seeds)))
    episodes = tuple(episode for episode, _ in attempts)
    return Group(slot.group, slot.task, episodes, void=sum(void for _, void in attempts))


async def _all(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What `jobs` return, run at once. When one raises, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as pending:
            tasks = [pending.create_task(job) for job in jobs]
    except BaseExceptionGroup as several:  # the first is the cause; the others were cancelled or followed from it
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


def episodes_of(groups: Iterable[Group]) -> list[Episode]:
    """Their episodes, group by group."""
    return [episode for group in groups for episode in group.episodes]


def check_health(groups: Sequence[Group]) -> None:
    """Raise `HealthGateError` when more than half of the episodes are void after all retries."""
    episodes = episodes_of(groups)
    void = [episode for episode in episodes if episode.ending is Ending.VOID]
    if 2 * len(void) > len(episodes):
        faults = sorted({episode.fault.splitlines()[0] for episode in void})
        raise HealthGateError(
            f"{len(void)} of {len(episodes)} episodes are void: {'; '.join(faults[:3])}",
            fix="mend the cause (log.jsonl and logs/ in the run folder say more), then continue with --resume",
        )
