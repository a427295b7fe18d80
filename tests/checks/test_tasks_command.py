"""`crrl tasks` and `crrl check ... KEY=VALUE`, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coderepairrl import tasks
from commands import CRRL

Crrl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def crrl(tmp_path: Path) -> Crrl:
    environment = {**os.environ, "CRRL_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"}

    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [*CRRL, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


PACKAGE = {
    "ranges.py": "def clamp(value, low, high):\n    if value < low:\n        return low\n    if value > high:\n"
    "        return high\n    return value\n\n\ndef span(values):\n    return max(values) - min(values)\n",
    "test_ranges.py": "import unittest\n\nfrom ranges import clamp, span\n\n\nclass Ranges(unittest.TestCase):\n"
    "    def test_clamp(self):\n        self.assertEqual([clamp(x, 2, 4) for x in range(6)], [2, 2, 2, 3, 4, 4])\n\n"
    "    def test_span(self):\n        self.assertEqual(span([3, 9, 5]), 6)\n",
}


def test_bugs_in_a_package_survive_export_and_verification(crrl: Crrl, tmp_path: Path, isolating: None) -> None:
    package = tmp_path / "ranges"
    package.mkdir()
    for name, text in PACKAGE.items():
        (package / name).write_text(text)
    options = [f"path={package}", "n=4", "command=python3 -m unittest -q"]
    assert crrl("tasks", "prepare", "mutants", *options).stdout == "3 train, 1 test\n"
    listed = crrl("tasks", "list", "mutants", *options).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["train", "train", "train", "test"]
    assert crrl("tasks", "export", "mutants", "bugs.jsonl", *options).stdout == "bugs.jsonl: 4 tasks\n"
    assert len(list((tmp_path / "cache").glob("mutants/bugs/*.json"))) == 1, "the tests ran for the first command only"
    verdicts = json.loads(crrl("tasks", "verify", "jsonl", "path=bugs.jsonl", "--json").stdout)
    assert [verdict["task"] for verdict in verdicts[1:]] == [
        task.id for task in tasks.JsonlSource(tmp_path / "bugs.jsonl")
    ]
    assert all(verdict["ok"] for verdict in verdicts)
    asked = {check["name"] for check in verdicts[1]["checks"]}
    assert {
        "the checks fail on the bug",
        "the checks pass on the reference",
        "a blank line earns 0 by patch_edits",
    } <= asked
    assert "already exists" in crrl("tasks", "export", "mutants", "bugs.jsonl", *options, code=2).stderr


OWN = """
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.tasks import HandmadeSource
from coderepairrl.sandbox.fake import ScriptedBackend

class Source(HandmadeSource):
    name = "mine"

class Box(SandboxBackend):
    name = "mine"
    def open(self, task):
        raise RuntimeError("not today")

class Constant(Reward):
    name = "constant"
    async def __call__(self, task, episode, sandbox): ...
"""


def test_classes_of_the_current_folder_are_found_by_the_installed_script(tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(OWN)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def crrl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("crrl")), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    done = crrl("tasks", "list", "my_parts:Source", "split=test")
    assert (done.returncode, done.stderr) == (0, "") and "handmade/" in done.stdout
    done = crrl("tasks", "list", "my_part:Source")
    assert (
        done.returncode == 2 and "no module my_part" in done.stderr and "in the folder that contains it" in done.stderr
    )
    done = crrl("tasks", "verify", "handmade", "--limit", "1", "--sandbox", "my_parts:Box")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the sandbox my_parts:Box.open raised RuntimeError: not today" in done.stderr
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the folder of a repository')\n")
    assert crrl("tasks", "list", "my_parts:Source").returncode == 0


def test_a_task_that_lies_is_found(crrl: Crrl, tmp_path: Path, isolating: None) -> None:
    crrl("tasks", "export", "handmade", "tasks.jsonl", "split=test")
    first, second = map(json.loads, (tmp_path / "tasks.jsonl").read_text().splitlines())
    first["checks"] = {"commands": [["true"]]}
    second["reference"] = second["reference"].replace("\n-", "\n-never was ")
    (tmp_path / "lies.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    table = crrl("tasks", "verify", "jsonl", "path=lies.jsonl", code=1).stdout
    assert "the checks fail on the bug: no (all passed)" in table
    assert "the reference applies: no" in table
    assert table.endswith("2 tasks, 2 failed\n")
    assert crrl("tasks", "verify", "jsonl", "path=lies.jsonl", "--limit", "1", code=1).stdout.endswith(
        "1 task, 1 failed\n"
    )
    first["checks"] = {"commands": [["python3", "-m", "not_in_a_sandbox"]]}
    (tmp_path / "lacks.jsonl").write_text(json.dumps(first))
    done = crrl("tasks", "verify", "jsonl", "path=lacks.jsonl", code=3)
    assert "No module named not_in_a_sandbox" in done.stdout
    assert "sandbox.options.binds" in done.stdout.splitlines()[-1]
    assert done.stderr == ""


def test_broken_tasks_are_quarantined_with_the_reason(crrl: Crrl, tmp_path: Path, isolating: None) -> None:
    """One task is sound; the others have a reference that does not apply, checks that never fail, and no commit."""
    crrl("tasks", "export", "handmade", "handmade.jsonl", "split=test", "select.n=1")
    sound = {**json.loads((tmp_path / "handmade.jsonl").read_text()), "id": "sound"}
    rows = [
        sound,
        {**sound, "id": "broken", "reference": sound["reference"].replace("\n ", "\n never was ")},
        {**sound, "id": "gone", "workspace": f"git:{tmp_path}/nowhere@{'1' * 40}"},
        {**sound, "id": "wrong check", "checks": {"commands": [["true"]]}},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = crrl("tasks", "list", "jsonl", "path=tasks.jsonl")
    assert listed.stdout.splitlines()[2].rpartition("  ")[2].strip() == "lacks commit"
    assert "1 of 4 tasks not ready" in listed.stderr
    done = crrl("tasks", "verify", "jsonl", "path=tasks.jsonl", "--repeat", "2", "--quarantine", "apart.jsonl", code=1)
    assert "apart.jsonl: 3 tasks" in done.stderr
    reasons = {row["id"]: row["reason"] for row in map(json.loads, (tmp_path / "apart.jsonl").read_text().splitlines())}
    assert reasons.keys() == {"broken", "gone", "wrong check"}
    assert "the reference applies" in reasons["broken"] and "can be opened" in reasons["gone"]
    assert "the checks fail on the bug" in reasons["wrong check"]
    options = ("jsonl", "path=tasks.jsonl", "select.quarantine=apart.jsonl")
    left = json.loads(crrl("tasks", "list", *options, "--json").stdout)
    assert [(task["id"], task["lacks"]) for task in left] == [("sound", [])]
    assert crrl("tasks", "verify", *options).stdout.endswith("1 task, 0 failed\n")
    assert "already exists" in crrl("tasks", "verify", *options, "--quarantine", "apart.jsonl", code=2).stderr
    (tmp_path / "apart.jsonl").write_text("{}")
    assert "is not a quarantine file" in crrl("tasks", "list", *options, code=2).stderr
