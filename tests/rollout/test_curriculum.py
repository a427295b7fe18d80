"""Order of tasks, and groups made ahead of their step: none is consumed too late, lost, or consumed twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.rollout.curriculum import Band, Curriculum, EasyFirst, WeightedTasks, collect_outcomes
from coderepairrl.rollout.group_queue import GroupQueue, PendingGroup, StalenessWindow
from coderepairrl.rollout.groups import Group, PlannedGroup, plan_due_groups
from coderepairrl.types import Ending, Episode, Score, Task

TASKS = tuple(Task(f"toy/{at:02d}", "p", "python", "dir:x", b"", difficulty=at / 10) for at in range(20))
BAND = Band(low=0.15, high=0.85)
PER_STEP = 4


def make_curriculum(order: EasyFirst | Band | None, tasks: Sequence[Task] = TASKS, seed: int = 3) -> Curriculum:
    return Curriculum(sources=(WeightedTasks(tasks),), per_step=PER_STEP, seed=seed, order=order)


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_easy_first_begins_with_the_easiest_and_ends_in_epochs_of_all() -> None:
    easy = make_curriculum(EasyFirst(steps=10), TASKS[::-1])
    steps = [easy.schedule(step) for step in range(1, 20)]
    assert sorted(ids(steps[0])) == ids(TASKS[:4])
    for step, tasks in enumerate(steps, 1):
        pool = ids(TASKS[: max(PER_STEP, 2 * step)])
        assert set(ids(tasks)) <= set(pool) and len(set(ids(tasks))) == PER_STEP, "none twice while others are left"
    assert any(max(ids(tasks)) > "toy/05" for tasks in steps[5:8]), "harder tasks are drawn, too"
    epochs = [name for tasks in steps[9:] for name in ids(tasks)]
    for epoch in range(2):
        assert Counter(epochs[20 * epoch : 20 * epoch + 20]) == Counter(ids(TASKS))


def test_a_rate_counts_the_newest_attempts_only() -> None:
    assert BAND.rate("a", {"a": [0.0] * 80 + [1.0] * 16}) == pytest.approx(17 / 18)
    probed = replace(BAND, before={"a": (100, 0.25)})
    assert probed.rate("a", {}) == pytest.approx(5 / 18), "16 of the 100 attempts before the run"
    assert probed.rate("a", {"a": [1.0] * 8}) == pytest.approx((1 + 8 + 2) / 18)
    assert probed.rate("a", {"a": [1.0] * 16}) == pytest.approx(17 / 18)


def test_a_band_draws_untried_tasks_and_those_in_and_outside_it_by_their_shares() -> None:
    known = {name: [0.0, 1.0] * 4 for name in ids(TASKS[:7])} | {name: [1.0] * 8 for name in ids(TASKS[7:14])}
    parts: Counter[str] = Counter()
    for step in range(1, 501):
        drawn = ids(make_curriculum(BAND).schedule(step, known))
        assert len(set(drawn)) == PER_STEP
        parts.update("within" if name < "toy/07" else "outside" if name < "toy/14" else "untried" for name in drawn)
    assert {part: round(count / 2000, 1) for part, count in parts.items()} == {
        "within": 0.4,
        "outside": 0.1,
        "untried": 0.5,
    }


@given(st.data())
def test_a_resumed_run_draws_the_same_tasks(data: st.DataObject) -> None:
    """They follow from the log alone, also when a batch is refilled; no group comes twice."""
    order = data.draw(st.sampled_from([None, EasyFirst(5), BAND]))
    chance = data.draw(st.randoms(use_true_random=False))
    curriculum = make_curriculum(order)
    log: list[tuple[str, str, list[float]]] = []  # group, task, outcomes
    for _ in range(8):
        taken: list[str] = []
        for wanted in (PER_STEP, data.draw(st.integers(0, PER_STEP))):
            known: dict[str, list[float]] = {}
            for _, task, outcomes in log:
                known.setdefault(task, []).extend(outcomes)
            consumed = {group for group, _, _ in log}
            slots = plan_due_groups(curriculum, 2, wanted, consumed, known, taken)
            assert slots == plan_due_groups(make_curriculum(order), 2, wanted, consumed, dict(known), list(taken))
            assert len(slots) == wanted and not consumed & {slot.group for slot in slots}
            taken += [slot.task.id for slot in slots]
            log += [(slot.group, slot.task.id, [float(chance.random() < 0.5) for _ in range(2)]) for slot in slots]
        assert not isinstance(order, Band) or len(set(taken)) == len(taken), "no task twice in a batch of a band"
    assert len({group for group, _, _ in log}) == len(log)
    if order is None:
        drawn = [task for _, task, _ in log]
        for epoch in range(len(drawn) // 20):
            assert Counter(drawn[20 * epoch : 20 * epoch + 20]) == Counter(ids(TASKS)), "a refill continues the epoch"


def test_outcomes_are_verdicts_or_else_clipped_rewards() -> None:
    def attempt(number: int, ending: Ending, *scores: Score) -> Episode:
        return Episode(f"e{number}", f"t{number % 2}", "train", 1, "g", number, ending, scores=scores)

    tested = Score("tests", 1.0, weight=0.5, passed=True)
    outcomes = collect_outcomes(
        [
            attempt(0, Ending.DONE, tested, Score("patch_edits", 0.2, weight=0.5)),
            attempt(1, Ending.LIMIT, Score("patch_edits", 0.25)),
            attempt(2, Ending.DONE, replace(tested, value=0.0, passed=False), Score("patch_edits", 0.9, weight=0.5)),
            attempt(3, Ending.VOID),
            attempt(5, Ending.DONE, Score("penalty", -2.0)),
        ]
    )
    assert outcomes == {"t0": [1.0, 0.0], "t1": [0.25, 0.0]}


TASK = Task("toy/0", "repair it", "python", "dir:x", b"")


@given(st.data(), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_no_order_of_endings_exceeds_the_bound_or_loses_a_group(
    data: st.DataObject, per_step: int, staleness: int, steps: int
) -> None:
    window = StalenessWindow(per_step, staleness)
    held: dict[str, PendingGroup] = {}
    queued: set[str] = set()
    consumed: list[str] = []
    version = made = 0
    for step in range(1, steps + 1):
        for wanted in [per_step, *data.draw(st.sampled_from([[], [], [1], [2, 1]]), "further groups")]:
            assert not window.stale(held.values(), version, wanted), "all groups can be consumed in time"
            for _ in range(window.capacity(wanted, len(held), steps - step)):
                held[f"g{made}"] = PendingGroup(f"g{made}", version)
                queued.add(f"g{made}")
                made += 1
            assert len(held) >= wanted
            while (chosen := window.choose(list(held.values()), version, wanted)) is None:
                unfinished = [group for group, each in held.items() if not each.finished]
                ended = data.draw(st.sampled_from(unfinished), "ends")  # if none were unfinished, it would wait forever
                queued -= set(list(held)[: list(held).index(ended) + 1])  # attempts begin in order
                held[ended] = PendingGroup(ended, held[ended].version, finished=True)
            assert len(chosen) == wanted
            assert all(each.finished and version - each.version <= staleness for each in chosen)
            for each in chosen:
                consumed.append(held.pop(each.group).group)
        queued -= set(list(held)[: data.draw(st.integers(0, len(held)), "begin while the learner steps")])
        version += data.draw(st.sampled_from([1, 1, 1, 0]), "a batch without rows leaves the weights")
        held |= {group: PendingGroup(group, version) for group in held if group in queued}
    assert not held, "no group is begun that no step would consume"
    assert len(set(consumed)) == len(consumed) == made


def can_consume(window: StalenessWindow, versions: Iterable[int], wanted: int, now: int) -> bool:
    """Whether all are in time if the oldest are consumed first, the best order."""
    places = [now] * wanted + [now + 1 + at // window.per_step for at in range(20)]
    return all(at - version <= window.staleness for version, at in zip(sorted(versions), places, strict=False))


@given(st.lists(st.integers(0, 4), max_size=7), st.integers(1, 2), st.integers(0, 3))
def test_the_fewest_and_youngest_groups_are_given_up(versions: list[int], per_step: int, staleness: int) -> None:
    """As after a resume with a lower bound."""
    window, now = StalenessWindow(per_step, staleness), 4
    begun = [PendingGroup(str(at), version) for at, version in enumerate(versions)]
    late = window.stale(begun, now, per_step)
    kept = [each for each in begun if each not in late]
    assert can_consume(window, [each.version for each in kept], per_step, now)
    most = max(
        size
        for size in range(len(versions) + 1)
        if any(can_consume(window, each, per_step, now) for each in combinations(versions, size))
    )
    assert len(kept) == most
    for each in late:
        if each.version + staleness >= now:  # without others it would have been in time
            older = sum(other.version <= each.version for other in kept)
            assert older == per_step * (each.version + staleness - now + 1)


def slot(name: str) -> PlannedGroup:
    return PlannedGroup(name, TASK, "train", 1, (0, 1))


async def begin_groups(queue: GroupQueue, names: Iterable[str], version: int) -> dict[str, asyncio.Event]:
    """Begin groups at `version`; each ends when its event is set."""
    ends = {name: asyncio.Event() for name in names}
    assert await queue.requeue_stale(version, 2) == []

    async def make(slot: PlannedGroup, began: Callable[[], None]) -> Group:
        began()
        await ends[slot.group].wait()
        return Group(slot.group, slot.task, ())

    for name in ends:
        queue.add(slot(name))
    queue.start(make)
    await asyncio.sleep(0)
    return ends


async def test_a_step_takes_what_is_finished_and_leaves_the_rest_running() -> None:
    async with GroupQueue(StalenessWindow(per_step=2, staleness=1)) as queue:
        ends = await begin_groups(queue, "abcd", 0)
        taking = asyncio.create_task(queue.take(0, 2))
        for name in "db":
            assert not taking.done()
            ends[name].set()
            await asyncio.sleep(0)
        assert [group.id for group in await taking] == ["b", "d"], "in the order of their beginning"
        assert queue._entries.keys() == {"a", "c"}
        more = await begin_groups(queue, "ef", 1)
        more["e"].set()
        more["f"].set()
        taking = asyncio.create_task(queue.take(1, 2))
        await asyncio.sleep(0.01)
        assert not taking.done(), "the older ones would be too old for the next step"
        ends["a"].set()
        ends["c"].set()
        assert [group.id for group in await taking] == ["a", "c"]
        assert [each.group for each in queue.pending if each.finished] == ["e", "f"]
    assert queue.pending == []


async def test_a_group_that_is_too_old_is_cancelled_and_begun_again() -> None:
    async with GroupQueue(StalenessWindow(per_step=1, staleness=1)) as queue:
        await begin_groups(queue, "ab", 0)
        old = asyncio.all_tasks()
        assert await queue.requeue_stale(1, 1) == ["b"]
        assert [(each.group, each.version) for each in queue.pending] == [("a", 0), ("b", 1)]
        assert len(old - asyncio.all_tasks()) == 1, "its attempts have ended"


async def test_a_group_that_waits_for_its_turn_is_as_old_as_its_first_attempt() -> None:
    async with GroupQueue(StalenessWindow(per_step=1, staleness=1)) as queue:
        turn = asyncio.Event()

        async def make(slot: PlannedGroup, began: Callable[[], None]) -> Group:
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
