"""Queue of groups made ahead of their steps, so that engine and learner do not wait for each other.

A group's staleness is the number of policy versions from its beginning to its step. The queue bounds it by limiting
how many groups may begin, not by dropping old ones, which would favour short attempts. A step may take younger groups
before older ones, unless older ones would become too stale; then it waits. With a bound of 0 a step begins its groups
and waits for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from coderepairrl.rollout.groups import Group, PlannedGroup


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """Group that no step has consumed, with the policy version at its beginning."""

    group: str
    version: int
    finished: bool = False


@dataclass(frozen=True, slots=True)
class StalenessWindow:
    """Bound on staleness, in policy versions, for steps that consume `per_step` groups each."""

    per_step: int
    staleness: int

    def capacity(self, wanted: int, begun: int, later: int) -> int:
        """Count groups that may begin: this step needs `wanted`, `later` steps follow, `begun` groups are unconsumed.

        >>> StalenessWindow(per_step=4, staleness=0).capacity(4, 0, later=9)
        4
        >>> StalenessWindow(per_step=4, staleness=2).capacity(4, 5, later=9)
        7
        """
        return max(0, wanted + self.per_step * min(self.staleness, later) - begun)

    def stale(self, begun: Iterable[PendingGroup], version: int, wanted: int) -> list[PendingGroup]:
        """Find groups that no step can consume in time, if the step at `version` still takes `wanted`.

        Of groups that compete for a step, the younger are stale.

        >>> window = StalenessWindow(per_step=1, staleness=1)
        >>> begun = [PendingGroup("a", 3), PendingGroup("b", 4), PendingGroup("c", 4), PendingGroup("d", 5)]
        >>> [each.group for each in window.stale(begun, version=5, wanted=1)]
        ['a', 'c']
        """
        usable, stale = 0, list[PendingGroup]()
        for each in sorted(begun, key=lambda each: each.version):
            if self._version_at(usable, version, wanted) - each.version > self.staleness:
                stale.append(each)
            else:
                usable += 1
        return stale

    def choose(self, begun: Sequence[PendingGroup], version: int, wanted: int) -> list[PendingGroup] | None:
        """Choose the oldest `wanted` finished groups for the step at `version`.

        Returns None if too few are finished, or if a group that is left would become too stale.

        >>> window = StalenessWindow(per_step=1, staleness=1)
        >>> young = PendingGroup("young", 5, finished=True)
        >>> window.choose([PendingGroup("old", 4), young], version=4, wanted=1) == [young]
        True
        >>> window.choose([PendingGroup("old", 4), young], version=5, wanted=1) is None
        True
        """
        finished = [each for each in begun if each.finished]
        if len(finished) < wanted:
            return None
        chosen = sorted(finished, key=lambda each: each.version)[:wanted]
        remaining = [each for each in begun if each not in chosen]
        return None if self.stale(remaining, version, wanted=0) else chosen

    def _version_at(self, position: int, version: int, wanted: int) -> int:
        # return the version at which the group at `position` of the queue is consumed
        return version if position < wanted else version + 1 + (position - wanted) // self.per_step


@dataclass(slots=True)
class _Entry:
    slot: PlannedGroup
    version: int | None
    work: asyncio.Task[Group] | None = None

    @property
    def finished(self) -> bool:
        return self.work is not None and self.work.done()


MakeGroup = Callable[[PlannedGroup, Callable[[], None]], Coroutine[Any, Any, Group]]


class GroupQueue:
    """Queue of groups; leaving it cancels unfinished ones."""

    def __init__(self, window: StalenessWindow) -> None:
        self.window = window
        self._entries: dict[str, _Entry] = {}
        self._version = 0

    @property
    def pending(self) -> list[PendingGroup]:
        """Queued groups; those not started yet count as if they began now."""
        return [
            PendingGroup(group, self._version if entry.version is None else entry.version, entry.finished)
            for group, entry in self._entries.items()
        ]

    @property
    def slots(self) -> list[PlannedGroup]:
        """Plans of queued groups."""
        return [entry.slot for entry in self._entries.values()]

    @property
    def waiting(self) -> list[PlannedGroup]:
        """Plans of groups not begun in this process."""
        return [entry.slot for entry in self._entries.values() if entry.work is None]

    def add(self, slot: PlannedGroup, version: int | None = None) -> None:
        """Append a group, with its version if an earlier process began it."""
        self._entries[slot.group] = _Entry(slot, version)

    async def requeue_stale(self, version: int, wanted: int) -> list[str]:
        """Cancel and requeue stale groups; return their names. `version` is the policy's new one."""
        self._version = version
        stale = [each.group for each in self.window.stale(self.pending, version, wanted)]
        await _cancel(self._entries[group].work for group in stale)
        for group in stale:
            self._entries[group] = _Entry(self._entries[group].slot, None)
        return stale

    def start(self, make: MakeGroup) -> None:
        """Begin all unstarted groups."""
        for entry in self._entries.values():
            if entry.work is None:
                entry.work = asyncio.create_task(make(entry.slot, partial(self._record_beginning, entry)))

    def _record_beginning(self, entry: _Entry) -> None:
        if entry.version is None:
            entry.version = self._version

    async def take(self, version: int, wanted: int) -> list[Group]:
        """Take `wanted` groups for the step at `version` (`StalenessWindow.choose`).

        Raises any group's errors.
        """
        while True:
            works = [entry.work for entry in self._entries.values() if entry.work is not None]
            for work in works:
                if work.done():
                    work.result()  # raises the group's error
            chosen = self.window.choose(self.pending, version, wanted)
            if chosen is not None:
                break
            await asyncio.wait([work for work in works if not work.done()], return_when=asyncio.FIRST_COMPLETED)
        chosen_groups = {each.group for each in chosen}
        taken = [self._entries.pop(group).work for group in list(self._entries) if group in chosen_groups]
        return [work.result() for work in taken if work is not None]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancel(entry.work for entry in self._entries.values())
        self._entries.clear()


async def _cancel(tasks: Iterable[asyncio.Task[Group] | None]) -> None:
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
