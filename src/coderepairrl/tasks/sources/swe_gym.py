"""`swe_gym`: SWE-Gym (arXiv 2412.21139), issues of 11 Python repositories to train on.

Columns from its evaluation code (``SWE-Gym/SWE-Bench-Fork``); the shape is that of SWE-bench. Not run against the hub.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from coderepairrl.tasks.benchmark import Repositories, Workspace
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.sources import swe_gym_native
from coderepairrl.types import Task

_HUB = {"full": "SWE-Gym/SWE-Gym", "lite": "SWE-Gym/SWE-Gym-Lite"}


class SweGym(Repositories):
    """SWE-Gym: `name` is ``full`` (2,438 issues) or ``lite`` (230).

    `path`, `split` and `revision` are as for `swe_bench.SweBench`, `workspace` and `clone` those of
    `benchmark.Repositories`; with ``native`` a task is a commit in an environment that is built on this machine as the
    benchmark's own `specifications` say (`swe_gym_native`), of those instances where that takes packages alone.
    """

    name = "swe_gym"

    def __init__(
        self,
        name: Literal["full", "lite"] = "full",
        *,
        path: str = "",
        split: str = "train",
        revision: str = "",
        workspace: Literal["git", "image", "native"] = "git",
        specifications: str = "",
        clone: str = "",
    ) -> None:
        place: Workspace = "image" if workspace == "image" else "git"
        super().__init__(path, hub=_HUB[name], split=split, revision=revision, workspace=place, clone=clone)
        self.specifications = swe_gym_native.file_of(specifications) if workspace == "native" else None

    def task(self, row: Row) -> Task:
        """The task of a row."""
        made = super().task(row)
        if self.specifications is None:
            return made
        url = self.clone.format(repository=row.text("repo"))
        environment = swe_gym_native.environment(row, url, self.specifications)
        return replace(made, environment=environment, checks=swe_gym_native.checks(row, self.specifications))

    def _read(self) -> list[Row]:
        rows = super()._read()
        if self.specifications is None:
            return rows
        return [row for row in rows if not swe_gym_native.why_not(row, self.specifications)]

    def image(self, row: Row) -> str:
        """The published image of the issue, named as the fork names it."""
        if "image" in row:
            return row.text("image")
        return f"xingyaoww/sweb.eval.x86_64.{row.text('instance_id').lower().replace('__', '_s_')}"
