"""`swe_rebench`: issues mined and built by machine, to train on (arXiv 2505.20411; V2, 20 languages: arXiv 2602.23866).

Columns from public code that reads it (``SWE-rebench/SWE-rebench-V2-OpenRewardEnv``, ``server.py``) and the data set's
description. Not run against the hub.
"""

from __future__ import annotations

from typing import Literal

from coderepairrl.tasks.benchmark import Repositories, Workspace

_HUB = {"v1": "nebius/SWE-rebench", "v2": "nebius/SWE-rebench-V2", "leaderboard": "nebius/SWE-rebench-leaderboard"}
_SPLIT = {"v1": "filtered", "v2": "train", "leaderboard": "test"}


class SweRebench(Repositories):
    """SWE-rebench: `name` is ``v1`` (21,302 issues, of which split ``filtered`` has images), ``v2`` (32,079), or
    ``leaderboard``, which is there to be measured on.

    What is known of a task's defects (``meta`` and the like) is in its `row`; ``select.after`` takes issues that a
    model cannot have seen. `path`, `split` and `revision` are as for `swe_gym`, `workspace` and `clone` those of
    `benchmark.Repositories`.
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
        measured = name == "leaderboard"
        self.task_split = "test" if measured and not for_training else "train"
        self.evaluation_set = "SWE-rebench's leaderboard" if measured and not for_training else ""
