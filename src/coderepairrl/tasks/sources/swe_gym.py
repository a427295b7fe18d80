"""`swe_gym`: SWE-Gym (arXiv 2412.21139), issues of 11 Python repositories to train on.

Columns from its evaluation code (``SWE-Gym/SWE-Bench-Fork``); the shape is that of SWE-bench. Not run against the hub.
"""

from __future__ import annotations

from typing import Literal

from coderepairrl.tasks.benchmark import Repositories, Workspace
from coderepairrl.tasks.rows import Row

_HUB = {"full": "SWE-Gym/SWE-Gym", "lite": "SWE-Gym/SWE-Gym-Lite"}


class SweGym(Repositories):
    """SWE-Gym: `name` is ``full`` (2,438 issues) or ``lite`` (230).

    `path`, `split` and `revision` are as for `swe_bench.SweBench`, `workspace` and `clone` those of
    `benchmark.Repositories`.
    """

    name = "swe_gym"

    def __init__(
        self,
        name: Literal["full", "lite"] = "full",
        *,
        path: str = "",
        split: str = "train",
        revision: str = "",
        workspace: Workspace = "git",
        clone: str = "",
    ) -> None:
        super().__init__(path, hub=_HUB[name], split=split, revision=revision, workspace=workspace, clone=clone)

    def image(self, row: Row) -> str:
        """The published image of the issue, named as the fork names it."""
        if "image" in row:
            return row.text("image")
        return f"xingyaoww/sweb.eval.x86_64.{row.text('instance_id').lower().replace('__', '_s_')}"
