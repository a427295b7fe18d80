"""The exam that every task source sits (``crrl check tasks NAME``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from coderepairrl.protocols import Sandbox, SandboxBackend, TaskSource
from coderepairrl.registry import Check
from coderepairrl.types import Task

_APPLY = ("git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-")


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
            failed = await _failing(fresh, task)
        found.append(Check(f"{task.id}: the checks fail on the bug", bool(failed), failed or "all passed"))
    async with backend.open(task) as fresh:
        applied = await fresh.exec(_APPLY, stdin=task.reference)
        said = applied.output.decode("utf-8", "replace").strip()
        found.append(Check(f"{task.id}: the reference applies", applied.ok, said))
        if task.checks and applied.ok:
            failed = await _failing(fresh, task)
            found.append(Check(f"{task.id}: the checks pass on the reference", not failed, failed))
    return found


async def _failing(sandbox: Sandbox, task: Task) -> str:
    """The first check that does not pass, with the end of what it printed; empty if all do."""
    for path, content in task.checks.restore.items():
        await sandbox.write(path, content.encode("utf-8", "surrogateescape"))
    for command in task.checks.commands:
        result = await sandbox.exec(command.argv, timeout=command.timeout)
        if not result.ok:
            last = result.output.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return f"{' '.join(command.argv)}: {'timed out' if result.timed_out else last or result.exit_code}"
    return ""
