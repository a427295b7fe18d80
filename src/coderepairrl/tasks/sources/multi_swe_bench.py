"""`multi_swe_bench`: Multi-SWE-bench (arXiv 2504.02605), issues in Java, TypeScript, JavaScript, Go, Rust, C and C++.

Follows ``multi-swe-bench/multi-swe-bench`` 1.1.2 (``harness/pull_request.py``, ``dataset.py``, ``image.py``,
``gen_report.py``). Never tested with the hub or a published image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from coderepairrl.tasks.benchmark import RepositoryBenchmark, TaskImages, Workspace, derive_image
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

TIMEOUT = 3600.0
"""Seconds for an instance's tests; upstream has no limit."""
# files of upstream's images that the agent must not see
_HIDDEN = " ".join(
    f"/home/{name}"
    for name in ("fix.patch", "test.patch", "fix-run.sh", "test-run.sh", "run.sh", "prepare.sh", "check_git_changes.sh")
)
# without a repair (an empty fix.patch) upstream runs another script
_RUN = """
if [ -s /home/fix.patch ] || [ ! -e /home/test-run.sh ]; then bash /home/fix-run.sh; else bash /home/test-run.sh; fi
"""
_HUB = {"bench": "ByteDance-Seed/Multi-SWE-bench", "rl": "ByteDance-Seed/Multi-SWE-RL"}


class MultiSweBench(RepositoryBenchmark):
    """Multi-SWE-bench: `name` is ``bench`` (1,632 issues), or ``rl``, similar issues for training.

    ``workspace=image`` hides the repair that upstream leaves in ``/home``. Other options: `swe_bench.SweBench`.
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
        folder: str = "/home/{repository}",
    ) -> None:
        super().__init__(path, hub=_HUB[name], split=split, revision=revision, workspace=workspace, clone=clone)
        self.folder = folder
        is_evaluation = name == "bench" and not for_training
        self.task_split = "test" if is_evaluation else "train"
        self.evaluation_set = "Multi-SWE-bench" if is_evaluation else ""

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        task = super().make_task(_convert_to_swe_bench(row))
        return replace(task, checks=_make_instance_checks(row)) if self._has_checks(row) else task

    def _has_checks(self, row: Row) -> bool:
        return self.workspace == "image" and "test_patch_result" in row

    def make_images(self, row: Row) -> TaskImages | None:
        """Build the agent's image without hidden files, and the checks' without the repair."""
        if not self._has_checks(row):
            return None
        image = self.format_image_name(_convert_to_swe_bench(row))
        workdir = f"WORKDIR {self.folder.format(repository=row.text('repo'))}"
        visible = derive_image(image, f"RUN rm -rf {_HIDDEN}", workdir)
        return TaskImages(visible, derive_image(image, "RUN rm -rf /home/fix.patch", workdir))

    def format_image_name(self, row: Row) -> str:
        """Published image's name."""
        owner, _, name = row.text("repo").lower().partition("/")
        return f"mswebench/{owner}_m_{name}:pr-{row.values['number']}"


def _convert_to_swe_bench(row: Row) -> Row:
    issues = [dict(each) for each in row.values.get("resolved_issues") or ()]
    statement = "\n\n".join(f"{each.get('title', '')}\n{each.get('body') or ''}".strip() for each in issues)
    columns = {
        "instance_id": f"{row.text('org')}__{row.text('repo')}-{row.values['number']}",
        "repo": f"{row.text('org')}/{row.text('repo')}",
        "base_commit": row.mapping("base").get("sha"),
        "patch": row.text("fix_patch"),
        "problem_statement": statement or f"{row.text_or_empty('title')}\n{row.text_or_empty('body')}".strip(),
    }
    return Row(row.benchmark, row.where, {**row.values, **columns})


def _make_instance_checks(row: Row) -> Checks:
    """Rules of ``gen_report.py``: repaired tests pass, and no passing test fails."""
    run, test = (_read_statuses(row.mapping(column)) for column in ("run_result", "test_patch_result"))
    columns = [f"{kind}_tests" for kind in ("p2p", "f2p", "s2p", "n2p")]
    passed, failed, skipped, new = (tuple(row.mapping(each)) if each in row else () for each in columns)
    repaired = failed + skipped + new
    if not repaired:
        raise row.make_error("no test that the repair makes pass (f2p_tests, s2p_tests, n2p_tests)")
    settings = {
        "org": row.text("org"),
        "repo": row.text("repo"),
        "tag": row.text_or_empty("tag"),
        "number_interval": row.text_or_empty("number_interval"),
        "pass": sorted({name for name, status in test.items() if status == "PASS"} - set(passed)),
        "fail": failed,
        "skip": skipped,
        "ran": sorted(name for name, status in run.items() if status == "PASS" and test.get(name, "SKIP") == "SKIP"),
    }
    command = Command(("bash", "-c", _RUN), TIMEOUT, f"multi_swe_bench:{json.dumps(settings)}")
    return Checks((command,), {}, repaired, passed)


def _read_statuses(result: Mapping[str, Any]) -> dict[str, str]:
    columns = {"PASS": "passed_tests", "FAIL": "failed_tests", "SKIP": "skipped_tests"}
    return {str(name): status for status, column in columns.items() for name in result.get(column) or ()}
