"""Exam of task sources (``crrl check tasks NAME``, ``crrl data verify NAME``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from coderepairrl import grading
from coderepairrl.errors import TaskError
from coderepairrl.grading import Verdict, lacking
from coderepairrl.protocols import SandboxBackend, TaskSource
from coderepairrl.registry import Finding
from coderepairrl.tasks.prepare import with_diffed_references
from coderepairrl.types import Checks, Task

_NAMED = 5


async def examine(
    source: TaskSource, sandbox: SandboxBackend, *, limit: int = 0, on_task: Callable[[Task], None] = lambda task: None
) -> list[Finding]:
    """Examine `source`, and its first `limit` tasks (0: all).

    Calls `on_task` before the questions of a task. Raises `TaskError` and `SandboxFault`.
    """
    findings, tasks = about_source(source, limit)
    for task in tasks:
        on_task(task)
        studied = await study(task, sandbox)
        findings += [finding._replace(name=f"{task.id}: {finding.name}") for finding in studied.findings]
    return findings


def about_source(source: TaskSource, limit: int = 0) -> tuple[list[Finding], list[Task]]:
    """Check that a source has tasks, unique ids, and repeats them; return findings and tasks.

    References are written as in a run. Raises `TaskError`.
    """
    source.prepare()
    tasks, again = (list(islice(source, limit or None)) for _ in range(2))
    ids = [task.id for task in tasks]
    doubles = sorted({task_id for task_id in ids if ids.count(task_id) > 1})
    findings = [
        Finding("there are tasks", bool(tasks), f"{len(tasks)}"),
        Finding("ids are unique", not doubles, ", ".join(doubles)),
        Finding("asking twice gives the same tasks", tasks == again),
    ]
    return findings, list(with_diffed_references(tasks))


class Study(NamedTuple):
    """Findings about a task, and the trainable task, or None."""

    findings: list[Finding]
    settled: Task | None
    lacks: str = ""
    """Grader's report if no checks began."""


async def study(task: Task, backend: SandboxBackend, repeat: int = 1) -> Study:
    """Check that a task opens, its reference applies, and checks fail without it and pass with it.

    Checks run `repeat` times on both sides, in fresh sandboxes; differing tests are flaky. Raises `SandboxFault`.
    """
    judged = bool(task.reference or task.answer)
    findings = [Finding("has a prompt, and a reference or an answer", bool(task.prompt.strip() and judged))]
    if not task.reference:
        return Study(findings, task if judged and findings[0].ok else None)
    try:
        async with backend.open(task) as fresh:
            refused = await grading.apply(fresh, task.reference)
    except TaskError as error:  # its commit or environment is not there: the others may be sound
        detail = f"{error}: {error.fix}" if error.fix else str(error)
        return Study([*findings, Finding("can be opened", False, detail)], None)
    findings.append(Finding("the reference applies", not refused, refused))
    settled: Task | None = task
    lacks = ""
    if task.checks and not refused:
        bug = [await graded(task, backend, b"") for _ in range(repeat)]
        repaired = [await graded(task, backend, task.reference) for _ in range(repeat)]
        findings += answers(task, bug, repaired)
        settled = settle(task, bug, repaired)
        lacks = next((verdict.problem for verdict in repaired if verdict.doubtful), "")
    return Study(findings, settled if all(finding.ok for finding in findings[:2]) else None, lacks)


async def graded(task: Task, backend: SandboxBackend, patch: bytes) -> Verdict:
    """Grade `patch` in fresh sandboxes; if empty, the untouched workspace. Raises `SandboxFault`."""
    if patch:
        return await grading.grade_apart(backend, task, patch)
    async with backend.open(grading.judged_in(task)) as fresh:
        return await grading.judge(fresh, task.checks)


async def solved(task: Task, solution: Checks, backend: SandboxBackend, repeat: int = 1) -> Study:
    """`study` a task whose repair is a program, the first command of `solution`."""
    bug = [await graded(task, backend, b"") for _ in range(repeat)]
    repaired = [await graded(replace(task, checks=solution), backend, b"") for _ in range(repeat)]
    findings = [Finding("has a prompt", bool(task.prompt.strip())), *answers(task, bug, repaired)]
    lacks = next((verdict.problem for verdict in repaired if verdict.doubtful), "")
    return Study(findings, task if all(finding.ok for finding in findings) else None, lacks)


def answers(task: Task, bug: Sequence[Verdict], repaired: Sequence[Verdict]) -> list[Finding]:
    """Findings from runs of the checks on `bug` and `repaired` workspaces, at least one each."""
    problems = [verdict.problem for verdict in repaired if verdict.problem]
    missed = [verdict for verdict in bug if not verdict.problem]
    findings = [Finding("the checks fail on the bug", not missed, "all passed" if missed else bug[0].problem)]
    if task.checks.named:
        passing = [name for name in task.checks.fail_to_pass if any(_passed(verdict, name) for verdict in bug)]
        failing = [name for name in task.checks.pass_to_pass if not all(_passed(verdict, name) for verdict in bug)]
        findings.append(Finding("tests of fail_to_pass fail on the bug", not passing, _some(passing)))
        findings.append(Finding("tests of pass_to_pass pass on the bug", not failing, _some(failing)))
    findings.append(Finding("the checks pass on the reference", not problems, next(iter(problems), "")))
    if len(bug) > 1:
        unsure = flaky(task, bug, repaired)
        findings.append(Finding(f"{len(bug)} runs say the same", not unsure, _some(unsure)))
    return findings


def flaky(task: Task, bug: Sequence[Verdict], repaired: Sequence[Verdict]) -> list[str]:
    """Flaky tests that count; ``the checks`` if single tests are unknown."""
    return sorted(_flaky(task, bug) | _flaky(task, repaired))


def _flaky(task: Task, runs: Sequence[Verdict]) -> set[str]:
    names = task.checks.named or {name for verdict in runs for name in verdict.outcomes}
    unsteady = {name for name in names if len({_passed(verdict, name) for verdict in runs}) > 1}
    return unsteady or ({"the checks"} if len({bool(verdict.problem) for verdict in runs}) > 1 else set())


def settle(task: Task, bug: Sequence[Verdict], repaired: Sequence[Verdict]) -> Task | None:
    """`task` with tests that always fail on the bug, or always pass there, and always pass on the repair."""
    checks = task.checks
    if not any(command.results for command in checks.commands):
        sound = all(verdict.problem for verdict in bug) and not any(verdict.problem for verdict in repaired)
        return task if sound else None
    names = checks.named or sorted({name for verdict in repaired for name in verdict.outcomes})
    steady = [name for name in names if all(_passed(verdict, name) for verdict in repaired)]
    fail_to_pass = tuple(name for name in steady if not any(_passed(verdict, name) for verdict in bug))
    pass_to_pass = tuple(name for name in steady if all(_passed(verdict, name) for verdict in bug))
    if not fail_to_pass:
        return None
    return replace(task, checks=replace(checks, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass))


def _passed(verdict: Verdict, name: str) -> bool:
    return not lacking(verdict.outcomes, [name])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more
