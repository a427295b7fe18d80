"""`tests`: do the task's checks pass once the patch is applied?"""

from __future__ import annotations

from coderepairrl import grading
from coderepairrl.errors import RewardFault, SandboxFault, TaskError
from coderepairrl.protocols import SandboxBackend
from coderepairrl.types import Episode, Score, Task


class TestsReward:
    """1 if all checks pass on the patched repository, else 0 (REQUIREMENTS RW13).

    The checks run in a fresh sandbox: the workspace at the task's commit, then the patch, then the files of
    `Checks.restore`, so that nothing the agent left running or edited in its tests counts. An empty patch and one
    that git cannot apply score 0 without running anything.

    Unit: 0 or 1. Source: the thesis's future work; any repair that passes earns it. Known weaknesses: as good as the
    checks; says nothing of how near a failing repair is; costs a sandbox and the checks' time.
    """

    __test__ = False  # pytest: not a test class
    name = "tests"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode's patch.

        Raises `TaskError` for a task without checks, and `RewardFault` where the sandbox fails: an infrastructure
        fault is never a zero.
        """
        if not task.checks:
            raise TaskError(
                f"task {task.id} has no checks, so the reward 'tests' cannot judge it",
                fix="give the task `checks`, or train with a reward that compares patches, such as patch_lines",
            )
        if not episode.patch.strip():
            return Score(self.name, 0.0, note="empty patch")
        try:
            async with sandbox.open(task) as fresh:
                problem = (await grading.grade(fresh, task, episode.patch)).problem
        except SandboxFault as fault:
            raise RewardFault(f"tests of task {task.id}: {fault}", fix=fault.fix) from fault
        return Score(self.name, 0.0 if problem else 1.0, note=problem)
