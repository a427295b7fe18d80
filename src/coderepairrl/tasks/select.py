"""Selection of a source's tasks: filters, quarantine, seeded sample, held-out part.

A quarantine is a file of JSON lines: ``{"id": ..., "reason": ...}`` excludes a task; with ``fail_to_pass`` and
``pass_to_pass`` only these tests count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from coderepairrl.errors import ConfigError, TaskError, UsageError
from coderepairrl.protocols import TaskSource
from coderepairrl.runs.storage import replace_file
from coderepairrl.tasks.base import LoadedSource, check_day
from coderepairrl.tasks.benchmark import Benchmark
from coderepairrl.tasks.patches import measure_patch
from coderepairrl.types import Checks, Task


class VerifiedTask(NamedTuple):
    """A verified task: its usable form (`checks.task_source.TaskExam`), if any, and its problem."""

    task: Task
    settled: Task | None
    reason: str


class _QuarantineEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    reason: str
    fail_to_pass: list[str] | None = None
    pass_to_pass: list[str] | None = None


def write_quarantine(verified: Iterable[VerifiedTask], path: Path) -> int:
    """Write problems to a new file; return their number. Raises `UsageError`."""
    if path.exists():
        raise UsageError(f"{path} already exists", fix="remove it, or name another file")
    lines = []
    for each in verified:
        if each.settled is None:
            lines.append(_QuarantineEntry(id=each.task.id, reason=each.reason))
        elif each.reason and each.settled.checks != each.task.checks:
            checks = each.settled.checks
            failing, passing = list(checks.fail_to_pass), list(checks.pass_to_pass)
            lines.append(
                _QuarantineEntry(id=each.task.id, reason=each.reason, fail_to_pass=failing, pass_to_pass=passing)
            )
    try:
        with replace_file(path) as partial:
            partial.write_text("".join(f"{line.model_dump_json(exclude_none=True)}\n" for line in lines), "utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", fix="name a file in a folder that you may write to") from error
    return len(lines)


def exclude_quarantined(path: Path, tasks: Sequence[Task]) -> list[Task]:
    """Remove the tasks, and the tests, that the quarantine file at `path` excludes. Raises `TaskError`."""
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: a reason may hold other separators
        entries = [_QuarantineEntry.model_validate_json(line) for line in lines if line]
    except (OSError, ValueError) as error:
        problem = f": {error.strerror}" if isinstance(error, OSError) else f" is not a quarantine file: {error}"
        raise TaskError(f"{path}{problem}", fix="crrl tasks verify SOURCE --quarantine FILE writes it") from error
    by_id = {entry.id: entry for entry in entries}
    usable = []
    for task in tasks:
        if (entry := by_id.get(task.id)) is None:
            usable.append(task)
        elif entry.fail_to_pass is not None:
            failing, passing = tuple(entry.fail_to_pass), tuple(entry.pass_to_pass or ())
            usable.append(replace(task, checks=replace(task.checks, fail_to_pass=failing, pass_to_pass=passing)))
    return usable


TRAIN, HELD_OUT = "train", "test"
"""The splits that `Selection.holdout` makes."""
QUESTIONS = ("vulnerable", "safe", "weakness", "repair")
"""Last part of ids of tasks about a vulnerable function: ``SOURCE/PAIR/QUESTION`` (`vulnerabilities`)."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Option ``select`` of every source: filters, then `seed`, `skip`, `n`, then splits.

    Leaves out tasks without a filtered property (date, difficulty, patch). Raises `ConfigError`.

    >>> Selection(n=250, seed=42).n
    250
    """

    languages: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ()
    """Only tasks of these repositories, as ``OWNER/NAME``."""
    without: tuple[str, ...] = ()
    """No tasks of these repositories."""
    leave_out: tuple[str, ...] = ()
    """No tasks whose ids match one of these globs, such as ``mutants/*.is_prime/*``."""
    after: str = ""
    """Earliest creation day, as ``YYYY-MM-DD``."""
    before: str = ""
    """Only tasks of earlier days."""
    min_difficulty: float | None = None
    max_difficulty: float | None = None
    max_prompt: int | None = None
    """Characters of the issue, at most."""
    max_lines: int | None = None
    """Lines that the reference adds and removes, at most."""
    max_files: int | None = None
    max_hunks: int | None = None
    quarantine: str = ""
    """File of `crrl tasks verify --quarantine FILE`: excludes bad tasks, and unreliable tests of others."""
    seed: int | None = None
    """Seed of the order; None keeps the source's."""
    skip: int = 0
    n: int = 0
    """Number of tasks to take after the first `skip`; 0 takes all."""
    holdout: float = 0.0
    """Share of ids in split ``test`` by lowest MD5 (`is_held_out`); others are ``train``."""
    split: str = ""
    """Split of all selected tasks, replacing the source's."""

    def __post_init__(self) -> None:
        check_day("select.after", self.after)
        check_day("select.before", self.before)
        if min(self.skip, self.n) < 0:
            raise ConfigError("select.skip and select.n must not be negative", fix="write 0 or more")
        if not 0 <= self.holdout <= 1:
            raise ConfigError(f"select.holdout={self.holdout:g} is not a share", fix="write a number from 0 to 1")
        if self.holdout and self.split:
            raise ConfigError("select.holdout and select.split both name splits", fix="leave one out")

    def passes_filters(self, task: Task) -> bool:
        """Whether `task` passes the filters."""
        return (
            (not self.languages or task.language in self.languages)
            and (not self.repositories or task.repository in self.repositories)
            and task.repository not in self.without
            and not any(fnmatchcase(task.id, glob) for glob in self.leave_out)
            and (not self.after or (bool(task.created) and task.created >= self.after))
            and (not self.before or (bool(task.created) and task.created < self.before))
            and _is_in_range(task.difficulty, self.min_difficulty, self.max_difficulty)
            and _is_in_range(len(task.prompt), None, self.max_prompt)
            and self._is_small(task)
        )

    def _is_small(self, task: Task) -> bool:
        limits = (self.max_files, self.max_hunks, self.max_lines)
        if limits == (None, None, None):
            return True
        sizes = zip(measure_patch(task.reference), limits, strict=True)
        return bool(task.reference) and all(limit is None or number <= limit for number, limit in sizes)

    def select_tasks(self, tasks: list[Task]) -> list[Task]:
        """Selected `tasks`. Raises `TaskError` for an unreadable quarantine file."""
        if self.quarantine:
            tasks = exclude_quarantined(Path(self.quarantine).expanduser(), tasks)
        selected = [task for task in tasks if self.passes_filters(task)]
        if self.seed is not None:
            Random(self.seed).shuffle(selected)
        selected = selected[self.skip : self.skip + self.n if self.n else None]
        if self.split:
            return [replace(task, split=self.split) for task in selected]
        if self.holdout:
            return [replace(task, split=HELD_OUT if is_held_out(task.id, self.holdout) else TRAIN) for task in selected]
        return selected


class SelectedSource(LoadedSource):
    """A selection from another source."""

    def __init__(self, source: TaskSource, selection: Selection) -> None:
        self.name, self.evaluation_set = source.name, source.evaluation_set
        self.source, self.selection = source, selection

    def load(self) -> list[Task]:
        """Prepare the source and select. Raises as the source, and `TaskError` without tasks."""
        benchmark = self.source if isinstance(self.source, Benchmark) else None
        if benchmark is not None:  # images are made for selected tasks only
            available = benchmark.describe_tasks()
        else:
            self.source.prepare()
            available = list(self.source)
        selected = self.selection.select_tasks(available)
        if not selected:
            raise TaskError(
                f"options.select leaves none of the {len(available)} tasks of {self.name}", fix="loosen its filters"
            )
        return selected if benchmark is None else benchmark.attach_images(selected)

    def oracle(self, task_id: str) -> Checks | None:
        """The source's oracle."""
        return self.source.oracle(task_id)


def is_held_out(task_id: str, share: float) -> bool:
    """Whether the id is in the held-out `share`: ``MD5(id) / 16^32 < share``.

    Questions about one vulnerable function share its lines, and are held out together.

    >>> [is_held_out(name, 0.25) for name in ("a", "b", "c", "d", "e", "f")]
    [True, False, False, False, False, False]
    >>> len({is_held_out(f"sven/train-1/{part}", 0.25) for part in ("vulnerable", "safe", "weakness", "repair")})
    1
    """
    function, _, question = task_id.rpartition("/")
    name = function if question in QUESTIONS and "/" in function else task_id
    return int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), 16) / 16**32 < share


def _is_in_range(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)
