"""`handmade`: small repositories with one bug each, shipped with this project.

A task's folder has ``repo/`` (workspace), ``fix.patch`` (reference), ``checks/`` (restored files) and ``task.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from coderepairrl.errors import TaskError
from coderepairrl.grading.witness import detect_runner
from coderepairrl.protocols import TaskSource
from coderepairrl.types import Checks, Command, Task

_FOLDER = Path(__file__).with_suffix("")  # handmade/ beside handmade.py
_TIMEOUT_SECONDS = 10.0
"""Time limit: a check takes 0.1 s on an idle machine."""


class HandmadeSource(TaskSource):
    """Handmade tasks, all or those of `split` (``train`` or ``test``)."""

    name = "handmade"

    def __init__(self, split: str | None = None) -> None:
        self.split = split

    def prepare(self) -> None:
        """Raise `TaskError` for an unknown split."""
        if not list(self):
            raise TaskError(f"handmade has no task of split {self.split!r}", fix="its splits are train and test")

    def __iter__(self) -> Iterator[Task]:
        """Tasks by name."""
        for description in sorted(_FOLDER.glob("*/task.toml")):
            task = _read_task(description.parent)
            if self.split in (None, task.split):
                yield task


def _read_task(folder: Path) -> Task:
    description = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    checks_folder = folder / "checks"
    restore = {
        str(path.relative_to(checks_folder)): path.read_bytes().decode("utf-8")
        for path in sorted(checks_folder.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"  # pip compiles the modules that it installs
    }
    return Task(
        id=f"handmade/{folder.name}",
        prompt=description["prompt"],
        language=description["language"],
        workspace=f"dir:{folder / 'repo'}",
        reference=(folder / "fix.patch").read_bytes(),
        checks=Checks(
            tuple(Command(tuple(argv), _TIMEOUT_SECONDS, detect_runner(argv)) for argv in description["commands"]),
            restore,
        ),
        split=description["split"],
        licence="Apache-2.0",
        difficulty=description["difficulty"],
    )
