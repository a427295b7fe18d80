"""Groups of attempts at the same task, with retries for what the infrastructure spoilt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from coderepairrl.errors import HealthGateError
from coderepairrl.rollout.episodes import Rollout, Ticket, derive_seed
from coderepairrl.types import Ending, Episode, Sampling, Task, Verified


@dataclass(frozen=True, slots=True)
class Group:
    """Attempts at one task that share a baseline. `void` counts every void try, retried or not."""

    id: str
    task: Task
    episodes: tuple[Episode, ...]
    void: int = 0


def schedule(tasks: Sequence[Task], per_step: int, step: int, seed: int) -> list[Task]:
    """The tasks of `step` (1, 2, ...): every task once per epoch, each epoch in an order of its own.

    A function of its arguments alone, so that a resumed run goes on exactly where it was.
    """
    picked = []
    for position in range((step - 1) * per_step, step * per_step):
        epoch, index = divmod(position, len(tasks))
        order = list(range(len(tasks)))
        random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
        picked.append(tasks[order[index]])
    return picked


async def collect(
    rollout: Rollout,
    tasks: Sequence[Task],
    *,
    phase: str,
    step: int,
    attempts: int,
    sampling: Sampling,
    seed: int,
    retries: int,
    finished: Iterable[Episode] = (),
    tried: Mapping[tuple[str, int], int] = MappingProxyType({}),
    verified: Mapping[str, tuple[Verified, ...]] = MappingProxyType({}),
) -> list[Group]:
    """`attempts` episodes at each of `tasks`, all at once as far as the rollout's concurrency allows.

    A void episode is tried again up to `retries` times with the same seed. For a step that was interrupted,
    `finished` are its episodes, taken as they are, and `tried` counts the attempts begun by (group, attempt).
    `verified` are further references by task id, the same for all attempts whichever ends first.
    """
    done = {(episode.group, episode.attempt): episode for episode in finished if episode.ending is not Ending.VOID}

    async def attempt(ticket: Ticket) -> tuple[Episode, int]:
        key = (ticket.group, ticket.attempt)
        if key in done and done[key].task_id == ticket.task.id:  # else the tasks have changed since
            return done[key], 0
        first = tried.get(key, 0)
        for void in range(retries + 1):
            episode = await rollout.run(replace(ticket, retry=first + void))
            if episode.ending is not Ending.VOID:
                return episode, void
        return episode, retries + 1

    rows: list[list[Ticket]] = []
    for position, task in enumerate(tasks):
        group = f"{phase}-{step:05d}-{position:03d}"
        # a task that the step has twice is not attempted with the same seeds again
        before = attempts * sum(earlier.id == task.id for earlier in tasks[:position])
        seeds = [derive_seed(seed, phase, step, task.id, before + number) for number in range(attempts)]
        known = verified.get(task.id, ())
        rows.append([Ticket(task, phase, step, group, at, own, sampling, known) for at, own in enumerate(seeds)])
    try:
        async with asyncio.TaskGroup() as pending:
            jobs = [[pending.create_task(attempt(ticket)) for ticket in row] for row in rows]
    except BaseExceptionGroup as several:  # the first is the cause; the others were cancelled or followed from it
        raise several.exceptions[0] from None
    results = [[job.result() for job in row] for row in jobs]
    return [
        Group(row[0].group, row[0].task, tuple(episode for episode, _ in made), sum(void for _, void in made))
        for row, made in zip(rows, results, strict=True)
    ]


def check_health(groups: Sequence[Group], limit: float) -> None:
    """Raise `HealthGateError` when more than `limit` of the episodes are void after all retries."""
    episodes = [episode for group in groups for episode in group.episodes]
    void = [episode for episode in episodes if episode.ending is Ending.VOID]
    if len(void) > limit * len(episodes):
        faults = sorted({episode.fault.splitlines()[0] for episode in void})
        raise HealthGateError(
            f"{len(void)} of {len(episodes)} episodes are void: {'; '.join(faults[:3])}",
            fix="mend the cause (log.jsonl and logs/ in the run folder say more), then continue with --resume",
        )
