"""Whether tasks are what training takes them for, asked of the tasks themselves in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from coderepairrl import rewards, tasks
from coderepairrl.protocols import Reward, SandboxBackend, TaskSource
from coderepairrl.registry import Check
from coderepairrl.rewards.exam import with_patch
from coderepairrl.types import Task


class Verdict(NamedTuple):
    """All questions about one task, or (`task` is empty) about the source as a whole."""

    task: str
    checks: tuple[Check, ...]
    settled: Task | None = None
    """The task as it may be trained on (`tasks.study`); nothing where it may not."""

    @property
    def ok(self) -> bool:
        """Whether every answer was the right one."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"task": self.task, "ok": self.ok, "checks": [check._asdict() for check in self.checks]}


async def verify(
    source: TaskSource, sandbox: SandboxBackend, *, limit: int = 0, repeat: int = 1, quiet: bool = False
) -> list[Verdict]:
    """The exam of the source (`tasks.examine`) and, of each task with a reference, what the default reward says.

    The reference earns 1, an empty patch 0, and a blank line at the end of a file that the reference repairs 0.
    Of the first `limit` tasks, 0 for all; checks run `repeat` times, to find flaky tests. Progress goes to stderr.
    Raises `TaskError`, `SandboxFault`, `RewardFault`.
    """
    [(reward, _)] = rewards.make("patch_edits")
    checks, chosen = tasks.about_source(source, limit)
    found = [Verdict("", tuple(checks))]
    with _progress(len(chosen), quiet) as on_task:
        for task in chosen:
            on_task(task)
            studied = await tasks.study(task, sandbox, repeat)
            own = list(studied.checks)
            if task.reference and all(check.ok for check in own):
                own += await _rewarded(task, reward, sandbox)
            found.append(Verdict(task.id, tuple(own), studied.settled))
    return found


async def _rewarded(task: Task, reward: Reward, sandbox: SandboxBackend) -> list[Check]:
    async def value(patch: bytes) -> float:
        return (await reward(task, with_patch(task, patch), sandbox)).value

    oracle, empty, noop = await value(task.reference), await value(b""), await value(await _noop(task, sandbox))
    return [
        Check("the reference earns 1", oracle == 1.0, f"{oracle:g}"),
        Check("an empty patch earns 0", empty == 0.0, f"{empty:g}"),
        Check("a blank line earns 0", noop == 0.0, f"{noop:g}"),
    ]


async def _noop(task: Task, sandbox: SandboxBackend) -> bytes:
    """The diff of an agent that appended a blank line to a file that needs repair; empty if there is no such file."""
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
            bar.update(row, completed=begun, name=task.id)
            begun += 1

        yield on_task


def table(verdicts: Sequence[Verdict]) -> str:
    """One line per task, and beneath it each question that failed."""
    lines = []
    for verdict in verdicts:
        passed = sum(check.ok for check in verdict.checks)
        name = verdict.task or "the source"
        lines.append(f"{'ok  ' if verdict.ok else 'FAIL'}  {name}  {passed}/{len(verdict.checks)}")
        lines += [f"        {check.name}: no ({check.detail})" for check in verdict.checks if not check.ok]
    failed = sum(not verdict.ok for verdict in verdicts[1:])
    lines.append(f"{len(verdicts) - 1} tasks, {failed} failed")
    if any("No module named" in line for line in lines):
        lines.append("  fix: checks see the system's packages; docs/tasks.md says how to show them others")
    return "\n".join(lines)
