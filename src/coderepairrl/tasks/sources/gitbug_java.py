"""`gitbug_java`: 199 recent bugs of 55 Java repositories (``gitbugactions/gitbug-java``, arXiv 2402.02961)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coderepairrl.tasks.benchmark import RepositoryBenchmark, pin_image_workspace, prepend_tests
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

TIMEOUT = 3600.0  # seconds
# offline test commands by build tool
_COMMANDS = {"maven": "mvn -B -o test", "gradle": "./gradlew --offline test"}
# runs COMMAND and copies its reports to the folder $0; cp renames an older report of the same name to x.xml.~1~, to
# which the last line appends .xml
_RUN = """
find . -path '*/target/surefire-reports/*.xml' -delete ; find . -path '*/build/test-results/*.xml' -delete
COMMAND
mkdir "$0" && find . '(' -path '*/target/surefire-reports/*.xml' -o -path '*/build/test-results/*.xml' ')' -print0 |
  xargs -0 -r cp --backup=numbered -t "$0"
cd "$0" && for each in *~; do [ ! -e "$each" ] || mv "$each" "$each.xml"; done
"""


class GitBugJava(RepositoryBenchmark):
    """GitBug-Java: the commit before the repair, without its tests (options: docs/guides/benchmarks.md).

    `path` is a checkout, or a file of rows. Upstream runs workflows with ``act`` in Docker, which no sandbox here runs.
    Checks need `command` or `image`. Never tested with an upstream environment.
    """

    name = "gitbug_java"

    def __init__(
        self, path: str = "", *, clone: str = "", image: str = "", command: str = "", split: str = "test"
    ) -> None:
        super().__init__(path, split=split, workspace="git", clone=clone)
        self.image_name, self.command = image, command

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        task = super().make_task(row)
        if self.image_name:
            bug = row.text_or_empty("bid") or row.text("instance_id").removeprefix("gitbug-java__")
            task = replace(task, workspace=pin_image_workspace(self.image_name.format(id=bug)))
        return replace(task, checks=self._make_checks(row)) if self.image_name or self.command else task

    def _make_checks(self, row: Row) -> Checks:
        tool = row.text_or_empty("build_tool") or "maven"
        if not self.command and tool not in _COMMANDS:
            raise row.make_error(f"no command is known for the tests of {tool}: give one (command=)")
        run = _RUN.replace("COMMAND", self.command or _COMMANDS[tool])
        script, restore = prepend_tests(run, row.text_or_empty("non_code_patch"), row.text_or_empty("test_patch"))
        fail, passing = row.tests()
        executed = row.values.get("executed", len(fail) + len(passing))
        command = Command(("bash", "-c", script, "{results}"), TIMEOUT, f"gitbug_java:{executed}")
        return Checks((command,), restore, fail, passing)

    def _read_rows(self) -> list[Row]:
        return self._read_checkout("data/bugs", _read_gitbug_rows)


def _read_gitbug_rows(root: Path) -> Iterator[Row]:
    for path in sorted((root / "data/bugs").glob("*.json")):
        for line in path.read_text("utf-8").split("\n"):
            if line.strip():
                bug = json.loads(line)
                yield Row("gitbug_java", f"{path.stem}, {bug['commit_hash'][:12]}", _make_gitbug_values(bug))


def _make_gitbug_values(bug: Mapping[str, Any]) -> dict[str, Any]:
    _, with_tests, with_repair = bug["actions_runs"][:3]  # workflow runs; the first is of the previous commit
    before, after = _read_passed(with_tests), _read_passed(with_repair)
    repaired = with_repair[0]
    passing = [name for name, has_passed in after.items() if has_passed]
    issues = [f"{each['title']}\n{each.get('body') or ''}".strip() for each in bug.get("issues", ())]
    return {
        "instance_id": f"gitbug-java__{bug['repository'].replace('/', '-')}-{bug['commit_hash'][:12]}",
        "repo": bug["repository"],
        "base_commit": bug["previous_commit_hash"],
        "created_at": bug["commit_timestamp"],
        "problem_statement": "\n\n".join(issues) or bug["commit_message"],
        "patch": bug["bug_patch"],
        "test_patch": bug["test_patch"],
        "non_code_patch": bug.get("non_code_patch") or "",
        "build_tool": repaired.get("build_tool") or "",
        "executed": sum(test["results"][0]["result"] != "Skipped" for test in repaired["tests"]),
        "FAIL_TO_PASS": [name for name in passing if not before.get(name, False)],
        "PASS_TO_PASS": [name for name in passing if before.get(name, False)],
    }


def _read_passed(runs: Any) -> dict[str, bool]:
    """Whether each test of workflow `runs` passed, by name."""
    tests = [test for run in runs or () for test in run["tests"]]
    return {
        f"{test['classname']}::{test['name']}": all(result["result"] == "Passed" for result in test["results"])
        for test in tests
    }
