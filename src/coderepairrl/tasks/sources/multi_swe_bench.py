"""`multi_swe_bench`: Multi-SWE-bench (arXiv 2504.02605), issues in Java, TypeScript, JavaScript, Go, Rust, C and C++.

Columns from its public code (``multi-swe-bench/multi-swe-bench``, ``harness/pull_request.py``, ``dataset.py`` and
``image.py``). Not run against the hub.
"""

from __future__ import annotations

from typing import Literal

from coderepairrl.tasks.benchmark import Repositories, Workspace
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Task

_HUB = {"bench": "ByteDance-Seed/Multi-SWE-bench", "rl": "ByteDance-Seed/Multi-SWE-RL"}


class MultiSweBench(Repositories):
    """Multi-SWE-bench: `name` is ``bench`` (1,632 issues), or ``rl``, issues of the same form to train on.

    `path`, `split`, `revision`, `workspace`, `clone` and `for_training` are as for `swe_bench.SweBench`.
    """

    name = "multi_swe_bench"

    def __init__(
        self,
        name: Literal["bench", "rl"] = "bench",
        *,
        path: str = "",
        split: str = "train",
        revision: str = "",
        workspace: Workspace = "git",
        clone: str = "",
        for_training: bool = False,
    ) -> None:
        super().__init__(path, hub=_HUB[name], split=split, revision=revision, workspace=workspace, clone=clone)
        measured = name == "bench" and not for_training
        self.task_split = "test" if measured else "train"
        self.evaluation_set = "Multi-SWE-bench" if measured else ""

    def task(self, row: Row) -> Task:
        """The task of a row."""
        issues = [dict(each) for each in row.values.get("resolved_issues") or ()]
        statement = "\n\n".join(f"{each.get('title', '')}\n{each.get('body') or ''}".strip() for each in issues)
        columns = {
            "instance_id": f"{row.text('org')}__{row.text('repo')}-{row.values['number']}",
            "repo": f"{row.text('org')}/{row.text('repo')}",
            "base_commit": row.mapping("base").get("sha"),
            "patch": row.text("fix_patch"),
            "problem_statement": statement or f"{row.maybe('title')}\n{row.maybe('body')}".strip(),
        }
        return super().task(Row(row.benchmark, row.where, {**row.values, **columns}))

    def image(self, row: Row) -> str:
        """The published image."""
        owner, _, name = row.text("repo").lower().partition("/")
        return f"mswebench/{owner}_m_{name}:pr-{row.values['number']}"
