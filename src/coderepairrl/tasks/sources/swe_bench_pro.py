"""`swe_bench_pro`: SWE-bench Pro (arXiv 2509.16941), longer issues of 11 public repositories.

Follows ``scaleapi/SWE-bench_Pro-os`` (``swe_bench_pro_eval.py``, ``helper_code``). Never tested with the hub or a
published image.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coderepairrl.errors import TaskError
from coderepairrl.tasks.benchmark import RepositoryBenchmark, Workspace, prepend_tests
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

TIMEOUT = 3600.0
"""Upstream's limit on an instance, in seconds."""
# $1: test files; $0: the file of results
_RUN = """
bash "$d/run_script.sh" "$1" >"$d/stdout.log" 2>"$d/stderr.log"
python "$d/parser.py" "$d/stdout.log" "$d/stderr.log" "$0"
"""


class SweBenchPro(RepositoryBenchmark):
    """SWE-bench Pro, the public set; prompts have issue, requirements and new interfaces, as upstream.

    Checks need ``workspace=image`` and `scripts`, a checkout of upstream's repository. Images lack the repair commit,
    so ``test_patch`` makes the test files. Other options: `swe_bench.SweBench`.
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
        scripts: str = "",
    ) -> None:
        hub = "ScaleAI/SWE-bench_Pro"
        super().__init__(path, hub=hub, split=split, revision=revision, workspace=workspace, clone=clone)
        self.scripts = Path(scripts).expanduser() / "run_scripts" if scripts else None
        self.task_split = "train" if for_training else split
        self.evaluation_set = "" if for_training else "SWE-bench Pro"

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        parts = [row.text("problem_statement")]
        for title, column in (("Requirements", "requirements"), ("New interfaces introduced", "interface")):
            if text := row.text_or_empty(column).strip():
                parts.append(f"{title}:\n{text}")
        checks = self._make_checks(row, self.scripts) if self.scripts and self.workspace == "image" else Checks()
        return replace(super().make_task(row), prompt="\n\n".join(parts), checks=checks)

    def _make_checks(self, row: Row, scripts: Path) -> Checks:
        folder = scripts / row.text("instance_id")
        try:
            programs = {
                name: (folder / name).read_text("utf-8", "surrogateescape") for name in ("run_script.sh", "parser.py")
            }
        except OSError as error:
            raise TaskError(
                f"{self.name}: {error.filename}: {error.strerror}", fix="scripts=CHECKOUT of SWE-bench_Pro-os"
            ) from error
        script, restore = prepend_tests(_RUN, row.text("test_patch"), **programs)
        test_files = ",".join(row.names("selected_test_files_to_run"))
        command = Command(("bash", "-c", script, "{results}", test_files), TIMEOUT, "swe_bench_pro:")
        return Checks((command,), restore, *row.tests("fail_to_pass", "pass_to_pass"))

    def format_image_name(self, row: Row) -> str:
        """Published image."""
        return f"jefzda/sweap-images:{row.text('dockerhub_tag')}"
