"""`swe_bench_pro`: SWE-bench Pro (arXiv 2509.16941), longer issues of 11 public repositories.

Columns from its public code (``scaleapi/SWE-bench_Pro-os``, ``swe_bench_pro_eval.py`` and ``helper_code``). Not run
against the hub.
"""

from __future__ import annotations

from dataclasses import replace

from coderepairrl.tasks.benchmark import Repositories, Workspace
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Task


class SweBenchPro(Repositories):
    """SWE-bench Pro, the public set. A prompt is the issue, the requirements and the new interfaces, as upstream's.

    `path`, `split`, `revision`, `workspace`, `clone` and `for_training` are as for `swe_bench.SweBench`.
    """

    name = "swe_bench_pro"

    def __init__(
        self,
        path: str = "",
        *,
        split: str = "test",
        revision: str = "",
        workspace: Workspace = "git",
        clone: str = "",
        for_training: bool = False,
    ) -> None:
        hub = "ScaleAI/SWE-bench_Pro"
        super().__init__(path, hub=hub, split=split, revision=revision, workspace=workspace, clone=clone)
        self.task_split = "train" if for_training else split
        self.evaluation_set = "" if for_training else "SWE-bench Pro"

    def task(self, row: Row) -> Task:
        """The task of a row."""
        parts = [row.text("problem_statement")]
        for title, column in (("Requirements", "requirements"), ("New interfaces introduced", "interface")):
            if text := row.maybe(column).strip():
                parts.append(f"{title}:\n{text}")
        return replace(super().task(row), prompt="\n\n".join(parts))

    def image(self, row: Row) -> str:
        """The published image."""
        return f"jefzda/sweap-images:{row.text('dockerhub_tag')}"
