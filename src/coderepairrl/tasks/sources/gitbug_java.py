"""`gitbug_java`: 199 recent bugs of 55 Java repositories (``gitbugactions/gitbug-java``, arXiv 2402.02961)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coderepairrl.tasks.benchmark import Repositories
from coderepairrl.tasks.rows import Row


class GitBugJava(Repositories):
    """GitBug-Java: the commit before the repair, without the tests that come with it.

    `path` is a checkout, or a file of rows (``repo``, ``base_commit``, ``patch``). A prompt is the linked issue, or the
    commit's message where there is none. `clone` is that of `benchmark.Repositories`.
    """

    name = "gitbug_java"

    def __init__(self, path: str = "", *, clone: str = "", split: str = "test") -> None:
        super().__init__(path, split=split, workspace="git", clone=clone)

    def _read(self) -> list[Row]:
        bugs = self.path / "data" / "bugs" if self.path is not None else None
        return list(_checkout(bugs)) if bugs is not None and bugs.is_dir() else super()._read()


def _checkout(bugs: Path) -> Iterator[Row]:
    for path in sorted(bugs.glob("*.json")):
        for line in path.read_text("utf-8").split("\n"):
            if line.strip():
                bug = json.loads(line)
                yield Row("gitbug_java", f"{path.stem}, {bug['commit_hash'][:12]}", _values(bug))


def _values(bug: Mapping[str, Any]) -> dict[str, Any]:
    """Tests that failed before the repair, with the new tests in place, and passed after it; those that passed both."""
    before, after = (_passed(bug["actions_runs"][at]) for at in (1, 2))
    passing = [name for name, good in after.items() if good]
    issues = [f"{each['title']}\n{each.get('body') or ''}".strip() for each in bug.get("issues", ())]
    return {
        "instance_id": f"gitbug-java__{bug['repository'].replace('/', '-')}-{bug['commit_hash'][:12]}",
        "repo": bug["repository"],
        "base_commit": bug["previous_commit_hash"],
        "created_at": bug["commit_timestamp"],
        "problem_statement": "\n\n".join(issues) or bug["commit_message"],
        "patch": bug["bug_patch"],
        "test_patch": bug["test_patch"],
        "FAIL_TO_PASS": [name for name in passing if not before.get(name, False)],
        "PASS_TO_PASS": [name for name in passing if before.get(name, False)],
    }


def _passed(runs: Any) -> dict[str, bool]:
    tests = [test for run in runs or () for test in run["tests"]]
    return {f"{t['classname']}::{t['name']}": all(r["result"] == "Passed" for r in t["results"]) for t in tests}
