"""Checks in a real repository: named tests, files that steer pytest, flaky tests, and lists of tests that lie."""

from __future__ import annotations

import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.checks.task_source import study_task, verify_tasks
from coderepairrl.grading import Outcome, judge_sandbox
from coderepairrl.grading.steering import list_excluded_patterns
from coderepairrl.tasks import JsonlSource, ScriptedSource, write_jsonl
from coderepairrl.types import Checks, Command, Task
from grading.cheats import REPAIRED, SOURCE
from rewards.folder import Local, Repository, grade_in_sandbox

PASSED, SKIPPED, FAILED = Outcome
PYTEST = """import pytest
from limits import clamp


@pytest.mark.parametrize("n", [-1, 5, 10], ids=["low", "in side", "high"])
def test_clamp(n):
    assert clamp(n, 0, 9) == sorted([0, n, 9])[1]


@pytest.mark.xfail
def test_types():
    clamp(None, 0, 9)


@pytest.mark.skip
def test_later():
    pass


def test_broken():
    assert False
"""
UNITTEST = '''import unittest
from limits import clamp


class Clamp(unittest.TestCase):
    def test_high(self):
        self.assertEqual(clamp(10, 0, 9), 9)

    def test_low(self):
        """It is the lower limit."""
        self.assertEqual(clamp(-1, 0, 9), 0)

    def test_broken(self):
        self.fail()
'''
PYTHON = sys.executable
RUNNER = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", PYTHON, "-m", "pytest", "-q")
"""Without the plugins of this project's own tests, which take longer to load than the tests take."""
UNIT = (PYTHON, "-B", "-m", "unittest")
NAMES = "test_limits.py::test_clamp[{}]"


def make_task(repository: Repository, kind: str) -> Task:
    """The task whose tests `kind` runs; its bug is in the upper limit."""
    cut = NAMES.format("in")[:-1]  # as published lists cut it
    tests, argv, high, low = {
        "pytest": ({"test_limits.py": PYTEST}, RUNNER, NAMES.format("high"), cut),
        "unittest": ({"test_limits.py": UNITTEST}, UNIT, "test_high (test_limits.Clamp)", "test_limits.Clamp.test_low"),
    }[kind]
    checks = Checks((Command(argv, 60.0, kind),), tests, (high,), (low,))
    files = {"limits.py": SOURCE, "conftest.py": "", "setup.cfg": "[metadata]\n"}
    return repository.task(files, {"limits.py": REPAIRED}, checks)


def change_command(task: Task, **changes: Any) -> Task:
    [command] = task.checks.commands
    return replace(task, checks=replace(task.checks, commands=(replace(command, **changes),)))


async def test_a_script_may_print_after_its_last_line(repository: Repository, backend: Local) -> None:
    """From threads, and from functions that run at exit."""
    speaks = """
import atexit, sys, threading, time
atexit.register(print, "bye")
class Late:
    def __del__(self): raise ValueError("late")
kept = Late()
threading.Thread(target=lambda: (time.sleep(0.1), print("still here"))).start()
"""
    check = "from limits import clamp\nassert clamp(10, 0, 9) == 9\n"
    checks = Checks((Command((PYTHON, "check.py"), 60.0),))
    task = repository.task({"limits.py": SOURCE, "check.py": check}, {"limits.py": REPAIRED + speaks}, checks)
    assert (await grade_in_sandbox(task, task.reference, backend)).problem == ""
    broken = await grade_in_sandbox(task, repository.edit({"limits.py": SOURCE + speaks}), backend)
    assert broken.problem.startswith("check failed (exit code 1)")


@pytest.mark.parametrize("kind", ["pytest", "unittest"])
async def test_a_patch_is_judged_by_the_named_tests(kind: str, repository: Repository, backend: Local) -> None:
    task = make_task(repository, kind)
    fixed = await grade_in_sandbox(task, task.reference, backend)
    assert fixed.problem == "", "the test that is broken on both sides is in no list"
    assert FAILED in fixed.outcomes.values()
    async with backend.open(task) as fresh:
        bug = await judge_sandbox(fresh, task.checks)
    [high] = task.checks.fail_to_pass
    assert bug.problem.startswith(f"1 of 2 tests did not pass: {high}")
    absent = replace(task, checks=replace(task.checks, pass_to_pass=("no such test",)))
    assert "no such test (not reported)" in (await grade_in_sandbox(absent, task.reference, backend)).problem
    whole = replace(task, checks=replace(task.checks, fail_to_pass=(), pass_to_pass=()))
    assert "check failed" in (await grade_in_sandbox(whole, task.reference, backend)).problem, (
        "without names all must pass"
    )


STEERING: dict[str, dict[str, bytes | None]] = {
    "a hook in conftest": {
        "conftest.py": b"""import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = 'passed'
"""
    },
    "another conftest": {"sub/conftest.py": b"import os; os._exit(0)\n"},
    "settings": {"setup.cfg": b"[tool:pytest]\naddopts = --co\n", "pytest.ini": b"[pytest]\naddopts = --co\n"},
    "start-up code": {"sitecustomize.py": b"import os; os._exit(0)\n"},
    "its own tests": {"test_limits.py": b"def test_clamp(): pass\n"},
}
"""Cheats by files beside the code; those in the code are in `grading.cheats`."""


async def test_files_that_steer_pytest_do_not_pass(repository: Repository, backend: Local) -> None:
    task = make_task(repository, "pytest")
    for name, files in STEERING.items():
        verdict = await grade_in_sandbox(task, repository.edit(files), backend)
        assert task.checks.fail_to_pass[0] in verdict.problem, f"{name}: {verdict.problem}"
    async with backend.open(task) as fresh:  # the positive control: by exit codes alone, and with its settings
        await fresh.exec(["git", "apply", "-"], stdin=repository.edit(STEERING["a hook in conftest"]))
        await fresh.write("test_limits.py", PYTEST.encode())
        done = await fresh.exec([*RUNNER, "-k", "clamp"])
    assert done.exit_code == 0, done.output


async def test_pytest_reports_from_a_shell_and_from_workers(repository: Repository, backend: Local) -> None:
    task = make_task(repository, "pytest")
    line = f"cd . && {PYTHON} -m pytest -q -n 1 --maxfail=9; true"
    verdict = await grade_in_sandbox(change_command(task, argv=("sh", "-c", line)), task.reference, backend)
    assert verdict == await grade_in_sandbox(task, task.reference, backend)


async def test_names_are_those_that_pytest_prints(repository: Repository, backend: Local) -> None:
    """pytest's root is a subfolder with its own settings."""
    code, fixed = (f"def add(a, b):\n    return a {sign} b\n" for sign in "-+")
    tests = {"pkg/tests/test_a.py": "from m import add\n\n\ndef test_a():\n    assert add(1, 2) == 3\n"}
    checks = Checks((Command((*RUNNER, "pkg/tests"), 60.0, "pytest"),), tests, ("pkg/tests/test_a.py::test_a",))
    files = {"pkg/m.py": code, "pkg/pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n"}
    task = repository.task(files, {"pkg/m.py": fixed}, checks)
    verdict = await grade_in_sandbox(task, task.reference, backend)
    assert verdict.outcomes == {"pkg/tests/test_a.py::test_a": PASSED}, verdict


async def test_results_are_read_from_a_file_outside_the_workspace(repository: Repository, backend: Local) -> None:
    task = make_task(repository, "pytest")
    argv = (*RUNNER, "--junitxml={results}")
    names = ("test_limits.test_clamp[high]",)
    checks = Checks((Command(argv, 60.0, "junit"),), task.checks.restore, names)
    task = replace(task, checks=checks)
    assert (await grade_in_sandbox(task, task.reference, backend)).problem == ""
    ends = repository.edit({"limits.py": "import os; os._exit(0)\n" + SOURCE})
    assert "not reported" in (await grade_in_sandbox(task, ends, backend)).problem


async def test_a_run_that_exceeds_its_time_limit_fails(repository: Repository, backend: Local) -> None:
    task = make_task(repository, "unittest")
    patch = repository.edit({"limits.py": REPAIRED + "\nimport time\ntime.sleep(100)\n"})
    verdict = await grade_in_sandbox(change_command(task, timeout=0.5), patch, backend)
    assert "not finished within 0.5 s" in verdict.problem


def test_a_patch_may_change_only_the_settings_that_the_reference_changes() -> None:
    reference = b"--- a/sub/conftest.py\n+++ b/sub/conftest.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert set(list_excluded_patterns(b"")) - set(list_excluded_patterns(reference)) == {"conftest.py", "*/conftest.py"}


FLAKY = PYTEST + (
    "\n\ndef test_now_and_then():\n    path = '{}'\n    text = open(path).read() + 'x'\n"
    "    open(path, 'w').write(text)\n    assert len(text) % 3\n"
)


@pytest.mark.parametrize("path", ["ci/run.sh", "rules.mk", "cmake/Tests.cmake"])
def test_what_a_makefile_or_a_script_starts_is_not_the_patchs_to_change(path: str) -> None:
    def excluded(reference: bytes, *argv: str) -> bool:
        patterns = list_excluded_patterns(reference, Checks((Command(argv),)))
        return any(fnmatchcase(path, pattern) for pattern in patterns)

    assert excluded(b"", "make", "test") and excluded(b"+++ b/src/a.py\n", "sh", "ci/all.sh")
    assert not excluded(b"", "python3", "-m", "pytest"), "no command starts a script"
    assert not excluded(f"+++ b/other{Path(path).suffix}\n".encode(), "make"), "the reference changes such a file"


async def test_flaky_tests_are_named_and_left_out(repository: Repository, tmp_path: Path, backend: Local) -> None:
    task = make_task(repository, "pytest")
    counter = tmp_path / "counter"
    counter.touch()
    counter.chmod(0o666)
    checks = replace(task.checks, restore={"test_limits.py": FLAKY.format(counter)}, fail_to_pass=(), pass_to_pass=())
    found = await study_task(replace(task, checks=checks), backend, 3)
    assert found.settled.checks.fail_to_pass == (NAMES.format("high"),)
    others = {"test_limits.py::test_types", *(NAMES.format(n) for n in ("low", "in side"))}
    assert set(found.settled.checks.pass_to_pass) == others
    [agree] = [check for check in found.findings if check.name == "3 runs say the same"]
    assert not agree.ok
    assert "test_limits.py::test_now_and_then" in agree.detail
    write_jsonl([found.settled], tmp_path / "settled.jsonl")
    [again] = JsonlSource(tmp_path / "settled.jsonl")
    assert again == found.settled
    assert [each.ok for each in await verify_tasks(ScriptedSource([again]), backend, repeat=2)] == [True, True]


async def test_lists_that_lie_are_found(repository: Repository, backend: Local) -> None:
    task = make_task(repository, "unittest")
    high, low = task.checks.fail_to_pass[0], task.checks.pass_to_pass[0]
    swapped = replace(task, checks=replace(task.checks, fail_to_pass=(low,), pass_to_pass=(high,)))
    found = await study_task(swapped, backend)
    wrong = {check.name: check.detail for check in found.findings if not check.ok}
    assert wrong == {"tests of fail_to_pass fail on the bug": low, "tests of pass_to_pass pass on the bug": high}
    assert (found.settled.checks.fail_to_pass, found.settled.checks.pass_to_pass) == ((high,), (low,))
    only = await study_task(replace(task, checks=replace(task.checks, fail_to_pass=(low,), pass_to_pass=())), backend)
    assert only.settled is None, "nothing tells the bug from its repair"
    assert "the checks fail on the bug" in {check.name for check in only.findings if not check.ok}
