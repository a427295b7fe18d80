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
class Begun:
    """A group that no step has consumed, and the policy's version when the first of its attempts was begun."""

    group: str
    version: int
    ready: bool = False
    """Whether it is finished."""


@dataclass(frozen=True, slots=True)
class Window:
    """How far ahead groups may be made: `staleness` versions, each of which consumes `per_step` of them."""

    per_step: int
    staleness: int

    def room(self, wanted: int, begun: int, later: int) -> int:
        """How many groups more may be begun, where this step still takes `wanted`, `later` ones follow it, and `begun`
        are not consumed.

        >>> Window(per_step=4, staleness=0).room(4, 0, later=9), Window(per_step=4, staleness=2).room(4, 5, later=9)
        (4, 7)
        """
        return max(0, wanted + self.per_step * min(self.staleness, later) - begun)

    def late(self, begun: Iterable[Begun], version: int, wanted: int) -> list[Begun]:
        """Which of `begun` no step can consume in time, where the one at `version` still takes `wanted` of them (0: the
        next one is the first): the youngest of those that are in each other's way, and what is too old whatever else
        there is.

        >>> window = Window(per_step=1, staleness=1)
        >>> begun = [Begun("a", 3), Begun("b", 4), Begun("c", 4), Begun("d", 5)]
        >>> [each.group for each in window.late(begun, version=5, wanted=1)]
        ['a', 'c']
        """
        kept, late = 0, list[Begun]()
        for each in sorted(begun, key=lambda each: each.version):
            if self._consumed_at(kept, version, wanted) - each.version > self.staleness:
                late.append(each)
            else:
                kept += 1
        return late

    def choose(self, begun: Sequence[Begun], version: int, wanted: int) -> list[Begun] | None:
        """The `wanted` groups that the step at `version` takes: the oldest that are finished. None where it has to
        wait, since too few are, or one that it would leave behind might be consumed too late.

        >>> window = Window(per_step=1, staleness=1)
        >>> young = Begun("young", 5, ready=True)
        >>> window.choose([Begun("old", 4), young], version=4, wanted=1) == [young]
        True
        >>> window.choose([Begun("old", 4), young], version=5, wanted=1) is None
        True
        """
        ready = sorted((each for each in begun if each.ready), key=lambda each: each.version)
        chosen = ready[:wanted]
        left_behind = [each for each in begun if each not in chosen]
        if len(chosen) < wanted or self.late(left_behind, version, wanted=0):
            return None
        return chosen

    def _consumed_at(self, place: int, version: int, wanted: int) -> int:
        """The version that consumes the group with so many before it, where that at `version` takes `wanted`."""
        return version if place < wanted else version + 1 + (place - wanted) // self.per_step


@dataclass(slots=True)
class _Held:
    slot: Slot
    version: int | None
    work: asyncio.Task[Group] | None = None


Make = Callable[[Slot, Callable[[], None]], Coroutine[Any, Any, Group]]
"""Makes a group; calls its second argument whenever an attempt begins."""


class Ahead:
    """Groups under way, in the order in which they came in. A context manager: what is unfinished at its end is
    cancelled."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._held: dict[str, _Held] = {}
        self._version = 0

    @property
    def begun(self) -> list[Begun]:
        """What is held; what still waits for its turn as if it began now."""
        return [
            Begun(
                group,
                self._version if held.version is None else held.version,
                held.work is not None and held.work.done(),
            )
            for group, held in self._held.items()
        ]

    @property
    def slots(self) -> list[Slot]:
        """Of what is held."""
        return [held.slot for held in self._held.values()]

    @property
    def waiting(self) -> list[Slot]:
        """Of what is held, and not begun in this process."""
        return [held.slot for held in self._held.values() if held.work is None]

    @property
    def unfinished(self) -> int:
        """Attempts of groups that are not finished."""
        return sum(len(held.slot.seeds) for held in self._held.values() if held.work is None or not held.work.done())

    def add(self, slot: Slot, version: int | None = None) -> None:
        """Hold a group, with the policy's version if an earlier process has begun it."""
        self._held[slot.group] = _Held(slot, version)

    async def renew(self, version: int, wanted: int) -> list[str]:
        """Give up what the next steps cannot consume in time (`Window.late`), to be begun anew.

        `version` is the one that is live from now on. Returns the names of these groups.
        """
        self._version = version
        late = [each.group for each in self.window.late(self.begun, version, wanted)]
        await _cancel(held.work for group in late if (held := self._held[group]).work is not None)
        for group in late:
            self._held[group] = _Held(self._held[group].slot, None)
        return late

    def start(self, make: Make) -> None:
        """Begin what is held and not begun; an attempt then begins as soon as there is room for it."""
        for held in self._held.values():
            if held.work is None:
                held.work = asyncio.create_task(make(held.slot, partial(self._began, held)))

    def _began(self, held: _Held) -> None:
        if held.version is None:
            held.version = self._version

    async def take(self, version: int, wanted: int) -> list[Group]:
        """The next `wanted` groups for the step at `version`, once so many may be taken (`Window.choose`).

        Raises what making any group has raised.
        """
        while True:
            under_way = [held.work for held in self._held.values() if held.work is not None]
            for work in under_way:
                if work.done():
                    work.result()
            chosen = self.window.choose(self.begun, version, wanted)
            if chosen is not None:
                break
            await asyncio.wait([work for work in under_way if not work.done()], return_when=asyncio.FIRST_COMPLETED)
        taken = {each.group for each in chosen}
        works = [held.work for group, held in self._held.items() if group in taken and held.work is not None]
        self._held = {group: held for group, held in self._held.items() if group not in taken}
        return [work.result() for work in works]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancel(held.work for held in self._held.values())
        self._held.clear()


async def _cancel(works: Iterable[asyncio.Task[Group] | None]) -> None:
    ended = [work for work in works if work is not None]
    for work in ended:
        work.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
