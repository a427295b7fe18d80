"""Which tasks come when: by difficulty, by the running success rate, by stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.rollout import Band, Curriculum, EasyFirst, Share, collect_outcomes, due_slots
from coderepairrl.types import Ending, Episode, Score, Task

TASKS = tuple(Task(f"toy/{at:02d}", "p", "python", "dir:x", b"", difficulty=at / 10) for at in range(20))
BAND = Band(low=0.15, high=0.85)
PER_STEP = 4


def ordered(order: EasyFirst | Band | None, tasks: Sequence[Task] = TASKS, seed: int = 3) -> Curriculum:
    return Curriculum(sources=(Share(tasks),), per_step=PER_STEP, seed=seed, order=order)


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_easy_first_begins_with_the_easiest_and_ends_in_epochs_of_all() -> None:
    easy = ordered(EasyFirst(steps=10), TASKS[::-1])
    steps = [easy.schedule(step) for step in range(1, 20)]
    assert sorted(ids(steps[0])) == ids(TASKS[:4])
    for step, tasks in enumerate(steps, 1):
        pool = ids(TASKS[: max(PER_STEP, 2 * step)])
        assert set(ids(tasks)) <= set(pool) and len(set(ids(tasks))) == PER_STEP, "none twice while others are left"
    assert any(max(ids(tasks)) > "toy/05" for tasks in steps[5:8]), "it does not stay with the easiest"
    epochs = [name for tasks in steps[9:] for name in ids(tasks)]
    for epoch in range(2):
        assert Counter(epochs[20 * epoch : 20 * epoch + 20]) == Counter(ids(TASKS))


def test_a_rate_is_smoothed_and_forgets() -> None:
    assert BAND.rate("a", {}) is None and BAND.rate("a", {"a": []}) is None
    assert BAND.rate("a", {"a": [0.0] * 8}) == 0.1 and BAND.rate("a", {"a": [1.0] * 8}) == pytest.approx(0.9)
    assert BAND.rate("a", {"a": [0.0] * 80 + [1.0] * 16}) == pytest.approx(17 / 18)
    probed = replace(BAND, before={"a": (100, 0.25)})
    assert probed.rate("a", {}) == pytest.approx(5 / 18), "no more of its attempts count than the newest"
    assert probed.rate("a", {"a": [1.0] * 8}) == pytest.approx((1 + 8 + 2) / 18)
    assert probed.rate("a", {"a": [1.0] * 16}) == pytest.approx(17 / 18)


def test_a_band_draws_its_parts() -> None:
    """Untried tasks, those within and those outside come as often as they should, never twice in a batch."""
    known = {name: [0.0, 1.0] * 4 for name in ids(TASKS[:7])} | {name: [1.0] * 8 for name in ids(TASKS[7:14])}
    parts: Counter[str] = Counter()
    for step in range(1, 501):
        drawn = ids(ordered(BAND).schedule(step, known))
        assert len(set(drawn)) == PER_STEP
        parts.update("within" if name < "toy/07" else "outside" if name < "toy/14" else "untried" for name in drawn)
    assert {part: round(count / 2000, 1) for part, count in parts.items()} == {
        "within": 0.4,
        "outside": 0.1,
        "untried": 0.5,
    }
    fresh = ordered(BAND).schedule(1, {})
    assert len(set(ids(fresh))) == PER_STEP, "with nothing known there is nothing but to explore"


def test_a_task_that_was_left_can_come_back() -> None:
    known = {name: [1.0] * 8 for name in ids(TASKS)} | {"toy/00": [0.0, 1.0] * 4}
    drawn = {name for step in range(1, 200) for name in ids(ordered(BAND).schedule(step, known))}
    assert drawn == set(ids(TASKS))


@given(st.data())
def test_what_comes_next_is_a_function_of_the_log(data: st.DataObject) -> None:
    """A run that stops anywhere and goes on from its log draws what it would have drawn, refill included: no group
    twice, the first groups of each task with seeds of their own."""
    order = data.draw(st.sampled_from([None, EasyFirst(5), BAND]))
    chance = data.draw(st.randoms(use_true_random=False))
    curriculum = ordered(order)
    log: list[tuple[str, str, list[float]]] = []  # group, task, outcomes
    for _ in range(8):
        taken: list[str] = []
        for wanted in (PER_STEP, data.draw(st.integers(0, PER_STEP))):
            known: dict[str, list[float]] = {}
            for _, task, came_to in log:
                known.setdefault(task, []).extend(came_to)
            consumed = {group for group, _, _ in log}
            slots = due_slots(curriculum, 2, wanted, consumed, known, taken) if wanted else []
            assert slots == (due_slots(ordered(order), 2, wanted, consumed, dict(known), list(taken)) if wanted else [])
            assert len(slots) == wanted and not consumed & {slot.group for slot in slots}
            taken += [slot.task.id for slot in slots]
            log += [(slot.group, slot.task.id, [float(chance.random() < 0.5) for _ in range(2)]) for slot in slots]
        assert not isinstance(order, Band) or len(set(taken)) == len(taken), "no task twice in a batch of a band"
    assert len({group for group, _, _ in log}) == len(log)
    if order is None:
        drawn = [task for _, task, _ in log]
        for epoch in range(len(drawn) // 20):
            assert Counter(drawn[20 * epoch : 20 * epoch + 20]) == Counter(ids(TASKS)), "refill goes on in the epoch"


def test_outcomes_are_verdicts_where_there_are_any() -> None:
    def attempt(number: int, ending: Ending, *scores: Score) -> Episode:
        return Episode(f"e{number}", f"t{number % 2}", "train", 1, "g", number, ending, scores=scores)

    tested = Score("tests", 1.0, weight=0.5, passed=True)
    found = collect_outcomes(
        [
            attempt(0, Ending.DONE, tested, Score("patch_edits", 0.2, weight=0.5)),
            attempt(1, Ending.LIMIT, Score("patch_edits", 0.25)),
            attempt(2, Ending.DONE, replace(tested, value=0.0, passed=False), Score("patch_edits", 0.9, weight=0.5)),
            attempt(3, Ending.VOID),
            attempt(5, Ending.DONE, Score("penalty", -2.0)),
        ]
    )
    assert found == {"t0": [1.0, 0.0], "t1": [0.25, 0.0]}
