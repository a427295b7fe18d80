"""`swe_smith`: bugs injected into public repositories (SWE-smith, arXiv 2504.21798), for training.

Follows ``SWE-bench/SWE-smith`` 0.0.9 (``swesmith/harness/gather.py``, ``utils.py``). Never tested with the hub or a
published image.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coderepairrl.grading.harness import SWE_SMITH
from coderepairrl.tasks.benchmark import RepositoryBenchmark, TaskImages, Workspace, derive_image, encode_patch
from coderepairrl.tasks.patches import detect_language, reverse_patch
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

_SCRIPT = """
set -uxo pipefail
git checkout -- FILES
: '>>>>> Start Test Output'
COMMAND
: '>>>>> End Test Output'
"""
"""Script of SWE-smith, which first restores the tests that a patch may have changed."""
_BUG = "bug.patch"


class SweSmith(RepositoryBenchmark):
    """SWE-smith's tasks. A row's patch makes the bug, so the reference is its inverse.

    `workspace` ``git`` is the row's commit of the mirror (``swesmith/OWNER__NAME.COMMIT``), without tests that the bug
    breaks; ``image`` is ``image_name`` with the bug, without these tests and history. Other options: see `swe_gym`.
    """

    name = "swe_smith"

    def __init__(
        self,
        path: str = "",
        *,
        split: str = "train",
        revision: str = "",
        workspace: Workspace = "git",
        clone: str = "",
    ) -> None:
        hub = "SWE-bench/SWE-smith"
        super().__init__(path, hub=hub, split=split, revision=revision, workspace=workspace, clone=clone)
        self._profiles: dict[str, dict[str, Any]] = {}  # answers of the package swesmith, by instance id

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        failing = "\n".join(row.names("FAIL_TO_PASS"))
        prompt = row.text_or_empty("problem_statement").strip() or f"A bug makes these tests fail:\n\n{failing}\n"
        reference = encode_patch(reverse_patch(row.text("patch")))
        task = super().make_task(Row(row.benchmark, row.where, {**row.values, "problem_statement": prompt}))
        task = replace(task, reference=reference, language=detect_language(reference))
        if self.workspace != "image":
            return task
        return replace(task, checks=Checks((), {}, *row.tests()))

    def attach_images(self, tasks: Sequence[Task]) -> list[Task]:
        """Put tasks into images; their commands come from a single call of the package swesmith."""
        if self.workspace != "image":
            return super().attach_images(tasks)
        rows = [self._described[task.id][1] for task in tasks]
        lists = [zip(("fail_to_pass", "pass_to_pass"), map(list, row.tests()), strict=True) for row in rows]
        answers = SWE_SMITH.ask([_identify(row) | dict(tests) for row, tests in zip(rows, lists, strict=True)])
        self._profiles |= {task.id: answer for task, answer in zip(tasks, answers, strict=True)}
        placed = zip(super().attach_images(tasks), rows, strict=True)
        return [replace(task, checks=replace(task.checks, commands=(self._make_command(row),))) for task, row in placed]

    def make_images(self, row: Row) -> TaskImages | None:
        """Make images with the bug; the agent's lacks the tests that it breaks."""
        if self.workspace != "image":
            return None
        broken, _ = self._find_profile(row)["files"]  # test files with tests that the bug breaks, and others
        bug = {_BUG: encode_patch(row.text("patch"))}
        removal = [f"RUN rm -rf {' '.join(f'/testbed/{path}' for path in broken)}"] if broken else []
        image, patch = self.format_image_name(row), f"PATCH {_BUG}"
        return TaskImages(derive_image(image, *removal, patch, files=bug), derive_image(image, patch, files=bug))

    def _make_command(self, row: Row) -> Command:
        profile = self._find_profile(row)
        broken, passing_files = profile["files"]
        script = _SCRIPT.replace("COMMAND", profile["command"])
        script = script.replace("FILES", " ".join(dict.fromkeys([*broken, *passing_files])) or ".")
        return Command(("bash", "-c", script), float(profile["seconds"]), f"swe_smith:{json.dumps(_identify(row))}")

    def _find_profile(self, row: Row) -> dict[str, Any]:
        return self._profiles[row.text("instance_id")]


def _identify(row: Row) -> dict[str, str]:
    return {"instance_id": row.text("instance_id"), "repo": row.text("repo")}
