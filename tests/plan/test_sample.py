"""Which held-out tasks are evaluated."""

from __future__ import annotations

import pytest

from coderepairrl.config import Config
from coderepairrl.plan import plan_run
from coderepairrl.plan.tasks import sample
from coderepairrl.types import Task

TASKS = [Task(f"{repository}/{at}", "Fix it.", "python", "dir:/x", b"") for repository in "ab" for at in range(50)]


def ids(tasks: tuple[Task, ...]) -> list[str]:
    return [task.id for task in tasks]


def test_it_is_a_function_of_seed_and_ids() -> None:
    drawn = sample(TASKS, 20, 0)
    assert len(set(ids(drawn))) == 20
    assert sample(TASKS[::-1], 20, 0) == drawn, "the order of the source does not matter"
    assert sample(TASKS, 30, 0)[:20] == drawn, "more tasks are these and others"
    assert set(ids(sample(TASKS, 20, 1))) != set(ids(drawn))


@pytest.mark.parametrize("n", [0, 100, 101])
def test_all_come_as_they_are(n: int) -> None:
    assert sample(TASKS, n, 0) == tuple(TASKS)


def test_each_task_is_drawn_as_often() -> None:
    """The first of a source as the last: 400 draws of 10 from 100 have 40 of each, with standard deviation 6."""
    counts = {task.id: 0 for task in TASKS}
    for seed in range(400):
        for name in ids(sample(TASKS, 10, seed)):
            counts[name] += 1
    assert min(counts.values()) > 14 and max(counts.values()) < 66
    assert abs(sum(counts[task.id] for task in TASKS[:50]) - 2000) < 5 * 31


def test_a_run_samples_by_its_seed_the_same_tasks_for_all_of_its_evaluations() -> None:
    """Those that only decode otherwise are compared on the same tasks; the first so many of the source they are not."""

    def held_out(seed: int, tasks: int) -> dict[str, list[str]]:
        found = plan_run(
            Config.model_validate(
                {
                    "run": {"name": "x", "seed": seed},
                    "tasks": {"source": "handmade"},
                    "agent": {"name": "direct"},
                    "eval": {"split": "train", "tasks": tasks, "also": {"greedy": {"temperature": 0}}},
                }
            )
        )
        return {name: ids(each) for name, each in found.eval_tasks.items()}

    everything = held_out(0, 0)["eval"]
    seeds = [held_out(seed, 2) for seed in range(6)]
    assert all(each["eval"] == each["greedy"] and set(each["eval"]) <= set(everything) for each in seeds)
    assert seeds == [held_out(seed, 2) for seed in range(6)]
    assert len({tuple(sorted(each["eval"])) for each in seeds}) > 1
