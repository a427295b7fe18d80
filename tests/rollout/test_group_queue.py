"""Groups made queue of their step: whatever ends when, none is consumed too late, lost, or consumed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.rollout import Group, GroupQueue, Slot, StalenessWindow
from coderepairrl.rollout.group_queue import PendingGroup
from coderepairrl.types import Task

TASK = Task("toy/0", "repair it", "python", "dir:x", b"")


@given(st.data(), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_no_order_of_endings_exceeds_the_bound_and_none_is_given_up(
    data: st.DataObject, per_step: int, staleness: int, steps: int
) -> None:
    window = StalenessWindow(per_step, staleness)
    held: dict[str, PendingGroup] = {}
    queued: set[str] = set()
    consumed: list[str] = []
    version = made = 0
    for step in range(1, steps + 1):
        for wanted in [per_step, *data.draw(st.sampled_from([[], [], [1], [2, 1]]), "further groups")]:
            assert not window.stale(held.values(), version, wanted), "what is held can always be consumed in time"
            for _ in range(window.capacity(wanted, len(held), steps - step)):
                held[f"g{made}"] = PendingGroup(f"g{made}", version)
                queued.add(f"g{made}")
                made += 1
            assert len(held) >= wanted
            while (chosen := window.choose(list(held.values()), version, wanted)) is None:
                unfinished = [group for group, each in held.items() if not each.ready]
                ended = data.draw(st.sampled_from(unfinished), "ends")  # there is one, else it would wait for ever
                queued -= set(list(held)[: list(held).index(ended) + 1])  # attempts get their turn in order
                held[ended] = PendingGroup(ended, held[ended].version, ready=True)
            assert len(chosen) == wanted
            assert all(each.ready and version - each.version <= staleness for each in chosen)
            for each in chosen:
                consumed.append(held.pop(each.group).group)
        queued -= set(list(held)[: data.draw(st.integers(0, len(held)), "begin while the learner steps")])
        version += data.draw(st.sampled_from([1, 1, 1, 0]), "a batch without rows leaves the weights")
        held |= {group: PendingGroup(group, version) for group in held if group in queued}
    assert not held, "nothing is begun that no step would consume"
    assert len(set(consumed)) == len(consumed) == made


def consumable(window: StalenessWindow, versions: Iterable[int], wanted: int, now: int) -> bool:
    """Whether some order of consumption has each in time: oldest first is as good as any."""
    places = [now] * wanted + [now + 1 + at // window.per_step for at in range(20)]
    return all(at - version <= window.staleness for version, at in zip(sorted(versions), places, strict=False))


@given(st.lists(st.integers(0, 4), max_size=7), st.integers(1, 2), st.integers(0, 3))
def test_what_cannot_be_consumed_in_time_is_given_up_the_youngest_first(
    versions: list[int], per_step: int, staleness: int
) -> None:
    """As after a resume with a lower bound: as few as possible."""
    window, now = StalenessWindow(per_step, staleness), 4
    begun = [PendingGroup(str(at), version) for at, version in enumerate(versions)]
    late = window.stale(begun, now, per_step)
    kept = [each for each in begun if each not in late]
    assert consumable(window, [each.version for each in kept], per_step, now)
    most = max(
        size
        for size in range(len(versions) + 1)
        if any(consumable(window, each, per_step, now) for each in combinations(versions, size))
    )
    assert len(kept) == most
    for each in late:
        if each.version + staleness >= now:  # it would have been in time, but for others
            queue = sum(other.version <= each.version for other in kept)
            assert queue == per_step * (each.version + staleness - now + 1), "all of them at least as old"


def slot(name: str) -> Slot:
    return Slot(name, TASK, "train", 1, (0, 1))


async def held_by(queue: GroupQueue, names: Iterable[str], version: int) -> dict[str, asyncio.Event]:
    """Groups that begin at `version` and end when their event is set."""
    ends = {name: asyncio.Event() for name in names}
    assert await queue.requeue_stale(version, 2) == []

    async def make(slot: Slot, began: Callable[[], None]) -> Group:
        began()
        await ends[slot.group].wait()
        if slot.group == "bad":
            raise OSError("the disk is full")
        return Group(slot.group, slot.task, ())

    for name in ends:
        queue.add(slot(name))
    queue.start(make)
    await asyncio.sleep(0)
    return ends


async def test_a_step_takes_what_is_finished_and_leaves_the_rest_running() -> None:
    async with GroupQueue(StalenessWindow(per_step=2, staleness=1)) as queue:
        ends = await held_by(queue, "abcd", 0)
        taking = asyncio.create_task(queue.take(0, 2))
        for name in "db":
            assert not taking.done()
            ends[name].set()
            await asyncio.sleep(0)
        assert [group.id for group in await taking] == ["b", "d"], "in the order in which they were begun"
        assert queue.unfinished == 4
        more = await held_by(queue, "ef", 1)
        more["e"].set()
        more["f"].set()
        taking = asyncio.create_task(queue.take(1, 2))
        await asyncio.sleep(0.01)
        assert not taking.done(), "the older ones would be too old for the next step"
        ends["a"].set()
        ends["c"].set()
        assert [group.id for group in await taking] == ["a", "c"]
        assert [each.group for each in queue.pending if each.ready] == ["e", "f"]
    assert queue.pending == []


async def test_what_is_too_old_is_begun_anew() -> None:
    async with GroupQueue(StalenessWindow(per_step=1, staleness=1)) as queue:
        await held_by(queue, "ab", 0)
        old = asyncio.all_tasks()
        assert await queue.requeue_stale(1, 1) == ["b"]
        assert [(each.group, each.version) for each in queue.pending] == [("a", 0), ("b", 1)]
        assert len(old - asyncio.all_tasks()) == 1, "its attempts have ended"


async def test_what_waits_for_its_turn_is_as_old_as_its_first_attempt() -> None:
    async with GroupQueue(StalenessWindow(per_step=1, staleness=1)) as queue:
        turn = asyncio.Event()

        async def make(slot: Slot, began: Callable[[], None]) -> Group:
            if slot.group == "b":
                await turn.wait()
            began()
            return Group(slot.group, slot.task, ())

        for name in "ab":
            queue.add(slot(name))
        queue.start(make)
        assert [group.id for group in await queue.take(0, 1)] == ["a"]
        for version in (1, 2, 3):
            assert await queue.requeue_stale(version, 1) == []
        turn.set()
        assert [group.id for group in await queue.take(3, 1)] == ["b"]
