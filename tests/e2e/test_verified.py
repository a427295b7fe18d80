"""Before the first step a run asks its rewards about its references; what cannot be graded is not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coderepairrl import config as configs
from coderepairrl import stages
from coderepairrl.plan import plan_run
from coderepairrl.stages.command import verify_plan

from .conftest import Project

CALC = "def add(a, b):\n    return a - b\n"
REFERENCE = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TEST = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
UNITTEST = """import unittest

from calc import add


class Test(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
"""


@pytest.fixture
def tasked(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for a run on one task whose checks ask pytest."""
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "cache"))
    (project.path / "calc").mkdir()
    (project.path / "calc/calc.py").write_text(CALC)
    write(project, ["python3", "-m", "pytest", "-q"], TEST)
    return ["tasks.source=jsonl", "tasks.options.path=tasks.jsonl", "reward=tests", "run.steps=1", "eval.tasks=0"]


def write(project: Project, argv: list[str], test: str) -> None:
    checks = {"commands": [argv], "restore": {"test_calc.py": test}}
    task = {"id": "calc", "prompt": "add(2, 3) is -1.", "language": "python", "workspace": "dir:calc"}
    (project.path / "tasks.jsonl").write_text(json.dumps({**task, "reference": REFERENCE, "checks": checks}) + "\n")


def test_a_grader_that_cannot_run_stops_the_run_before_it_begins(
    project: Project, tasked: list[str], isolating: None
) -> None:
    """A perfect repair earned tests=0, and the run trained on it and ended with 0."""
    done = project.crrl("train", str(project.config), *tasked, check=False)
    assert done.returncode == 3, done.stderr
    assert "No module named pytest" in done.stderr
    assert "sandbox.options.binds" in done.stderr
    assert not project.run.path.exists()


async def test_what_is_verified_is_said_and_remembered(
    project: Project,
    tasked: list[str],
    isolating: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(project, ["python3", "-m", "unittest", "-q"], UNITTEST)
    monkeypatch.chdir(project.path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = configs.load_config(project.config, tasked)
    assert stages.preview_run(config)["verify"] == "tests on the reference patches of 1 task (tasks.verify)"
    for known in (0, 1):
        said = await verified(config)
        assert said[0] == "rewards checked before training: tests on the reference patches of 1 task (tasks.verify)"
        assert f"{known} of 1 from an earlier run" in said[1]
    off = stages.preview_run(configs.load_config(project.config, [*tasked, "tasks.verify=false"]))
    assert off["verify"] == "off: tasks.verify=false"


async def verified(config: configs.Config) -> list[str]:
    """What is said."""
    said: list[str] = []
    await verify_plan(plan_run(config), say=said.append, begin=lambda count: None, advance=lambda: None)
    return said
