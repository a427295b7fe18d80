"""Rows with the columns that benchmarks publish, of a repository ``o/toy``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROW = {
    "instance_id": "o__toy-7",
    "repo": "o/toy",
    "base_commit": "5" * 40,
    "test_patch": "",
    "problem_statement": "It is broken.",
}


def make_multi_row(patch: str) -> dict[str, Any]:
    """Make a row of Multi-SWE-bench, which has other columns."""
    return {
        "org": "o",
        "repo": "toy",
        "number": 7,
        "base": {"label": "", "ref": "", "sha": "5" * 40},
        "resolved_issues": [{"number": 1, "title": "Broken", "body": None}],
        "fix_patch": patch,
        "test_patch": "",
    }


def make_r2e_row(image: str, old: str, new: str, *files: str, at: int = 1, commit: str = "6" * 40) -> dict[str, Any]:
    """Make a row of R2E-Gym whose commit replaces line `at`, which is `old`, in each of `files`."""
    lines = {"all_lines": [{"content": old, "type": "deleted"}, {"content": new, "type": "added"}]}
    ends = {key: {"start": at, "length": None} for key in ("old_range", "new_range")}
    diffs = [
        {
            "header": {"file": {"path": path}},
            "minus_file": {"path": f"a/{path}"},
            "plus_file": {"path": f"b/{path}"},
            "hunks": [{"descriptor": {**ends, "section": ""}, "line_group": lines}],
        }
        for path in files
    ]
    made = {"new_commit_hash": commit, "commit_date": "2020-01-02T03:04:05+00:00", "file_diffs": diffs}
    about = {"repo_name": "toy", "docker_image": image, "problem_statement": "Look: [ISSUE]It is broken.[/ISSUE]"}
    return about | {"parsed_commit_content": json.dumps(made)}


def write_rows(path: Path, *rows: Any) -> str:
    """Write a file of `rows`; return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
