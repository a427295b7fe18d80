"""`swe_bench`: issues of public repositories with their pull requests (arXiv 2310.06770).

Reads tables of the hub and of ``SWE-bench/SWE-bench`` (``data/`` of 2026).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import Literal

from coderepairrl.errors import ConfigError
from coderepairrl.tasks.benchmark import RepositoryBenchmark
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.sources import swe_bench_native
from coderepairrl.types import Task

_log = logging.getLogger(__name__)
Name = Literal["verified", "lite", "multilingual", "full"]


_SETS = {
    "verified": ("SWE-bench/SWE-bench_Verified", "SWE-bench Verified"),
    "lite": ("SWE-bench/SWE-bench_Lite", "SWE-bench Lite"),
    "multilingual": ("SWE-bench/SWE-bench_Multilingual", ""),
    "full": ("SWE-bench/SWE-bench", "SWE-bench, which holds Verified and Lite,"),
}
"""Data sets of the hub, and the names of evaluation sets, by option `name`."""
_PYTHON_REPOSITORIES = frozenset(
    [
        "astropy/astropy",
        "django/django",
        "matplotlib/matplotlib",
        "mwaskom/seaborn",
        "pallets/flask",
        "psf/requests",
        "pydata/xarray",
        "pylint-dev/pylint",
        "pytest-dev/pytest",
        "scikit-learn/scikit-learn",
        "sphinx-doc/sphinx",
        "sympy/sympy",
    ]
)
"""Repositories of the evaluation sets, whose rows ``name=multilingual`` must not turn into training data."""
_EFFORT = {"<15 min fix": 1.0, "15 min - 1 hour": 2.0, "1-4 hours": 3.0, ">4 hours": 4.0}


NATIVE = frozenset((resources.files(__package__) / "swe_bench_native.txt").read_text().split())
"""Valid instances in native environments: the reference resolves them, the untouched repository does not."""


class SweBench(RepositoryBenchmark):
    """SWE-bench: `name` is ``verified`` (500), ``lite`` (300), ``multilingual`` (300) or ``full`` (2,294).

    Options: docs/guides/benchmarks.md. `images` names other images, with ``{instance}`` for the id and ``{key}`` for
    the harness's form. Without `for_training`, runs refuse to train on Verified, Lite and the full test split.
    """

    name = "swe_bench"

    def __init__(
        self,
        name: Name = "verified",
        *,
        path: str = "",
        split: str = "test",
        revision: str = "",
        workspace: Literal["git", "image", "native"] = "git",
        all_native: bool = False,
        newest: bool = False,
        clone: str = "",
        images: str = "",
        for_training: bool = False,
    ) -> None:
        hub, evaluation_set = _SETS[name]
        super().__init__(path, hub=hub, split=split, revision=revision, workspace=workspace, clone=clone)
        if newest and not self.native:
            raise ConfigError("newest=true needs an environment built here", fix="add workspace=native")
        self.variant, self.images, self.all_native, self.newest = name, images, all_native, newest
        self.task_split = "train" if for_training else split
        self.evaluation_set = "" if for_training or split != "test" else evaluation_set

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        task = super().make_task(row)
        if self.variant == "multilingual" and task.repository in _PYTHON_REPOSITORIES:
            raise row.make_error(f"{task.repository} is not in SWE-bench Multilingual: name=verified, lite or full")
        effort = row.text_or_empty("difficulty")
        if effort and effort not in _EFFORT:
            raise row.make_error(f"column 'difficulty' is none of {', '.join(_EFFORT)}: {effort!r}")
        task = replace(task, difficulty=_EFFORT.get(effort))
        if self.workspace == "image":
            return replace(task, checks=swe_bench_native.make_native_checks(row, image=True))
        if not self.native:
            return task
        environment = swe_bench_native.specify_instance_environment(row, self.clone, newest=self.newest)
        return replace(task, environment=environment, checks=swe_bench_native.make_native_checks(row, image=False))

    def _read_rows(self) -> list[Row]:
        rows = super()._read_rows()
        if self.workspace == "git":
            return rows
        if self.native and not self.all_native:
            return [row for row in rows if row.text("instance_id") in NATIVE]
        reason = "the benchmark specifies no environment for them (workspace=image has them)"
        rows = _leave_out(rows, swe_bench_native.is_specified, reason) if self.native else rows
        return _leave_out(rows, _needs_repair, "none of their tests fails before the repair")

    def format_image_name(self, row: Row) -> str:
        """Image of `images`, the row, or the harness (``swebench`` 4.1.0, ``TestSpec.instance_image_key``)."""
        instance = row.text("instance_id")
        key = instance.lower().replace("__", "_1776_")
        if self.images:
            return self.images.replace("{key}", key).replace("{instance}", instance)
        if "image" in row:
            return row.text("image")
        return f"swebench/sweb.eval.x86_64.{key}:latest"


def _needs_repair(row: Row) -> bool:
    return "FAIL_TO_PASS" not in row or bool(row.names("FAIL_TO_PASS"))


def _leave_out(rows: list[Row], is_usable: Callable[[Row], bool], reason: str) -> list[Row]:
    usable = {row.text("instance_id"): is_usable(row) for row in rows}
    if left_out := [instance for instance, is_kept in usable.items() if not is_kept]:
        _log.warning("left out, since %s: %s", reason, ", ".join(left_out))
    return [row for row in rows if usable[row.text("instance_id")]]
