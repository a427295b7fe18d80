"""A reward that declares `repairs` keeps its promise on real tasks, or nothing is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coderepairrl.errors import TaskError
from coderepairrl.processes.hostgit import DIFF
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.rewards import SHIPPED, make_patched_episode, make_rewards
from coderepairrl.rewards.hybrid import HybridReward
from coderepairrl.rewards.tests import is_group_drawn
from coderepairrl.rewards.verify import (
    GROUP,
    MOST_TRIED_WHOLE,
    TRIED_PER_ENVIRONMENT,
    Trial,
    list_repair_rewards,
    list_trials,
    sample_tasks,
    verify_rewards,
)
from coderepairrl.types import Checks, Command, Episode, Score, Task
from rewards.folder import Local, Repository

SOURCE = b"def add(a, b):\n    return a - b\n"
CHECK = Command(("python3", "-B", "check.py"))


@pytest.fixture
def task(repository: Repository) -> Task:
    checks = Checks((CHECK,), {"check.py": "import sums\nassert sums.add(2, 3) == 5\n"})
    repair = {"sums.py": SOURCE.replace(b"-", b"+")}
    return replace(
        repository.task({"sums.py": SOURCE}, {}, checks, "t/add"), reference=repository.edit(repair, *DIFF[1:])
    )


def asked(task: Task, *names: str) -> list[Trial]:
    return list_trials([task], make_rewards(dict.fromkeys(names, 1.0)), 0)


def test_which_rewards_promise_to_recognise_repairs() -> None:
    promising = {name for name in SHIPPED if list_repair_rewards(make_rewards(name))}
    assert promising == {
        *("patch_edits", "patch_lines", "patch_similarity", "nano_similarity", "draft_similarity"),
        *("tests", "tests_graded", "sampled_tests", "hybrid"),
    }
    unpaid = make_rewards({"patch_lines": 0.0, "tests": 0.0, "length": 1.0})
    assert [reward.name for reward in list_repair_rewards(unpaid)] == ["tests"]
    assert is_group_drawn(GROUP, 0.001)


def test_a_task_without_checks_is_tried_by_its_reference_alone(task: Task) -> None:
    trials = asked(replace(task, checks=Checks()), "patch_edits", "tests", "hybrid")
    assert [trial.reward.name for trial in trials] == ["patch_edits"]


async def test_every_promise_is_kept_on_a_sound_task(task: Task, backend: Local) -> None:
    names = ("patch_edits", "patch_lines", "patch_similarity", "nano_similarity", "draft_similarity", "tests", "hybrid")
    trials = asked(task, *names)
    assert sorted(trial.reward.name for trial in trials) == sorted(names)
    await verify_rewards(trials, backend)
    assert HybridReward().is_tested(make_patched_episode(task, b"", GROUP)), (
        "its tests are asked, not its similarity alone"
    )


async def test_checks_that_pass_on_the_bug_or_fail_on_the_repair_are_refused(task: Task, backend: Local) -> None:
    easy, wrong = (
        replace(task, id=name, checks=Checks((Command((program,)),)))
        for name, program in (("easy", "true"), ("hard", "false"))
    )
    for each, says in ((easy, "nothing earns 0 by tests: no, 1"), (wrong, "the reference earns 1 by tests: no, 0")):
        with pytest.raises(TaskError, match=says) as caught:
            await verify_rewards(asked(each, "tests"), backend)
        assert "tasks.verify=false" in caught.value.fix
    await verify_rewards(asked(easy, "patch_lines"), backend)


class Generous(Reward):
    """A reward of one's own that promises and pays for anything."""

    name = "generous"
    repairs = True

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        return Score(self.name, 1.0)


async def test_a_users_reward_is_held_to_its_promise(task: Task, backend: Local) -> None:
    with pytest.raises(TaskError, match="nothing earns 0 by generous"):
        await verify_rewards(asked(task, f"{__name__}:Generous"), backend)


def test_which_tasks_are_tried(task: Task) -> None:
    def many(count: int, **fields: object) -> list[Task]:
        return [replace(task, id=f"{fields}/{n}", **fields) for n in range(count)]  # type: ignore[arg-type]

    few = many(MOST_TRIED_WHOLE)
    assert sample_tasks([*few, replace(task, id="bare", reference=b"")], 0) == few
    node = Checks((Command(("node", "--test")),))
    at = [f"git:https://example.org/{name}@{'0' * 40}" for name in ("a", "b")]
    pool = [*many(80), *many(2, checks=node), *many(9, workspace=at[0]), *many(9, workspace=at[1])]
    drawn = sample_tasks(pool, 0)
    assert len(drawn) == 3 * TRIED_PER_ENVIRONMENT + 2
    assert drawn == sample_tasks(pool, 0) != sample_tasks(pool, 1)
    assert drawn == sorted(drawn, key=pool.index)
