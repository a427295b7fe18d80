"""Bugs in a package of one's own are judged by its single tests, not by the exit code of their runner."""

from __future__ import annotations

import difflib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.errors import TaskError
from coderepairrl.rewards import TestsReward, with_patch
from coderepairrl.tasks import JsonlSource, write_jsonl
from coderepairrl.tasks.mutants.source import MutantSource
from coderepairrl.types import Command, Task
from rewards.folder import Local

SOURCE = '''"""Prices."""


def cheap(prices, limit):
    return [price for price in prices if price < limit]


def total(prices, discount):
    return sum(prices) * (100 - discount) // 100
'''
CASES = """import unittest

from cart import cheap, total


class Cart(unittest.TestCase):
    def test_cheap(self):
        self.assertEqual(cheap([1, 5, 7], 5), [1])

    def test_total(self):
        self.assertEqual(total([100, 200], 10), 270)

    def test_nothing(self):
        self.assertEqual(len("a"), 1)
"""
RUNNERS = {
    "unittest": f"{sys.executable} -B -m unittest -q",
    "pytest": f"env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q -p no:cacheprovider",
}
CHEATS = {
    "ends the process when imported": "import os\nos._exit(0)\n",
    "ends it at exit": "import atexit, os\natexit.register(os._exit, 0)\n",
    "skips every test that imports it": "import unittest\nraise unittest.SkipTest('no')\n",
    "skips when called": "def cheap(*_):\n    import unittest\n    raise unittest.SkipTest('no')\n\ntotal = cheap\n",
}


def made(tmp_path: Path, kind: str, tests: str = CASES, n: int = 1) -> list[Task]:
    root = tmp_path / "package"
    root.mkdir()
    (root / "cart.py").write_text(SOURCE)
    (root / "test_cart.py").write_text(tests)
    options = {"n": n, "command": RUNNERS[kind], "timeout": 20.0, "sandbox": "unsafe-local"}
    return list(MutantSource(str(root), cache=str(tmp_path / "cache"), **options))  # type: ignore[arg-type]


def replaced(task: Task, content: str) -> bytes:
    """The diff that puts `content` in the place of the broken module."""
    old = (Path(task.workspace.removeprefix("dir:")) / "cart.py").read_text().splitlines(True)
    diff = "".join(difflib.unified_diff(old, content.splitlines(True), "a/cart.py", "b/cart.py"))
    return f"diff --git a/cart.py b/cart.py\n{diff}".encode()


@pytest.mark.parametrize("kind", RUNNERS)
async def test_ending_well_without_a_repair_earns_nothing(kind: str, tmp_path: Path) -> None:
    task = made(tmp_path, kind)[0]
    backend, reward = Local(), TestsReward()
    [command] = task.checks.commands
    assert command.results == kind
    assert (await reward(task, with_patch(task, task.reference), backend)).value == 1.0
    paid = []
    for name, content in CHEATS.items():
        patch = replaced(task, content)
        assert (await reward(task, with_patch(task, patch), backend)).value == 0.0, name
        async with backend.open(task) as fresh:
            assert (await fresh.exec(["git", "apply", "-"], stdin=patch)).ok
            paid.append((await fresh.exec(command.argv)).ok)
    assert sum(paid) >= 3, f"the cheats are cheats: {paid}"


@pytest.mark.parametrize("kind", RUNNERS)
async def test_by_its_exit_code_alone_no_runner_is_judged(kind: str, tmp_path: Path) -> None:
    """A task that does not say which tests count still asks for single tests."""
    task = made(tmp_path, kind)[0]
    [command] = task.checks.commands
    plain = replace(task.checks, commands=(replace(command, results=""),), fail_to_pass=(), pass_to_pass=())
    task = replace(task, checks=plain)
    backend, reward = Local(), TestsReward()
    assert (await reward(task, with_patch(task, task.reference), backend)).value == 1.0
    for name, content in CHEATS.items():
        assert (await reward(task, with_patch(task, replaced(task, content)), backend)).value == 0.0, name


def test_names_that_change_from_run_to_run_are_not_asked_for(tmp_path: Path) -> None:
    tests = f"""import pytest, uuid
{CASES.partition("class")[0]}
@pytest.mark.parametrize("where", [uuid.uuid4().hex, "here"])
def test_total(where):
    assert total([100, 200], 10) == 270 and cheap([1, 5, 7], 5) == [1]
"""
    task = made(tmp_path, "pytest", tests)[0]
    assert task.checks.named == ("test_cart.py::test_total[here]",)


def test_a_command_that_runs_no_test_is_refused(tmp_path: Path) -> None:
    skipped = "import pytest\n\n\n@pytest.mark.skip\ndef test():\n    pass\n"
    with pytest.raises(TaskError, match="no test passed"):
        made(tmp_path, "pytest", skipped)


def test_commands_of_jsonl_are_known_by_their_words(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"id": "a", "prompt": "p", "language": "python", "workspace": "dir:repo", "checks": {"commands": ['
        '["python3", "-m", "pytest"], {"argv": ["pytest", "-x"], "results": "", "test_timeout": 5}, ["make", "test"]]}}'
    )
    [task] = JsonlSource(path)
    assert task.checks.commands == (
        Command(("python3", "-m", "pytest"), results="pytest"),
        Command(("pytest", "-x"), test_timeout=5.0),
        Command(("make", "test")),
    )
    write_jsonl([task], tmp_path / "again.jsonl")
    assert list(JsonlSource(tmp_path / "again.jsonl")) == [task]
