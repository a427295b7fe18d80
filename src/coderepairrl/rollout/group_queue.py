"""Groups that are made ahead of the step that consumes them, so that engine and learner do not wait for each other.

Staleness is counted in policy versions: of a group, how many more the learner has by the step that consumes it than
when it was begun, which bounds that of each of its tokens. It is kept within a bound by what is begun, and not by
throwing away what has become too old: a version consumes at least ``per_step`` groups, so that of as many for each
version of the bound, and those of the current step, the last one's turn still comes in time, provided that no step
takes younger groups first where that would make older ones late. Such a step waits for the older ones: a run that
dropped the attempts that take longest would train on short ones.

With a bound of 0 a step begins its groups itself and waits for them all, and none are begun for the next one before its
weights are live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from coderepairrl.rollout.groups import Group, Slot


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group that no step has consumed yet, and the policy's version when the first of its attempts was begun."""

    group: str
    version: int
    ready: bool = False
    """Whether it is finished."""


@dataclass(frozen=True, slots=True)
class StalenessWindow:
    """How far ahead groups may be made: `staleness` versions, each of which consumes `per_step` of them."""

    per_step: int
    staleness: int

    def capacity(self, wanted: int, begun: int, later: int) -> int:
        """How many groups more may be begun, where this step still takes `wanted`, `later` ones follow it, and `begun`
        are not consumed.

        >>> StalenessWindow(per_step=4, staleness=0).capacity(4, 0, later=9)
        4
        >>> StalenessWindow(per_step=4, staleness=2).capacity(4, 5, later=9)
        7
        """
        return max(0, wanted + self.per_step * min(self.staleness, later) - begun)

    def stale(self, begun: Iterable[PendingGroup], version: int, wanted: int) -> list[PendingGroup]:
        """Which of `begun` no step can consume in time, where the one at `version` still takes `wanted` of them (0: the
        next one is the first): the youngest of those that are in each other's way, and what is too old whatever else
        there is.

        >>> window = StalenessWindow(per_step=1, staleness=1)
        >>> begun = [PendingGroup("a", 3), PendingGroup("b", 4), PendingGroup("c", 4), PendingGroup("d", 5)]
        >>> [each.group for each in window.stale(begun, version=5, wanted=1)]
        ['a', 'c']
        """
        kept, stale = 0, list[PendingGroup]()
        for each in sorted(begun, key=lambda each: each.version):
            if self._consumed_at(kept, version, wanted) - each.version > self.staleness:
                stale.append(each)
            else:
                kept += 1
        return stale

    def choose(self, begun: Sequence[PendingGroup], version: int, wanted: int) -> list[PendingGroup] | None:
        """The `wanted` groups that the step at `version` takes: the oldest that are finished. None where it has to
        wait, since too few are, or one that it would leave behind might be consumed too late.

        >>> window = StalenessWindow(per_step=1, staleness=1)
        >>> young = PendingGroup("young", 5, ready=True)
        >>> window.choose([PendingGroup("old", 4), young], version=4, wanted=1) == [young]
        True
        >>> window.choose([PendingGroup("old", 4), young], version=5, wanted=1) is None
        True
        """
        ready = [each for each in begun if each.ready]
        if len(ready) < wanted:
            return None
        chosen = sorted(ready, key=lambda each: each.version)[:wanted]
        left_behind = [each for each in begun if each not in chosen]
        return None if self.stale(left_behind, version, wanted=0) else chosen

    def _consumed_at(self, position: int, version: int, wanted: int) -> int:
        """The version that consumes the group with so many before it, where that at `version` takes `wanted`."""
        return version if position < wanted else version + 1 + (position - wanted) // self.per_step


@dataclass(slots=True)
class _Entry:
    slot: Slot
    version: int | None
    work: asyncio.Task[Group] | None = None

    @property
    def ready(self) -> bool:
        return self.work is not None and self.work.done()


MakeGroup = Callable[[Slot, Callable[[], None]], Coroutine[Any, Any, Group]]
"""Makes a group; calls its second argument whenever an attempt begins."""


class GroupQueue:
    """Groups that are made, or wait for it, in the order in which they came in. A context manager: at its
    end the unfinished ones are cancelled."""

    def __init__(self, window: StalenessWindow) -> None:
        self.window = window
        self._entries: dict[str, _Entry] = {}
        self._version = 0

    @property
    def pending(self) -> list[PendingGroup]:
        """What is in the queue; what still waits for its turn as if it began now."""
        return [
            PendingGroup(group, self._version if entry.version is None else entry.version, entry.ready)
            for group, entry in self._entries.items()
        ]

    @property
    def slots(self) -> list[Slot]:
        """Of what is in the queue."""
        return [entry.slot for entry in self._entries.values()]

    @property
    def waiting(self) -> list[Slot]:
        """Of what is in the queue, and not begun in this process."""
        return [entry.slot for entry in self._entries.values() if entry.work is None]

    @property
    def unfinished(self) -> int:
        """Attempts of groups that are not finished."""
        return sum(len(entry.slot.seeds) for entry in self._entries.values() if not entry.ready)

    def add(self, slot: Slot, version: int | None = None) -> None:
        """Append a group, with the policy's version if an earlier process has begun it."""
        self._entries[slot.group] = _Entry(slot, version)

    async def requeue_stale(self, version: int, wanted: int) -> list[str]:
        """Cancel what the next steps cannot consume in time (`StalenessWindow.stale`), and queue it to be begun anew.

        `version` is the one that is live from now on. Returns the names of these groups.
        """
        self._version = version
        stale = [each.group for each in self.window.stale(self.pending, version, wanted)]
        await _cancel(entry.work for group in stale if (entry := self._entries[group]).work is not None)
        for group in stale:
            self._entries[group] = _Entry(self._entries[group].slot, None)
        return stale

    def start(self, make: MakeGroup) -> None:
        """Begin what is in the queue and not begun; an attempt then begins as soon as there is room for it."""
        for entry in self._entries.values():
            if entry.work is None:
                entry.work = asyncio.create_task(make(entry.slot, partial(self._began, entry)))

    def _began(self, entry: _Entry) -> None:
        if entry.version is None:
            entry.version = self._version

    async def take(self, version: int, wanted: int) -> list[Group]:
        """The next `wanted` groups for the step at `version`, once so many may be taken (`StalenessWindow.choose`).

        Raises what making any group has raised.
        """
        while True:
            under_way = [entry.work for entry in self._entries.values() if entry.work is not None]
            for work in under_way:
                if work.done():
                    work.result()
            chosen = self.window.choose(self.pending, version, wanted)
            if chosen is not None:
                break
            await asyncio.wait([work for work in under_way if not work.done()], return_when=asyncio.FIRST_COMPLETED)
        taken = {each.group for each in chosen}
        works = [entry.work for group, entry in self._entries.items() if group in taken and entry.work is not None]
        self._entries = {group: entry for group, entry in self._entries.items() if group not in taken}
        return [work.result() for work in works]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancel(entry.work for entry in self._entries.values())
        self._entries.clear()


async def _cancel(works: Iterable[asyncio.Task[Group] | None]) -> None:
    ended = [work for work in works if work is not None]
    for work in ended:
        work.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
