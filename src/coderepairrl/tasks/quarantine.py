"""Broken and flaky tasks, one JSON object per line.

``{"id": ..., "reason": ...}`` excludes a task; with ``fail_to_pass`` and ``pass_to_pass`` only these tests count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from coderepairrl.errors import TaskError, UsageError
from coderepairrl.runs.storage import replace_file
from coderepairrl.types import Task


class Verified(NamedTuple):
    """A verified task: its usable form (`checks.task_source.Study`), if any, and its problem."""

    task: Task
    settled: Task | None
    reason: str


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    reason: str
    fail_to_pass: list[str] | None = None
    pass_to_pass: list[str] | None = None


def write(found: Iterable[Verified], path: Path) -> int:
    """Write problems to a new file; return their number. Raises `UsageError`."""
    if path.exists():
        raise UsageError(f"{path} exists already", fix="remove it, or name another file")
    lines = []
    for each in found:
        if each.settled is None:
            lines.append(_Entry(id=each.task.id, reason=each.reason))
        elif each.reason and each.settled.checks != each.task.checks:
            held = each.settled.checks
            failing, passing = list(held.fail_to_pass), list(held.pass_to_pass)
            lines.append(_Entry(id=each.task.id, reason=each.reason, fail_to_pass=failing, pass_to_pass=passing))
    try:
        with replace_file(path) as partial:
            partial.write_text("".join(f"{line.model_dump_json(exclude_none=True)}\n" for line in lines), "utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", fix="name a file in a folder that you may write to") from error
    return len(lines)


def outside(path: Path, tasks: Sequence[Task]) -> list[Task]:
    """Tasks that the file at `path` leaves usable, with the tests that held. Raises `TaskError`."""
    try:
        entries = [_Entry.model_validate_json(line) for line in path.read_text("utf-8").splitlines()]
    except OSError as error:
        raise TaskError(
            f"{path}: {error.strerror}", fix="crrl tasks verify SOURCE --quarantine FILE writes it"
        ) from error
    except ValueError as error:
        raise TaskError(
            f"{path} keeps no tasks apart: {error}", fix="crrl tasks verify SOURCE --quarantine FILE writes it"
        ) from error
    by_id = {entry.id: entry for entry in entries}
    usable = []
    for task in tasks:
        if (record := by_id.get(task.id)) is None:
            usable.append(task)
        elif record.fail_to_pass is not None:
            failing, passing = tuple(record.fail_to_pass), tuple(record.pass_to_pass or ())
            usable.append(replace(task, checks=replace(task.checks, fail_to_pass=failing, pass_to_pass=passing)))
    return usable
