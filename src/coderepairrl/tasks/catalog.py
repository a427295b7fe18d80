"""The shipped sources, and listing and exporting the tasks of any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from coderepairrl import tasks
from coderepairrl.errors import UsageError
from coderepairrl.protocols import TaskSource
from coderepairrl.runs.storage import replace_file
from coderepairrl.types import Task


class Listing(NamedTuple):
    """A shipped source: how many tasks it has by split, if it has any of its own, and where they come from."""

    source: str
    splits: dict[str, int]
    about: str


def shipped() -> list[Listing]:
    """The shipped sources. Nothing is prepared: no file is written."""
    return [
        Listing("handmade", splits(tasks.make("handmade")), "small repositories with a bug each, in several languages"),
        Listing("mutants", _corpus(), "bugs injected into shipped functions; into your package: path=FOLDER n=64"),
        Listing("jsonl", {}, "your own, one JSON object per line: path=FILE"),
    ]


def _corpus() -> dict[str, int]:
    """Tasks of `mutants` by split. To iterate over the source would write the workspaces of all of them."""
    from coderepairrl.tasks.mutants.corpus_tasks import exercise, mutants

    made = [m.split for m in mutants() for quoted in (True, False) if exercise(m, Random(f"{m.key}/0"), quoted)]
    return dict(sorted(Counter(made).items()))


def load(source: str, options: Mapping[str, Any]) -> TaskSource:
    """The source of that name, prepared. Raises `ConfigError`, and `TaskError` when its tasks cannot be used."""
    made = tasks.make(source, **options)
    made.prepare()
    return made


def splits(found: Iterable[Task]) -> dict[str, int]:
    """How many tasks there are by split, the largest first."""
    return dict(Counter(task.split for task in found).most_common())


def listed(found: Iterable[Task]) -> list[dict[str, str]]:
    """A line for each task: ``id``, ``split``, ``workspace`` and ``environment``."""
    return [
        {"id": task.id, "split": task.split, "workspace": task.workspace, "environment": task.environment}
        for task in found
    ]


def export(source: Iterable[Task], target: Path) -> int:
    """Write the tasks of `source` to `target` in the schema of `jsonl`; the file is there whole or not at all.

    Returns how many there are. Raises `UsageError` when the file exists already or cannot be written.
    """
    if target.exists():
        raise UsageError(f"{target} exists already", fix="remove it, or name another file")
    found = list(source)
    try:
        with replace_file(target) as partial:
            tasks.write_jsonl(found, partial)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}", fix="name a file in a folder that you may write to") from error
    return len(found)
