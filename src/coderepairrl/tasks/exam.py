"""The exam that every task source sits (``crrl check tasks NAME``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from coderepairrl import grading
from coderepairrl.protocols import SandboxBackend, TaskSource
from coderepairrl.registry import Check
from coderepairrl.types import Task


async def examine(
    source: TaskSource, sandbox: SandboxBackend, *, limit: int = 0, on_task: Callable[[Task], None] = lambda task: None
) -> list[Check]:
    """Ask of `source` what training on it takes for granted; of its first `limit` tasks, 0 for all.

    `on_task` is told each task before its questions.

    There are tasks; ids are unique and the same when asked again; and of each task with a reference: it applies,
    and if there are checks, they fail without it and pass with it. Raises `TaskError` and `SandboxFault`.
    """
    source.prepare()
    tasks = list(_first(source, limit))
    again = list(_first(source, limit))
    ids = [task.id for task in tasks]
    doubles = sorted({task_id for task_id in ids if ids.count(task_id) > 1})
    checks = [
        Check("there are tasks", bool(tasks), f"{len(tasks)}"),
        Check("ids are unique", not doubles, ", ".join(doubles)),
        Check("asking twice gives the same tasks", tasks == again),
    ]
    for task in tasks:
        on_task(task)
        checks.append(Check(f"{task.id}: has a prompt and a reference", bool(task.prompt.strip() and task.reference)))
        if task.reference:
            checks += await _examine_task(task, sandbox)
    return checks


def _first(source: TaskSource, limit: int) -> Iterator[Task]:
    return islice(source, limit or None)


async def _examine_task(task: Task, backend: SandboxBackend) -> list[Check]:
    found = []
    if task.checks:
        async with backend.open(task) as fresh:
            failed = await grading.judge(fresh, task.checks)
        found.append(Check(f"{task.id}: the checks fail on the bug", bool(failed), failed or "all passed"))
    async with backend.open(task) as fresh:
        refused = await grading.apply(fresh, task.reference)
        found.append(Check(f"{task.id}: the reference applies", not refused, refused))
        if task.checks and not refused:
            failed = await grading.judge(fresh, task.checks)
            found.append(Check(f"{task.id}: the checks pass on the reference", not failed, failed))
    return found
