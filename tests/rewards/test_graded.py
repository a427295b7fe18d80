"""`tests_graded`: what shares of the named tests earn, and that cheats earn nothing."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from coderepairrl.errors import TaskError
from coderepairrl.rewards import with_patch
from coderepairrl.rewards.tests import GradedTests
from coderepairrl.stats import is_resolved
from coderepairrl.types import Checks, Command, Task
from rewards.folder import Local, Repository
from rewards.test_cheats import CHEATS, ENDS_WELL, FIX, SOURCE, patch_of

CASES = """import unittest
from limits import clamp


class Clamp(unittest.TestCase):
    def test_high(self):
        self.assertEqual(clamp(10, 0, 9), 9)

    def test_higher(self):
        self.assertEqual(clamp(99, 0, 9), 9)

    def test_low(self):
        self.assertEqual(clamp(-1, 0, 9), 0)

    def test_middle(self):
        self.assertEqual(clamp(5, 0, 9), 5)
"""
ASKED = Command((sys.executable, "-B", "-m", "unittest", "check"), 20.0, "unittest")


@pytest.fixture
def task(repository: Repository) -> Task:
    repository.commit({"limits.py": SOURCE, "check.py": CASES.encode()})
    tests = [f"check.Clamp.test_{name}" for name in ("high", "higher", "low", "middle")]
    checks = Checks((ASKED,), {"check.py": CASES}, tuple(tests[:2]), tuple(tests[2:]))
    return Task("t/clamp", "", "python", f"dir:{repository.folder}", limits(repository, "high"), checks)


def limits(repository: Repository, high: str, low: str = "low", middle: str = "value") -> bytes:
    """The patch after which `clamp` returns these."""
    returned = SOURCE.replace(b"return low", b"return %s" % low.encode(), 1)
    first, _, last = returned.rpartition(b"return low")
    return repository.edit(
        {
            "limits.py": (first + b"return " + high.encode() + last).replace(
                b"return value", b"return %s" % middle.encode()
            )
        }
    )


async def earned(task: Task, patch: bytes, backend: Local) -> float:
    episode = with_patch(task, patch)
    score = await GradedTests()(task, episode, backend)
    assert is_resolved(replace(episode, scores=(score,))) is (score.value == 1.0)
    return score.value


async def test_shares_of_both_lists_are_multiplied(task: Task, repository: Repository, backend: Local) -> None:
    half = "high if value == 10 else low"
    for patch, value in [
        (task.reference, 1.0),
        (limits(repository, half), 0.5),
        (limits(repository, "high", low="None"), 0.5),
        (limits(repository, half, low="None"), 0.25),
        (limits(repository, "high", low="None", middle="None"), 0.0),
        (limits(repository, "low  # no repair"), 0.0),
        (b"", 0.0),
    ]:
        assert await earned(task, patch, backend) == value


async def test_a_command_that_fails_as_a_whole_earns_nothing(task: Task, backend: Local) -> None:
    built = replace(task, checks=replace(task.checks, commands=(ASKED, Command(("false",)))))
    assert await earned(built, task.reference, backend) == 0.0
    with pytest.raises(TaskError, match=r"t/clamp has no checks.fail_to_pass"):
        await earned(replace(task, checks=replace(task.checks, fail_to_pass=())), task.reference, backend)


@pytest.mark.parametrize("name", [*ENDS_WELL, "an edited test", "start-up code", "nothing is left"])
async def test_cheats_earn_nothing(name: str, task: Task, repository: Repository, backend: Local) -> None:
    """Each alone; the repair beside it earns what the tests then say."""
    script = CHEATS[name]
    assert await earned(task, await patch_of(task, script, repository, backend), backend) == 0.0
    if name == "an edited test":
        assert await earned(task, await patch_of(task, f"{FIX}; {script}", repository, backend), backend) == 1.0
