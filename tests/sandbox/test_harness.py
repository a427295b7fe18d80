"""SWE-bench's own harness for real: its code, a daemon of the test's own, and an image made of this machine's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from rewards.folder import Repository

from .images import import_image, root_file_system
from .test_container import docker  # noqa: F401

SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
cat > test_app.py <<'X'
from app import add
for name, ok in (("add", add(2, 3) == 5), ("zero", add(0, 0) == 0)):
    print(("PASSED" if ok else "FAILED") + " test_app.py::test_" + name)
X
: '>>>>> Start Test Output'
python3 test_app.py
: '>>>>> End Test Output'
rm test_app.py
"""
ROW = {
    "repo": "crrl/mini", "instance_id": "crrl__mini-1", "version": "1", "image": "crrl-test:swebench",
    "FAIL_TO_PASS": '["test_app.py::test_add"]', "PASS_TO_PASS": '["test_app.py::test_zero"]',
    "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", "eval_script": SCRIPT,
}  # fmt: skip
GOLD = "--- a/app.py\n+++ b/app.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
WRONG, ALIEN = GOLD.replace("a + b", "a * b"), GOLD.replace("a - b", "a / b")


@pytest.fixture
def image(docker: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    root = tmp_path / "root"
    root.mkdir()
    root_file_system(root)
    (root / "root").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    bed = root / "testbed"
    shutil.rmtree(bed)
    bed.mkdir()
    Repository(bed).commit({"app.py": "def add(a, b):\n    return a - b\n"})
    import_image(["docker", *docker["flags"]], root, str(ROW["image"]))
    monkeypatch.setenv("DOCKER_HOST", docker["flags"][1])
    return str(ROW["image"])


@pytest.mark.by_hand
def test_the_harness_itself_on_a_miniature_instance(image: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    gone = {**ROW, "instance_id": "crrl__gone-1", "image": "crrl-test:absent"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (ROW, gone)))
    patches = {"org/gold": GOLD, "wrong": WRONG, "alien": ALIEN, "empty": ""}
    predictions = [("crrl__mini-1", *each) for each in patches.items()] + [("crrl__gone-1", "wrong", GOLD)]
    made, fields = tmp_path / "predictions.jsonl", ("instance_id", "model_name_or_path", "model_patch")
    made.write_text("".join(json.dumps(dict(zip(fields, each, strict=True))) + "\n" for each in predictions))
    words = ["grade", str(made), str(rows), "--harness", "swebench", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, "the image of one is not there"
    found = {each["model"]: each for each in json.loads(done.stdout.splitlines()[-1])["models"]}
    assert {model: each["resolved"] for model, each in found.items()} == dict.fromkeys(patches, 0) | {"org/gold": 1}
    assert list(found["wrong"]["faults"]) == ["crrl__gone-1"]
    verdicts = [json.loads(line) for line in (tmp_path / "predictions.graded.jsonl").read_text().splitlines()]
    problems = {each["model_name_or_path"]: each["problem"] for each in verdicts}
    assert problems == {
        "org/gold": "",
        "wrong": "1 of its tests fail: test_app.py::test_add",
        "alien": "the patch does not apply, not even with fuzz",
        "empty": "empty patch",
    }
    again = CliRunner().invoke(app, [*words, "--resume", "--shard", "2/2"])
    assert again.exit_code == 0 and '"tasks": 1' in again.stdout
