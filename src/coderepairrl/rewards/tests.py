"""`tests` and its variants: whether the task's checks pass with the patch."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import defaultdict
from pathlib import PurePosixPath

from coderepairrl import grading
from coderepairrl.errors import GraderFault, TaskError, UnjudgedPatch
from coderepairrl.grading.reports import find_failed_tests
from coderepairrl.grading.witness import detect_runner
from coderepairrl.protocols import Reward, Sandbox, SandboxBackend
from coderepairrl.rewards.text import reward_faults
from coderepairrl.sandbox.wrapped import OpenSandboxBackend
from coderepairrl.types import Checks, Command, Episode, Score, Task

TO_INSTALL = (
    "correct its name, or install it where sandboxes see it, or show them its folder: sandbox.options.binds, and "
    "sandbox.options.env={PYTHONPATH='FOLDER'} for Python (docs/guides/tasks.md, On the command line); in a "
    "container, take an image that has it: sandbox.options.image"
)
"""Fix for a sandbox without the programs that checks need."""
_FIND_MODULE = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


class TestsReward(Reward):
    """1 if all checks pass on the patched repository, else 0.

    Each command runs in a fresh sandbox: the task's commit, the patch without files that steer test runners
    (`grading.steering.STEERING`), then `Checks.restore`. If tests are named (FAIL_TO_PASS and PASS_TO_PASS of
    SWE-bench), those must pass.

    If checks never begin (missing program or module, no test reported), a control runs them once per task on the
    reference: if they do not begin there either, the sandbox is at fault, else the score is 0.

    Known weaknesses: only as good as the checks; does not rank failing repairs; slow.
    """

    __test__ = False  # pytest: not a test class
    name = "tests"
    runs_checks = True
    repairs = True

    def __init__(self) -> None:
        self._scores: dict[bytes, Score] = {}  # by `_make_key`
        self._control = _ControlRun()
        self._locks: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the patch. Raises `TaskError` without checks, `RewardFault` if the sandbox fails."""
        if not task.checks:
            raise TaskError(
                f"task {task.id} has no checks, so the reward 'tests' cannot judge it",
                fix="give the task `checks`, or train with a reward that compares patches, such as patch_lines",
            )
        if not episode.patch.strip():
            return Score(self.name, 0.0, note="empty patch", passed=False)
        with reward_faults("tests", task):
            return await self._score_patch(task, episode.patch, sandbox)

    def value(self, verdict: grading.Verdict, checks: Checks) -> float:
        """Reward for a verdict."""
        return 0.0 if verdict.problem else 1.0

    async def _score_patch(self, task: Task, patch: bytes, sandbox: SandboxBackend) -> Score:
        key = _make_key(task, patch, sandbox)
        async with self._locks[key]:  # if equal patches are scored at once, only the first runs the tests
            if key in self._scores:
                return self._scores[key]
            try:
                verdict = await grading.grade_apart(sandbox, task, patch)
            except UnjudgedPatch as error:  # the policy's choice, so a score
                verdict = grading.Verdict(str(error))
            if verdict.doubtful:
                await self._control(task, sandbox, verdict if patch == task.reference else None)
            value = self.value(verdict, task.checks)
            self._scores[key] = Score(self.name, value, note=verdict.problem, passed=not verdict.problem)
            return self._scores[key]


class _ControlRun:
    """Checks once per task whether its checks can run at all."""

    def __init__(self) -> None:
        self._able: set[bytes] = set()  # keys of tasks whose checks begin
        self._locks: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, task: Task, sandbox: SandboxBackend, verdict: grading.Verdict | None = None) -> None:
        """Raise `GraderFault` if checks do not begin on the reference, whose `verdict` may be known."""
        key = _make_key(task, b"", sandbox)
        async with self._locks[key]:
            if key in self._able:
                return
            if verdict is None:
                verdict = await self._grade(task, sandbox)
            if verdict.doubtful:
                on = "its reference" if task.reference.strip() else "the untouched repository"
                raise GraderFault(
                    f"the checks of task {task.id} cannot run in the sandbox {sandbox.name}, not even on {on}: "
                    f"{verdict.problem}",
                    fix=TO_INSTALL,
                )
            self._able.add(key)

    async def _grade(self, task: Task, sandbox: SandboxBackend) -> grading.Verdict:
        """Grade the reference, or without one the untouched repository.

        On the latter only a missing program counts: the patch may have to add anything else.
        """
        if task.reference.strip():
            return await grading.grade_apart(sandbox, task, task.reference)
        async with sandbox.open(grading.use_checks_workspace(task)) as fresh:
            verdict = await grading.judge_state(sandbox, task, fresh)
            if not verdict.doubtful:
                return verdict
            can_start = [await _can_start(fresh, command) for command in task.checks.commands]
        return verdict._replace(doubtful=not all(can_start))


async def has_program(sandbox: Sandbox, name: str) -> bool:
    """Whether `name` can be run."""
    return (await sandbox.exec(["sh", "-c", 'command -v "$0"', name])).ok


async def _can_start(fresh: Sandbox, command: Command) -> bool:
    """Whether the program of `command` exists, and the module, if it is a test runner in ``python -m MODULE``."""
    if not await has_program(fresh, command.argv[0]):
        return False
    at = command.argv.index("-m") if "-m" in command.argv[:-1] else 0
    python = [word for word in command.argv[:at] if not word.startswith("-")][-1:]
    if not (python and PurePosixPath(python[0]).name.startswith("python")):
        return True
    runs_tests = command.results or detect_runner(command.argv)
    return not runs_tests or (await fresh.exec([*command.argv[:at], "-c", _FIND_MODULE, command.argv[at + 1]])).ok


def _make_key(task: Task, patch: bytes, sandbox: SandboxBackend) -> bytes:
    parts = (id(sandbox), task.id, task.workspace, task.environment, task.reference, task.checks, patch)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


class StateTests(Reward):
    """1 if the task's checks pass in the attempt's final workspace, else 0.

    For results that are not a diff: installing, building, downloading, restarting. If checks never begin, a control in
    a fresh sandbox decides, as for `tests`. Use ``sh -c`` for a program that the attempt must install: a missing
    program is a fault.

    Source: terminal benchmarks. Known weakness: the attempt may have changed the interpreter that checks run in.
    """

    name = "state_tests"
    on_state = True
    runs_checks = True

    def __init__(self) -> None:
        self._control = _ControlRun()

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Run the checks in the attempt's workspace, which `sandbox` opens.

        Raises `TaskError` without checks, `GraderFault`, `RewardFault`.
        """
        if not task.checks:
            raise TaskError(f"task {task.id} has no checks, so the reward {self.name!r} cannot judge it")
        backend = sandbox.backend if isinstance(sandbox, OpenSandboxBackend) else sandbox
        with reward_faults("checks", task):
            async with sandbox.open(task) as box:
                verdict = await grading.judge_state(backend, task, box)
            if verdict.doubtful:
                await self._control(task, backend)
        return Score(self.name, 0.0 if verdict.problem else 1.0, note=verdict.problem, passed=not verdict.problem)


class SampledTests(TestsReward):
    """`tests` for one group of attempts in four, drawn by a hash of its name; no score for others.

    Use weight 0, for the over-optimisation alarm (docs/guides/rewards.md). The score is named `tests`. Another budget:
    ``class Half(SampledTests): share = 0.5``.

    Source: the thesis's hybrid verifier (future work). Known weaknesses: those of `tests`.
    """

    share = 0.25
    """Share of groups tested."""

    def drawn(self, episode: Episode) -> bool:
        """Whether the episode's group is drawn."""
        return is_group_drawn(episode.group, self.share)


class GradedTests(TestsReward):
    """Share of FAIL_TO_PASS that passes times share of PASS_TO_PASS that still passes, in [0, 1].

    0 if a command that must pass as a whole fails (a build, a timeout) or only other tests fail.

    Source: users of SWE-bench. Known weaknesses: those of `tests`; half of the tests may be far from half of the
    repair.
    """

    name = "tests_graded"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the patch. Raises `TaskError` without FAIL_TO_PASS, and as `tests`."""
        if not task.checks.fail_to_pass:
            raise TaskError(
                f"task {task.id} has no checks.fail_to_pass, so the reward 'tests_graded' cannot judge it",
                fix="name its tests (docs/guides/tasks.md), or use the reward 'tests'",
            )
        return await super().__call__(task, episode, sandbox)

    def value(self, verdict: grading.Verdict, checks: Checks) -> float:
        """Product of both shares."""
        if not verdict.problem:
            return 1.0
        if verdict.stopped or not find_failed_tests(verdict.outcomes, checks.named):
            return 0.0
        lists = filter(None, (checks.fail_to_pass, checks.pass_to_pass))
        return math.prod(1 - len(find_failed_tests(verdict.outcomes, names)) / len(names) for names in lists)


def is_group_drawn(group: str, share: float) -> bool:
    """Whether a hash of its name draws `group` into `share` of all groups."""
    digest = hashlib.blake2b(group.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
