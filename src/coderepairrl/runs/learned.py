"""Record of the tasks that a model learned from by imitation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from coderepairrl.errors import RunError
from coderepairrl.runs.folder import write_atomic

NAME = "learned.json"
"""File in a run folder, or in a model folder exported from one."""


def write_learned(folder: Path, tasks: Iterable[str]) -> None:
    """Record `tasks` by id for the run in `folder`; nothing if empty. Raises `RunError`."""
    if ids := sorted(set(tasks)):
        write_atomic(folder / NAME, json.dumps({"tasks": ids}, indent=1) + "\n")


def read_learned(folder: Path) -> frozenset[str]:
    """Recorded task ids of `folder`, if any. Raises `RunError` for damage."""
    path = folder / NAME
    if not path.is_file():
        return frozenset()
    try:
        ids = json.loads(path.read_text("utf-8"))["tasks"]
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise ValueError("tasks is no list of ids")
        return frozenset(ids)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} does not say which tasks were learned from: {error}", fix="restore it from a copy"
        ) from None
