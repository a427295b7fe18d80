"""Exam of task sources, and verification of their tasks (``crrl check tasks``, ``crrl tasks verify``)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

from coderepairrl import grading, rewards
from coderepairrl.environments.verify import check_environments
from coderepairrl.errors import TaskError, UsageError
from coderepairrl.grading import Verdict
from coderepairrl.grading.reports import find_failed_tests
from coderepairrl.printable import format_count, join_first, logged, printable
from coderepairrl.protocols import SandboxBackend, TaskSource
from coderepairrl.registry import Finding
from coderepairrl.rewards.tests import TO_INSTALL
from coderepairrl.rewards.verify import Trial, list_repair_rewards, run_trial
from coderepairrl.tasks import select
from coderepairrl.tasks.prepare import rewrite_references
from coderepairrl.types import Checks, Task

_NAMED_TESTS = 5
_UNSTEADY = "no test fails on the bug and passes on the reference in every run"


async def examine_task_source(source: TaskSource, sandbox: SandboxBackend, *, limit: int = 0) -> list[Finding]:
    """Examine `source`, and its first `limit` tasks (0: all). Raises `TaskError` and `SandboxFault`."""
    findings, tasks = examine_source(source, limit)
    for task in tasks:
        exam = await study_task(task, sandbox)
        findings += [finding._replace(name=f"{task.id}: {finding.name}") for finding in exam.findings]
    return findings


def examine_source(source: TaskSource, limit: int = 0) -> tuple[list[Finding], list[Task]]:
    """Check that a source has tasks with unique ids and is repeatable; return findings and tasks.

    References are rewritten as in a run. Raises `TaskError`.
    """
    source.prepare()
    tasks, again = (list(islice(source, limit or None)) for _ in range(2))
    ids = [task.id for task in tasks]
    repeated = sorted({task_id for task_id in ids if ids.count(task_id) > 1})
    findings = [
        Finding("there are tasks", bool(tasks), f"{len(tasks)}"),
        Finding("ids are unique", not repeated, ", ".join(repeated)),
        Finding("asking twice gives the same tasks", tasks == again),
    ]
    return findings, list(rewrite_references(tasks))


class TaskExam(NamedTuple):
    """Findings about a task, or (`task` empty) the source."""

    task: str
    findings: Sequence[Finding]
    settled: Task | None = None
    """Trainable task; None if unusable."""
    lacks: str = ""
    """Grader's problem, such as a missing program, if checks may not have begun."""

    @property
    def ok(self) -> bool:
        """Whether every finding is right."""
        return all(finding.ok for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        checks = [{"name": one.name, "ok": one.ok, "detail": one.detail} for one in self.findings]
        return {"task": self.task, "ok": self.ok, "checks": checks}


async def study_task(task: Task, backend: SandboxBackend, repeat: int = 1) -> TaskExam:
    """Check that a task opens, its reference applies, and checks fail without it and pass with it.

    Checks run `repeat` times on both sides, in fresh sandboxes; differing tests are flaky. Raises `SandboxFault`.
    """
    judged = bool(task.reference or task.answer)
    findings = [Finding("has a prompt, and a reference or an answer", bool(task.prompt.strip() and judged))]
    if not task.reference:
        return TaskExam(task.id, findings, task if judged and findings[0].ok else None)
    try:
        async with backend.open(task) as fresh:
            refused = await grading.apply_patch(fresh, task.reference)
    except TaskError as error:  # the task's commit or environment is missing: other tasks may be sound
        detail = f"{error}: {error.fix}" if error.fix else str(error)
        return TaskExam(task.id, [*findings, Finding("can be opened", False, detail)])
    findings.append(Finding("the reference applies", not refused, refused))
    settled: Task | None = task
    lacks = ""
    if task.checks and not refused:
        bug = [await grade_in_fresh_sandbox(task, backend, b"") for _ in range(repeat)]
        repaired = [await grade_in_fresh_sandbox(task, backend, task.reference) for _ in range(repeat)]
        findings += make_check_findings(task, bug, repaired)
        settled = keep_steady_tests(task, bug, repaired)
        lacks = next((verdict.problem for verdict in repaired if verdict.doubtful), "")
    return TaskExam(task.id, findings, settled if all(finding.ok for finding in findings[:2]) else None, lacks)


async def grade_in_fresh_sandbox(task: Task, backend: SandboxBackend, patch: bytes) -> Verdict:
    """Grade `patch` in fresh sandboxes; if empty, the untouched workspace. Raises `SandboxFault`."""
    if patch:
        return await grading.grade_apart(backend, task, patch)
    async with backend.open(grading.use_checks_workspace(task)) as fresh:
        return await grading.judge_state(backend, task, fresh)


async def study_solution(task: Task, solution: Checks, backend: SandboxBackend, repeat: int = 1) -> TaskExam:
    """`study_task` for a repair by a program, the first command of `solution`; `task` may have a reference, too."""
    bug = [await grade_in_fresh_sandbox(task, backend, b"") for _ in range(repeat)]
    repaired = [await grade_in_fresh_sandbox(replace(task, checks=solution), backend, b"") for _ in range(repeat)]
    findings = [Finding("has a prompt", bool(task.prompt.strip())), *make_check_findings(task, bug, repaired)]
    if task.reference:
        async with backend.open(task) as fresh:
            refused = await grading.apply_patch(fresh, task.reference)
        findings.append(Finding("the reference applies", not refused, refused))
    lacks = next((verdict.problem for verdict in repaired if verdict.doubtful), "")
    return TaskExam(task.id, findings, task if all(finding.ok for finding in findings) else None, lacks)


def make_check_findings(task: Task, bug: Sequence[Verdict], repaired: Sequence[Verdict]) -> list[Finding]:
    """Findings from runs of the checks on `bug` and `repaired` workspaces, at least one each."""
    problems = [verdict.problem for verdict in repaired if verdict.problem]
    passes_on_bug = any(not verdict.problem for verdict in bug)

    def expect_no_tests(name: str, tests: Sequence[str]) -> Finding:
        return Finding(name, not tests, join_first(tests, _NAMED_TESTS, "; "))

    findings = [
        Finding("the checks fail on the bug", not passes_on_bug, "all passed" if passes_on_bug else bug[0].problem)
    ]
    if task.checks.named:
        passing = [name for name in task.checks.fail_to_pass if any(_is_passed(verdict, name) for verdict in bug)]
        failing = [name for name in task.checks.pass_to_pass if not all(_is_passed(verdict, name) for verdict in bug)]
        findings.append(expect_no_tests("tests of fail_to_pass fail on the bug", passing))
        findings.append(expect_no_tests("tests of pass_to_pass pass on the bug", failing))
    findings.append(Finding("the checks pass on the reference", not problems, next(iter(problems), "")))
    if len(bug) > 1:
        findings.append(expect_no_tests(f"{len(bug)} runs say the same", list_flaky_tests(task, bug, repaired)))
    return findings


def list_flaky_tests(task: Task, bug: Sequence[Verdict], repaired: Sequence[Verdict]) -> list[str]:
    """Flaky graded tests; ``the checks`` if single tests are unknown."""
    return sorted(_find_flaky_tests(task, bug) | _find_flaky_tests(task, repaired))


def _find_flaky_tests(task: Task, runs: Sequence[Verdict]) -> set[str]:
    names = task.checks.named or {name for verdict in runs for name in verdict.outcomes}
    unsteady = {name for name in names if len({_is_passed(verdict, name) for verdict in runs}) > 1}
    return unsteady or ({"the checks"} if len({bool(verdict.problem) for verdict in runs}) > 1 else set())


def keep_steady_tests(task: Task, bug: Sequence[Verdict], repaired: Sequence[Verdict]) -> Task | None:
    """`task` with tests that always fail on the bug, or always pass there, and always pass on the repair."""
    checks = task.checks
    if not any(command.results for command in checks.commands):
        sound = all(verdict.problem for verdict in bug) and not any(verdict.problem for verdict in repaired)
        return task if sound else None
    names = checks.named or sorted({name for verdict in repaired for name in verdict.outcomes})
    steady = [name for name in names if all(_is_passed(verdict, name) for verdict in repaired)]
    fail_to_pass = tuple(name for name in steady if not any(_is_passed(verdict, name) for verdict in bug))
    pass_to_pass = tuple(name for name in steady if all(_is_passed(verdict, name) for verdict in bug))
    if not fail_to_pass:
        return None
    return replace(task, checks=replace(checks, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass))


def _is_passed(verdict: Verdict, name: str) -> bool:
    return not find_failed_tests(verdict.outcomes, [name])


async def verify_tasks(
    source: TaskSource,
    sandbox: SandboxBackend,
    *,
    limit: int = 0,
    repeat: int = 1,
    reward: Mapping[str, float] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[TaskExam]:
    """Examine the source, each task (`study_task`), and rewards on tasks with a reference.

    Each of `reward` (default `patch_edits`) must give 1 to the reference, and 0 to an empty patch and to a blank line
    appended to a repaired file. Takes the first `limit` tasks (0: all); checks run `repeat` times to find flaky tests.

    Raises `TaskError` (say, for a changed environment), `SandboxFault`, `RewardFault`, and `UsageError` for a reward
    that does not measure repair.
    """
    weighted = rewards.make_rewards(reward or "patch_edits")
    repairing = list_repair_rewards(weighted)
    if others := [each.name for each, _ in weighted if each not in repairing]:
        raise UsageError(
            f"reward {others[0]} does not declare that it measures repair",
            fix="leave it out, or give it repairs = True",
        )
    findings, chosen = examine_source(source, limit)
    await asyncio.to_thread(check_environments, chosen)
    exams = [TaskExam("", findings)]
    for number, task in enumerate(chosen, 1):
        say(f"[{number}/{len(chosen)}] {task.id}")
        solution = source.oracle(task.id)
        if solution is None:
            exam = await study_task(task, sandbox, repeat)
        else:
            exam = await study_solution(task, solution, sandbox, repeat)
        if task.reference and repairing and exam.ok:
            useless = {"an empty patch": b"", "a blank line": await _make_blank_line_patch(task, sandbox)}
            findings_by_reward = [await run_trial(Trial(task, each), sandbox, useless) for each in repairing]
            exam = exam._replace(findings=[*exam.findings, *chain.from_iterable(findings_by_reward)])
        exams.append(exam)
    return exams


async def _make_blank_line_patch(task: Task, sandbox: SandboxBackend) -> bytes:
    """Diff of a blank line appended to a repaired file, or empty."""
    async with sandbox.open(task) as fresh:
        for patched in rewards.parse_patch(task.reference):
            try:
                content = await fresh.read(patched.path)
            except (FileNotFoundError, PermissionError):
                continue  # the reference creates it
            await fresh.write(patched.path, content + b"\n")
            break
        return await fresh.diff()


def count_left_out(exams: Sequence[TaskExam]) -> dict[str, int]:
    """Count unusable tasks by first failed question, most frequent first.

    >>> from coderepairrl.registry import Finding
    >>> count_left_out([TaskExam("", ()), TaskExam("a", (Finding("the reference applies", False, ""),))])
    {'the reference applies: no': 1}
    """
    lost = [exam for exam in exams if exam.task and exam.settled is None]
    firsts = (next((one.name for one in exam.findings if not one.ok), "") for exam in lost)
    return dict(Counter(f"{name}: no" if name else _UNSTEADY for name in firsts).most_common())


def list_unusable(exams: Sequence[TaskExam], tasks: Iterable[Task]) -> list[select.VerifiedTask]:
    """Examined `tasks` with their first failed question, for `write_quarantine`; skips those that lack programs."""
    exam_by_task = {exam.task: exam for exam in exams if exam.task and not exam.lacks}
    verified = []
    for task in tasks:
        if exam := exam_by_task.get(task.id):
            wrong = next((f"{each.name}: no ({each.detail})" for each in exam.findings if not each.ok), "")
            verified.append(select.VerifiedTask(task, exam.settled, wrong or ("" if exam.settled else _UNSTEADY)))
    return verified


def format_exams(exams: Sequence[TaskExam]) -> str:
    """Table of tasks, failed questions beneath."""
    lines = []
    for exam in exams:
        passed = sum(finding.ok for finding in exam.findings)
        name = printable(exam.task) or "the source"
        lines.append(f"{'ok  ' if exam.ok else 'FAIL'}  {name}  {passed}/{len(exam.findings)}")
        wrong = [finding for finding in exam.findings if not finding.ok]
        lines += [f"        {printable(finding.name)}: no ({logged(finding.detail)})" for finding in wrong]
    failed = sum(not exam.ok for exam in exams[1:])
    lines.append(f"{format_count(len(exams) - 1, 'task')}, {failed} failed")
    if any(exam.lacks for exam in exams):
        lines.append(f"  fix: {TO_INSTALL}")
    return "\n".join(lines)
