"""`tests_graded`: what shares of the named tests earn, and that cheats earn nothing."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from coderepairrl.errors import TaskError
from coderepairrl.rewards import make_patched_episode
from coderepairrl.rewards.tests import GradedTests
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import Checks, Command, Task
from rewards.folder import Local, Repository

LIMITS = """def clamp(value, low, high):
    if value > high:
        return {}
    if value < low:
        return {}
    return {}
"""
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
    tests = [f"check.Clamp.test_{name}" for name in ("high", "higher", "low", "middle")]
    checks = Checks((ASKED,), {"check.py": CASES}, tuple(tests[:2]), tuple(tests[2:]))
    return repository.task({**clamp("low"), "check.py": CASES}, clamp("high"), checks, "t/clamp")


def clamp(high: str, low: str = "low", middle: str = "value") -> dict[str, str]:
    """The function that returns these."""
    return {"limits.py": LIMITS.format(high, low, middle)}


async def earned(task: Task, patch: bytes, backend: Local) -> float:
    episode = make_patched_episode(task, patch)
    score = await GradedTests()(task, episode, backend)
    assert is_resolved(replace(episode, scores=(score,))) is (score.value == 1.0)
    return score.value


async def test_shares_of_both_lists_are_multiplied(task: Task, repository: Repository, backend: Local) -> None:
    half = "high if value == 10 else low"
    for files, value in [
        (clamp("high"), 1.0),
        (clamp(half), 0.5),
        (clamp("high", low="None"), 0.5),
        (clamp(half, low="None"), 0.25),
        (clamp("high", low="None", middle="None"), 0.0),
        (clamp("low  # no repair"), 0.0),
        ({}, 0.0),
    ]:
        assert await earned(task, repository.edit(files), backend) == value, files


async def test_a_command_that_fails_as_a_whole_earns_nothing(task: Task, backend: Local) -> None:
    built = replace(task, checks=replace(task.checks, commands=(ASKED, Command(("false",)))))
    assert await earned(built, task.reference, backend) == 0.0
    with pytest.raises(TaskError, match=r"t/clamp has no checks.fail_to_pass"):
        await earned(replace(task, checks=replace(task.checks, fail_to_pass=())), task.reference, backend)
