"""``crrl data``: list, prepare, verify (each in a sandbox) and export tasks (docs/guides/tasks.md)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from coderepairrl import rewards
from coderepairrl.checks import task_source
from coderepairrl.environments import check_environments
from coderepairrl.errors import UsageError
from coderepairrl.printable import counted, logged, printable
from coderepairrl.protocols import SandboxBackend, TaskSource
from coderepairrl.registry import Finding
from coderepairrl.rewards.tests import TO_INSTALL
from coderepairrl.rewards.verify import Trial, answers, measuring_repair
from coderepairrl.tasks import select
from coderepairrl.tasks.catalog import export, listed, load, recognised, shipped, splits
from coderepairrl.tasks.harbor import IMAGE
from coderepairrl.tasks.harbor import export as export_harbor
from coderepairrl.tasks.overlap import overlap
from coderepairrl.tasks.overlap import report as shared
from coderepairrl.tasks.select import write_quarantine
from coderepairrl.types import Task

__all__ = [
    "IMAGE",
    "export",
    "export_harbor",
    "listed",
    "load",
    "overlap",
    "recognised",
    "shared",
    "shipped",
    "splits",
    "write_quarantine",
]

_UNSTEADY = "no test fails on the bug and passes on the reference in every run"


class TaskExam(NamedTuple):
    """Findings about a task, or (`task` empty) the source."""

    task: str
    findings: tuple[Finding, ...]
    settled: Task | None = None
    """Trainable task (`checks.task_source.study`); None if unusable."""
    lacks: str = ""
    """Missing prerequisites, in the grader's words."""

    @property
    def ok(self) -> bool:
        """Whether every finding is right."""
        return all(finding.ok for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        checks = [{"name": one.name, "ok": one.ok, "detail": one.detail} for one in self.findings]
        return {"task": self.task, "ok": self.ok, "checks": checks}


async def verify(
    source: TaskSource,
    sandbox: SandboxBackend,
    *,
    limit: int = 0,
    repeat: int = 1,
    reward: Mapping[str, float] | None = None,
    quiet: bool = False,
) -> list[TaskExam]:
    """Examine the source (`checks.task_source.examine`), and rewards on tasks with a reference.

    By each of `reward` (default `patch_edits`) the reference must earn 1; an empty patch, and a blank line appended to
    a repaired file, 0. Takes the first `limit` tasks (0: all); checks run `repeat` times to find flaky tests.

    Raises `TaskError` (say, for a changed environment), `SandboxFault`, `RewardFault`, and `UsageError` for a reward
    that does not measure repair.
    """
    weighted = rewards.make(reward or "patch_edits")
    repairing = measuring_repair(weighted)
    if silent := [each.name for each, _ in weighted if each not in repairing]:
        raise UsageError(
            f"reward {silent[0]} does not declare that it measures repair",
            fix="leave it out, or give it repairs = True",
        )
    findings, chosen = task_source.about_source(source, limit)
    await asyncio.to_thread(check_environments, chosen)
    exams = [TaskExam("", tuple(findings))]
    with _progress(len(chosen), quiet) as on_task:
        for task in chosen:
            on_task(task)
            solution = None if task.reference else source.oracle(task.id)
            if solution is not None:
                studied = await task_source.solved(task, solution, sandbox, repeat)
            else:
                studied = await task_source.study(task, sandbox, repeat)
            task_findings = list(studied.findings)
            if task.reference and repairing and all(finding.ok for finding in task_findings):
                nothing = {"an empty patch": b"", "a blank line": await _noop(task, sandbox)}
                for one in repairing:
                    task_findings += await answers(Trial(task, one), sandbox, nothing)
            exams.append(TaskExam(task.id, tuple(task_findings), studied.settled, studied.lacks))
    return exams


async def _noop(task: Task, sandbox: SandboxBackend) -> bytes:
    """Diff of a blank line appended to a repaired file, or empty."""
    async with sandbox.open(task) as fresh:
        for patched in rewards.parse(task.reference):
            try:
                content = await fresh.read(patched.path)
            except (FileNotFoundError, PermissionError):
                continue  # the reference creates it
            await fresh.write(patched.path, content + b"\n")
            break
        return await fresh.diff()


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Task], None]]:
    console = Console(stderr=True, quiet=quiet, highlight=False)
    name = TextColumn("{task.fields[name]}", markup=False)
    columns = (SpinnerColumn(), TextColumn("verifying"), MofNCompleteColumn(), TimeElapsedColumn(), name)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("", total=total, name="")
        begun = 0

        def on_task(task: Task) -> None:
            nonlocal begun
            bar.update(row, completed=begun, name=printable(task.id))
            begun += 1

        yield on_task


def left_out(exams: Sequence[TaskExam]) -> dict[str, int]:
    """Count unusable tasks by first failed question, most frequent first.

    >>> from coderepairrl.registry import Finding
    >>> left_out([TaskExam("", ()), TaskExam("a", (Finding("the reference applies", False, ""),))])
    {'the reference applies: no': 1}
    """
    lost = [exam for exam in exams if exam.task and exam.settled is None]
    firsts = (next((one.name for one in exam.findings if not one.ok), "") for exam in lost)
    return dict(Counter(f"{name}: no" if name else _UNSTEADY for name in firsts).most_common())


def apart(exams: Sequence[TaskExam], tasks: Iterable[Task]) -> list[select.Verified]:
    """Examined `tasks` with their first wrong answer, for `write_quarantine`, except for missing prerequisites."""
    exam_by_task = {exam.task: exam for exam in exams if exam.task and not exam.lacks}

    def reason(exam: TaskExam) -> str:
        wrong = next((one for one in exam.findings if not one.ok), None)
        return f"{wrong.name}: no ({wrong.detail})" if wrong else "" if exam.settled else _UNSTEADY

    return [
        select.Verified(task, exam_by_task[task.id].settled, reason(exam_by_task[task.id]))
        for task in tasks
        if task.id in exam_by_task
    ]


def table(exams: Sequence[TaskExam]) -> str:
    """Table of tasks, failed questions beneath."""
    lines = []
    for exam in exams:
        passed = sum(finding.ok for finding in exam.findings)
        name = printable(exam.task) or "the source"
        lines.append(f"{'ok  ' if exam.ok else 'FAIL'}  {name}  {passed}/{len(exam.findings)}")
        wrong = [finding for finding in exam.findings if not finding.ok]
        lines += [f"        {printable(finding.name)}: no ({logged(finding.detail)})" for finding in wrong]
    failed = sum(not exam.ok for exam in exams[1:])
    lines.append(f"{counted(len(exams) - 1, 'task')}, {failed} failed")
    if any(exam.lacks for exam in exams):
        lines.append(f"  fix: {TO_INSTALL}")
    return "\n".join(lines)
