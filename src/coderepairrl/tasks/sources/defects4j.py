"""`defects4j`: bugs of 17 Java projects with minimal repairs (``rjust/defects4j``)."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from coderepairrl.grading.harness import RAN
from coderepairrl.processes.caches import user_cache
from coderepairrl.tasks.benchmark import Benchmark, encode_patch, pin_image_workspace
from coderepairrl.tasks.patches import reverse_patch
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

TIMEOUT = 3600.0  # seconds
_SCRIPT = """
rm -f failing_tests
PROGRAM compile && PROGRAM test && echo 'RAN' && cat failing_tests
"""


class Defects4J(Benchmark):
    """Defects4J 3.0.1: 854 bugs, and 10 deprecated ones unless `active` (options: docs/guides/benchmarks.md).

    Checks need `program` or `image`. Like upstream's, workspaces have the repair's tests, so agents see them.
    """

    name = "defects4j"

    def __init__(
        self,
        path: str = "",
        *,
        active: bool = False,
        checkouts: str = "",
        program: str = "",
        image: str = "",
        split: str = "test",
    ) -> None:
        super().__init__(path, split=split)
        self.program, self.image = program or ("defects4j" if image else ""), image
        self.active = active
        self.checkouts = checkouts

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        project, bug = row.text("project"), row.values["bug_id"]
        root = Path(self.checkouts).expanduser() if self.checkouts else user_cache() / "defects4j"
        failing = [f"{each['test']}: {each.get('error') or 'fails'}" for each in row.values.get("trigger_tests", ())]
        return Task(
            id=row.text("instance_id"),
            prompt=f"A bug in {project} makes tests fail:\n\n" + "\n".join(failing) + "\n",
            language="java",
            workspace=pin_image_workspace(self.image.format(project=project, bug=bug))
            if self.image
            else f"dir:{(root / f'{project}-{bug}b').absolute()}",
            checks=self._make_checks(row),
            reference=encode_patch(row.text("patch")),
            split=self.split,
            repository=project,
        )

    def _make_checks(self, row: Row) -> Checks:
        if not self.program:
            return Checks()
        script = _SCRIPT.replace("PROGRAM", shlex.quote(self.program)).replace("RAN", RAN)
        tests = tuple(str(each["test"]) for each in row.values.get("trigger_tests", ()))
        if not tests:
            raise row.make_error("no column 'trigger_tests'")
        return Checks((Command(("bash", "-c", script), TIMEOUT, "defects4j:"),), fail_to_pass=tests)

    def _read_rows(self) -> list[Row]:
        rows = self._read_checkout("framework/projects", _read_defects4j_rows)
        return [row for row in rows if not self.active or row.text_or_empty("status") in ("", "active")]


def _read_defects4j_rows(root: Path) -> Iterator[Row]:
    projects = (root / "framework/projects").iterdir()
    for folder in sorted(path for path in projects if (path / "active-bugs.csv").is_file()):
        for status in ("active", "deprecated"):
            table = folder / f"{status}-bugs.csv"
            if not table.is_file():
                continue
            with table.open(encoding="utf-8", newline="") as lines:
                for line in csv.DictReader(lines):
                    bug = int(line["bug.id"])
                    patch = folder / "patches" / f"{bug}.src.patch"
                    if patch.is_file():
                        values = _read_defect_values(folder, bug, status, patch, line)
                        yield Row("defects4j", f"{folder.name}-{bug}", values)


def _read_defect_values(folder: Path, bug: int, status: str, patch: Path, line: dict[str, str]) -> dict[str, Any]:
    trigger = folder / "trigger_tests" / str(bug)
    text = trigger.read_bytes().decode("utf-8", "surrogateescape") if trigger.is_file() else ""
    tests = [part.split("\n") for part in text.split("--- ")[1:]]  # "--- CLASS::METHOD", then the error
    return {
        "instance_id": f"defects4j__{folder.name}-{bug}",
        "project": folder.name,
        "bug_id": bug,
        "status": status,
        "report_url": line.get("report.url", ""),
        # upstream's patches add the bug
        "patch": reverse_patch(patch.read_bytes().decode("utf-8", "surrogateescape")),
        "trigger_tests": [{"test": lines[0].strip(), "error": _cut_stack_trace(lines[1:])} for lines in tests],
    }


def _cut_stack_trace(lines: list[str]) -> str:
    return "\n".join(takewhile(lambda line: not line.startswith("\tat "), lines)).strip()
