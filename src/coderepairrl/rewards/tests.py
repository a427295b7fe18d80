"""`tests`: do the task's checks pass once the patch is applied?"""

from __future__ import annotations

from coderepairrl.errors import RewardFault, SandboxFault, TaskError
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.types import Episode, ExecResult, Score, Task

_APPLY = ("git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-")
_APPLY_SECONDS = 60.0
_REFUSED = (1, 128)
"""Exit codes of a git that read the patch and does not take it."""


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
                problem = await _apply(fresh, episode.patch) or await _restore(fresh, task) or await _run(fresh, task)
        except SandboxFault as fault:
            raise RewardFault(f"tests of task {task.id}: {fault}", fix=fault.fix) from fault
        return Score(self.name, 0.0 if problem else 1.0, note=problem)


async def _apply(sandbox: Sandbox, patch: bytes) -> str:
    """Apply `patch`; why it does not apply, or nothing."""
    result = await sandbox.exec(_APPLY, stdin=patch, timeout=_APPLY_SECONDS)
    if result.ok:
        return ""
    if result.timed_out or result.exit_code not in _REFUSED:
        how = "ran out of time" if result.timed_out else f"exited with {result.exit_code}"
        raise RewardFault(f"`git apply` {how} in the sandbox: {_first_line(result)}", fix="the sandbox needs git")
    return f"the patch does not apply: {_first_line(result)}"


async def _restore(sandbox: Sandbox, task: Task) -> str:
    """Put the checks' own files back; why that is impossible, or nothing."""
    for path, content in task.checks.restore.items():
        try:
            await sandbox.write(path, content.encode("utf-8", "surrogateescape"))
        except OSError as error:  # the patch made a folder, a link out of the workspace, ... of it
            return f"the patch leaves no way to restore {path}: {error}"
    return ""


async def _run(sandbox: Sandbox, task: Task) -> str:
    """Run the checks in order up to the first that fails; which one and how, or nothing."""
    for command in task.checks.commands:
        result = await sandbox.exec(command.argv, timeout=command.timeout)
        if not result.ok:
            how = f"no end within {command.timeout:g} s" if result.timed_out else f"exit code {result.exit_code}"
            return f"check failed ({how}): {' '.join(command.argv)}"
    return ""


def _first_line(result: ExecResult) -> str:
    return result.output.decode("utf-8", "replace").strip().partition("\n")[0][:200]
