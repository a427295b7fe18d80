"""`swe_smith`: bugs injected into public Python repositories (SWE-smith, arXiv 2504.21798), to train on.

Columns from its public code (``SWE-bench/SWE-smith``, ``swesmith/harness/gather.py``). Not run against the hub.
"""

from __future__ import annotations

from dataclasses import replace

from coderepairrl.tasks.benchmark import Repositories, patch_bytes
from coderepairrl.tasks.patches import language, turned_round
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Task


class SweSmith(Repositories):
    """SWE-smith. A row's patch makes the bug, so the reference is that patch turned round.

    A task is a commit of the mirror that the row names (``swesmith/OWNER__NAME.COMMIT``), in which the bug is. Its
    image (``image_name`` in the row) has the repository without the bug: an environment, and no workspace. A row
    without an issue text has the tests that fail for a prompt. `path`, `revision` and `clone` are as for `swe_gym`.
    """

    name = "swe_smith"

    def __init__(self, path: str = "", *, split: str = "train", revision: str = "", clone: str = "") -> None:
        hub = "SWE-bench/SWE-smith"
        super().__init__(path, hub=hub, split=split, revision=revision, workspace="git", clone=clone)

    def task(self, row: Row) -> Task:
        """The task of a row."""
        failing = "\n".join(row.names("FAIL_TO_PASS"))
        prompt = row.maybe("problem_statement").strip() or f"A bug makes these tests fail:\n\n{failing}\n"
        reference = patch_bytes(turned_round(row.text("patch")))
        made = super().task(Row(row.benchmark, row.where, {**row.values, "problem_statement": prompt}))
        return replace(made, reference=reference, language=language(reference))
