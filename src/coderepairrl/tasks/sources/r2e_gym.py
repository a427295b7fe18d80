"""`r2e_gym`: R2E-Gym (arXiv 2504.07164), commits of 13 Python repositories with synthetic issue texts.

Follows ``R2E-Gym/R2E-Gym`` (``agenthub/runtime/docker.py``, ``commit_models/diff_classes.py``). Never tested with the
hub or a published image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from coderepairrl.tasks.benchmark import Benchmark, TaskImages, derive_image, encode_patch, pin_image_workspace
from coderepairrl.tasks.patches import detect_language
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

_HUB = {"full": "R2E-Gym/R2E-Gym-Full", "subset": "R2E-Gym/R2E-Gym-Subset", "lite": "R2E-Gym/R2E-Gym-Lite"}
_TEST_FOLDERS = {"tests", "Tests", "test", "Test"}
TIMEOUT = 300.0
"""Upstream's test limit in seconds."""
_COMMIT_DATA = (
    "syn_issue", "expected_test_output", "execution_result", "parsed_commit", "modified_files", "modified_entities",
)  # fmt: skip
_NAMES = ("r2e_tests", "run_tests.sh", *(f"{name}.json" for name in _COMMIT_DATA))
_HIDDEN = ("/r2e_tests", *(f"/testbed/{name}" for name in _NAMES))
"""Paths that upstream hides from agents: tests, and commit data in older images."""
_PATH = "/root/.venv/bin:/root/.local/bin:/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMPILED = "'(' -name __pycache__ -o -name '*.pyc' ')'"
_STEPS = (
    f"RUN --network=none find /testbed -path /testbed/.venv -prune -o {_COMPILED} -prune -exec rm -rf {{}} +"
    " && ln -sfT /testbed/.venv /root/.venv",
    f"RUN rm -rf {' '.join(_HIDDEN)}",
    f"ENV PATH={_PATH}",
)
"""Dockerfile steps for agents, as upstream; compiled files may stem from hidden tests or the repair."""
_LINE_SIGNS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
# the steps of upstream's container setup, without installations
_SCRIPT = f"""
[ -e /root/.venv ] || ln -s "$PWD/.venv" /root/.venv
find . /r2e_tests -name __pycache__ -prune -exec rm -rf {{}} + ; find . /r2e_tests -name '*.pyc' -delete
if [ -e /r2e_tests ]; then rm -rf /root/r2e_tests r2e_tests && mv /r2e_tests /root/ || exit 1; fi
[ ! -e /root/r2e_tests ] || ln -s /root/r2e_tests r2e_tests
mv run_tests.sh /root/run_tests.sh && PATH={_PATH} bash /root/run_tests.sh
"""


class R2EGym(Benchmark):
    """R2E-Gym: `name` is ``full``, ``subset`` or ``lite``.

    A workspace is the row's image without hidden tests. In the published image every test must end as on the repaired
    commit. As upstream, the reference omits tests and non-Python files.
    """

    name = "r2e_gym"

    def __init__(
        self,
        name: Literal["full", "subset", "lite"] = "subset",
        *,
        path: str = "",
        split: str = "train",
        revision: str = "",
    ) -> None:
        super().__init__(path, hub=_HUB[name], split=split, revision=revision)

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        commit = row.mapping("parsed_commit_content")
        diffs = [_format_file_patch(row, each) for each in commit.get("file_diffs", ()) if _changes_code(row, each)]
        reference = encode_patch("".join(diffs))
        statement = row.text("problem_statement")
        issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
        repository = row.text("repo_name")
        commit_row = Row(row.benchmark, row.where, commit)
        return Task(
            id=f"r2e__{repository}-{commit_row.text('new_commit_hash')[:12]}",
            prompt=(issue[1] if issue else statement).strip(),
            language=detect_language(reference, "python"),
            workspace=pin_image_workspace(row.text("docker_image")),
            reference=reference,
            checks=_make_r2e_checks(row),
            split=self.split,
            repository=repository,
            created=commit_row.day("commit_date"),
        )

    def make_images(self, row: Row) -> TaskImages:
        """Build the image for agents; checks run in the published one."""
        image = row.text("docker_image")
        return TaskImages(
            derive_image(image, *_STEPS), pin_image_workspace(image) if "expected_output_json" in row else ""
        )


def _make_r2e_checks(row: Row) -> Checks:
    if "expected_output_json" not in row:
        return Checks()
    expected = row.mapping("expected_output_json")
    if not expected:
        raise row.make_error("column 'expected_output_json' names no test")
    command = Command(("bash", "-c", _SCRIPT), TIMEOUT, f"r2e_gym:{json.dumps(expected)}")
    return Checks((command,))


def _changes_code(row: Row, diff: Mapping[str, Any]) -> bool:
    path = _read_changed_path(row, diff)
    *folders, name = path.split("/")
    is_test = name.startswith("test_") or name.endswith("_test.py") or bool(_TEST_FOLDERS & set(folders))
    return name.endswith(".py") and not is_test and not diff.get("is_binary_file")


def _read_changed_path(row: Row, diff: Mapping[str, Any]) -> str:
    try:
        return str(diff["header"]["file"]["path"])
    except (KeyError, TypeError):
        raise row.make_error("a file of 'parsed_commit_content' has no header.file.path") from None


def _format_file_patch(row: Row, diff: Mapping[str, Any]) -> str:
    path = _read_changed_path(row, diff)
    old_path = (diff.get("minus_file") or {}).get("path", f"a/{path}")
    new_path = (diff.get("plus_file") or {}).get("path", f"b/{path}")
    out = [f"diff --git a/{path} b/{path}"]
    if misc := diff["header"].get("misc_line"):
        out.append(misc)
    out += [f"--- {old_path}", f"+++ {new_path}"]
    for hunk in diff.get("hunks", ()):
        header = hunk["descriptor"]
        old, new = (_format_range(header[side]) for side in ("old_range", "new_range"))
        section = header.get("section") or ""
        out.append(f"@@ -{old} +{new} @@{' ' if section else ''}{section}")
        out += [f"{_LINE_SIGNS[line['type']]}{line['content']}" for line in hunk["line_group"]["all_lines"]]
    return "\n".join(out) + "\n"


def _format_range(part: Mapping[str, Any]) -> str:
    return str(part["start"]) if part.get("length") is None else f"{part['start']},{part['length']}"
