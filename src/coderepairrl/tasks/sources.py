"""Task sources by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coderepairrl import registry
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import TaskSource
from coderepairrl.types import Task

SHIPPED = {
    "jsonl": "coderepairrl.tasks.jsonl:JsonlSource",
    "handmade": "coderepairrl.tasks.handmade:HandmadeSource",
    "mutants": "coderepairrl.tasks.mutants:MutantSource",
}
"""The sources that ship, by name."""


def make(source: str, /, **options: Any) -> TaskSource:
    """The source of that name, or of that import path ``module:Class``, made with `options`.

    Raises `ConfigError` for an unknown name or option, with the nearest known one, and for a missing option.
    """
    if Path(source).suffix in (".jsonl", ".json") and ":" not in source:
        raise ConfigError(
            f"{source} is no task source: a file of tasks is read by `jsonl`",
            fix=f"write jsonl path={source}; in a configuration tasks.source=jsonl tasks.options.path={source}",
        )
    made: TaskSource = registry.make("task source", source, SHIPPED, TaskSource, options)
    return made


class ScriptedSource:
    """A source that gives `tasks`, or raises `error` when it is prepared, for tests."""

    name = "scripted"

    def __init__(self, tasks: Sequence[Task] = (), error: Exception | None = None) -> None:
        self.tasks = tuple(tasks)
        self.error = error
        self.prepared = 0

    def prepare(self) -> None:
        """Raise the error that was given, if any."""
        self.prepared += 1
        if self.error is not None:
            raise self.error

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)
