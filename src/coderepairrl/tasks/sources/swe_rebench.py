"""`swe_rebench`: machine-mined issues for training (arXiv 2505.20411; V2, 20 languages: arXiv 2602.23866).

Follows ``SWE-rebench/SWE-rebench-V2-OpenRewardEnv`` (``server.py``) and the data set's description. Never tested with
the hub or a published image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from coderepairrl.tasks.benchmark import RepositoryBenchmark, Workspace, encode_patch, prepend_tests
from coderepairrl.tasks.patches import is_test_module, list_changed_paths
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

_HUB = {"v1": "nebius/SWE-rebench", "v2": "nebius/SWE-rebench-V2", "leaderboard": "nebius/SWE-rebench-leaderboard"}
TIMEOUT = 1800.0  # seconds
_SPLIT = {"v1": "filtered", "v2": "train", "leaderboard": "test"}


class SweRebench(RepositoryBenchmark):
    """SWE-rebench: `name` is ``v1`` (21,302 issues), ``v2`` (32,079), or ``leaderboard`` (evaluation only).

    Only split ``filtered`` of ``v1`` has images. Columns such as ``meta`` (see `row`) name known defects. Logs are read
    by the row's parser of the package ``swebench``; other parsers are a fault, never a zero. Other options: `swe_gym`.
    """

    name = "swe_rebench"

    def __init__(
        self,
        name: Literal["v1", "v2", "leaderboard"] = "v2",
        *,
        path: str = "",
        split: str = "",
        revision: str = "",
        workspace: Workspace = "git",
        clone: str = "",
        for_training: bool = False,
    ) -> None:
        split = split or _SPLIT[name]
        super().__init__(path, hub=_HUB[name], split=split, revision=revision, workspace=workspace, clone=clone)
        is_evaluation = name == "leaderboard" and not for_training
        self.variant = name
        self.task_split = "test" if is_evaluation else "train"
        self.evaluation_set = "SWE-rebench's leaderboard" if is_evaluation else ""

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        task = super().make_task(row)
        if self.workspace != "image" or "install_config" not in row:
            return task
        settings = Row(row.benchmark, row.where, row.mapping("install_config"))
        test_command = settings.values.get("test_cmd")
        tests = "\n".join(map(str, test_command)) if isinstance(test_command, list) else settings.text("test_cmd")
        if self.variant != "v2":  # commands of v2 name their test files
            changed = list_changed_paths(encode_patch(row.text("test_patch")))
            tests += "".join(f" {path}" for path in changed if is_test_module(path))
        script, restore = prepend_tests(tests, row.text("test_patch"))
        command = Command(("bash", "-lc", script), TIMEOUT, f"swebench:{settings.text('log_parser')}")
        return replace(task, checks=Checks((command,), restore, *row.tests()))
