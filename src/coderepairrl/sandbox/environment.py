"""What the commands of a task need to run: its virtual environment, as this machine has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder, environments_cache
from coderepairrl.sandbox.contents import Entry, plain
from coderepairrl.types import Task

BUILT = "built"
"""The folder of an environment with what only the project's build makes."""


def environment_of(task: Task) -> Path | None:
    """The virtual environment that the task's commands need, if it names one. Raises `TaskError` where it is not.

    A folder with a ``bin`` is not enough: a file of tasks from elsewhere could show an agent the home of its user.
    """
    kind, _, where = task.environment.partition(":")
    if kind == "python":
        folder = environment_folder(task.environment)
        if not (folder / ENVIRONMENT_RECORD).is_file():
            raise TaskError(
                f"task {task.id}: its environment is not built on this machine",
                fix="prepare its source (crrl data prepare), on a machine with a network",
            )
        return folder
    if kind != "venv":
        return None
    if not (Path(where) / "bin").is_dir():
        raise TaskError(
            f"task {task.id}: its environment {where} is not there",
            fix="prepare its source again (crrl data prepare), or export it again on this machine",
        )
    if not where.startswith("/") or not (Path(where) / "pyvenv.cfg").is_file():
        raise TaskError(
            f"task {task.id}: its environment {where} is no virtual environment",
            fix="name one by its whole path (python -m venv): sandboxes are shown all of it",
        )
    return Path(where)


def interpreter_of(environment: Path) -> Path | None:
    """The installation of Python that `environment` was made from, where that is in the cache; sandboxes see ``/usr``.

    Another one is not shown: a file of tasks from elsewhere could name any folder.
    """
    found = re.search(r"^home\s*=\s*(.*)/bin\s*$", (environment / "pyvenv.cfg").read_text("utf-8"), re.MULTILINE)
    folder = Path(found[1]) if found else None
    shown = folder is not None and folder.parent == environments_cache() / "pythons" and folder.name != ".."
    return folder if shown else None


def built_for(environment: Path | None) -> Iterator[Entry]:
    """Files that only the project's build makes (``_version.py``): they are in every workspace of the environment."""
    folder = environment / BUILT if environment else None
    if folder is not None and folder.is_dir():
        yield from plain(folder)
