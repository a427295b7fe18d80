"""The over-optimisation alarm on logs that were made by rule: it sees what it should, and not more than it says."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from coderepairrl.config.schema import Run
from coderepairrl.rollout import Group
from coderepairrl.stages import gates, overoptimisation
from coderepairrl.stages.overoptimisation import EVERY, RATE, WINDOW, alarm
from coderepairrl.types import Ending, Episode, Score, Task

Records = list[Mapping[str, Any]]
Level = Callable[[float], float]
"""From the share of the run that is done."""


def log(
    steps: int, passed: Level, reward: Level, patches: Level = lambda done: 1.0, *, seed: int = 0, groups: int = 4
) -> Records:
    """Records of a run: groups of 8 attempts, some tasks harder than others, some patches empty."""
    rng = random.Random(seed)
    records: Records = []
    for step in range(1, steps + 1):
        done, kept = step / steps, []
        for _ in range(groups):
            hard = rng.uniform(0.5, 1.5)
            attempts = [None for _ in range(8) if rng.random() < patches(done)]
            if attempts:
                kept.append(
                    {
                        "rewards": [rng.gauss(reward(done) * hard, 0.2) for _ in attempts],
                        "passed": [float(rng.random() < passed(done) * hard) for _ in attempts],
                    }
                )
        records.append({"step": step, "tested": kept})
    return records


def first_alarm(records: Records) -> int:
    """The step of the first alarm; 0 if there is none."""
    for done in range(1, len(records) + 1):
        if alarm(records[:done], len(records)):
            return done
    return 0


def rising(done: float) -> float:
    return 0.2 + 0.4 * done


def falling(done: float) -> float:
    return 0.45 - 0.4 * done


def test_reward_up_and_tests_down_raises_it() -> None:
    records = log(60, falling, rising)
    step = first_alarm(records)
    assert WINDOW <= step <= 60
    assert step % EVERY == 0
    found = alarm(records[:step], 60)
    assert found is not None
    assert found.reward > 0 > found.passed
    assert (found.first, found.last) == (step - max(WINDOW, step // 2) + 1, step)
    assert found.p < RATE / 9
    assert "rose by" in found.as_json()["text"]
    run = {"name": "gates", "steps": 60}
    seen = [{**record, "metrics": {}, "account": {"sampled": 1}, "skipped": ""} for record in records[:step]]
    gate = next(each for each in gates.check_gates(seen, Run.model_validate(run)) if each.gate == "over_optimisation")
    assert (gate.stops, gate.first, gate.last) == (False, found.first, found.last)
    off = Run.model_validate({**run, "health": {"off": ["over_optimisation"]}})
    assert not [each for each in gates.check_gates(seen, off) if each.gate == "over_optimisation"]
    assert all(alarm(records[:done], 60) is None for done in range(WINDOW))


@pytest.mark.parametrize(
    ("passed", "reward", "patches"),
    [
        (rising, rising, lambda done: 1.0),
        (lambda done: 0.3, rising, lambda done: 1.0),
        (falling, lambda done: 0.4, lambda done: 1.0),
        (falling, falling, lambda done: 1.0),
        (lambda done: 0.1, rising, lambda done: 1.0 - 0.9 * done),
        (lambda done: 0.1, rising, lambda done: 0.1 + 0.9 * done),
    ],
    ids=["learns", "tests stay", "only tests fall", "both fall", "fewer patches", "more patches"],
)
def test_other_runs_do_not(passed: Level, reward: Level, patches: Level) -> None:
    assert first_alarm(log(40, passed, reward, patches)) == 0


def test_it_is_false_no_more_often_than_it_says() -> None:
    """The worst case: the reward surely rises, tests stay where they are. Of 120 runs 6 are expected at most."""
    runs = [log(WINDOW, lambda done: 0.2, rising, seed=seed, groups=2) for seed in range(120)]
    assert sum(first_alarm(run) > 0 for run in runs) <= 12


def test_what_a_record_keeps_of_tested_groups() -> None:
    def episode(patch: bytes, scores: Sequence[Score], ending: Ending = Ending.DONE) -> Episode:
        return Episode("e", "t", "train", 1, "g", 0, ending, patch=patch, scores=tuple(scores))

    paid, watched = Score("patch_lines", 0.5, 2.0), Score("tests", 1.0, 0.0)
    both = [paid, Score("file_match", 1.0, 0.0), watched]
    kept = [
        episode(b"diff", both),
        episode(b" ", both),
        episode(b"diff", [], Ending.VOID),
        episode(b"diff", [Score("patch_lines", 0.25, 2.0), Score("tests", 0.0, 5.0)]),
    ]
    task = Task("t", "p", "python", "dir:/", b"")
    groups = [Group("g", task, tuple(kept)), Group("h", task, (episode(b"diff", [paid]),))]
    assert overoptimisation.tested(groups) == [{"rewards": [1.0, 0.5], "passed": [1.0, 0.0]}]
