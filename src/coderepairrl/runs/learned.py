"""Which tasks a model has learned from by imitation: a run that fine-tunes one writes them down, and its heirs too."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from coderepairrl.errors import RunError
from coderepairrl.runs.folder import write_atomic

NAME = "learned.json"
"""Of a run folder, or of a model folder that was exported from one."""


def write_learned(folder: Path, tasks: Iterable[str]) -> None:
    """Write down that the model of the run in `folder` has learned from trajectories of `tasks`, by id; nothing where
    there are none. Raises `RunError`."""
    if ids := sorted(set(tasks)):
        write_atomic(folder / NAME, json.dumps({"tasks": ids}, indent=1) + "\n")


def read_learned(folder: Path) -> frozenset[str]:
    """The ids of the tasks that were written down in `folder`; none where nothing was. Raises `RunError` for damage."""
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
