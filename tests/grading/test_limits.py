"""Files that steer a runner or that a command names are not graded; a test that loops does not stop the others."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from coderepairrl.grading import Outcome
from coderepairrl.rewards import TestsReward, make_patched_episode
from coderepairrl.types import Checks, Command, Task
from grading.cheats import REPAIRED, SOURCE
from rewards.folder import Local, Repository, grade_in_sandbox

PASSED, _, FAILED = Outcome
STEERED = (
    *("Makefile", "GNUmakefile", "sub/Makefile", "run_tests.sh", "pom.xml", ".mvn/jvm.config", "build.gradle"),
    *("build.gradle.kts", "settings.gradle", "settings.gradle.kts", "gradle.properties", "gradlew", "CMakeLists.txt"),
    *("gradle/wrapper/gradle-wrapper.properties", "Rakefile", "phpunit.xml", "phpunit.xml.dist", "app/go.mod"),
)
NAMED: dict[str, tuple[str, ...]] = {
    "ci/check.sh": ("sh", "ci/check.sh"),
    "tests.mk": ("make", "-f", "tests.mk"),
    "run": ("./run",),
    "rules.ini": ("tool", "--config=rules.ini"),
    "bin/all.sh": ("sh", "-c", "cd . && ./bin/all.sh; true"),
    "t/test_a.py": ("tool", "t/test_a.py::test_b"),
    "odd[1].sh": ("sh", "odd[1].sh"),
}
UNCHEATED = Command(("sh", "-c", "if grep -rqw CHEAT --exclude-dir=.git .; then exit 1; fi"))
"""Passes unless a file has the text that the patch wrote."""


@pytest.mark.parametrize("path", [*STEERED, *NAMED])
async def test_changes_of_files_that_steer_the_checks_are_left_out(path: str, repository: Repository) -> None:
    never = (Command(NAMED[path]),) if path in NAMED else ()
    checks = Checks((UNCHEATED, *never))
    task = repository.task({"a.py": "x = 1\n", path: "as it was\n"}, {"a.py": "x = 2\n"}, checks)
    cheat = repository.edit({"a.py": "x = 2\n", path: "CHEAT\n"})
    problem = (await grade_in_sandbox(task, cheat)).problem
    assert UNCHEATED.argv[2] not in problem, "the patch's version was in place"
    assert not problem or never
    touched = replace(task, reference=repository.edit({path: "the repair\n"}))
    assert UNCHEATED.argv[2] in (await grade_in_sandbox(touched, cheat)).problem, (
        "the reference changes it, so a patch may"
    )


PYTHON = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable)
LOOPS = {
    "plainly": "while True: pass",
    "whatever is raised": "while True:\n        try:\n            while True: pass\n        except Exception: pass",
    "and pretends that nothing happened": "try:\n        while True: pass\n    except BaseException: return 5",
}
TESTS = {
    "pytest": (
        "from sums import add\n\n\ndef test_a(): pass\ndef test_loop(): assert add(2, 3) == 5\ndef test_z(): pass\n",
        ("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        "test_sums.py::{}",
    ),
    "unittest": (
        "import unittest\nfrom sums import add\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"
        "    def test_loop(self): self.assertEqual(add(2, 3), 5)\n    def test_z(self): pass\n",
        ("-m", "unittest", "-q"),
        "test_sums.T.{}",
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", TESTS)
async def test_a_test_that_loops_fails_and_the_others_run(kind: str, loop: str, repository: Repository) -> None:
    tests, argv, name = TESTS[kind]
    bug, repair, endless = (f"def add(a, b):\n    {body}\n" for body in ("return a - b", "return a + b", LOOPS[loop]))
    command = Command((*PYTHON, *argv), 30.0, kind, test_timeout=0.5)
    checks = Checks((command,), {"test_sums.py": tests}, (name.format("test_loop"),), (name.format("test_z"),))
    task = repository.task({"sums.py": bug}, {"sums.py": repair}, checks)
    assert (await grade_in_sandbox(task, task.reference)).problem == ""
    verdict = await grade_in_sandbox(task, repository.edit({"sums.py": endless}))
    outcomes = {name.format(key): FAILED if key == "test_loop" else PASSED for key in ("test_a", "test_loop", "test_z")}
    assert verdict.outcomes == outcomes
    assert "1 of 2 tests did not pass" in verdict.problem


async def test_by_default_some_time_is_left_for_the_others(repository: Repository) -> None:
    """Each may take half of what is left: two endless tests do not spend it all."""
    tests = "def test_1():\n    while True: pass\ntest_2 = test_1\ndef test_3(): pass\n"
    checks = Checks((Command((*PYTHON, *TESTS["pytest"][1]), 8.0, "pytest"),), {"test_a.py": tests})
    task = repository.task({"a.py": ""}, {"a.py": "1\n"}, checks)
    verdict = await grade_in_sandbox(task, task.reference)
    names = {f"test_a.py::test_{n}": PASSED if n == 3 else FAILED for n in (1, 2, 3)}
    assert verdict.outcomes == names, verdict


SECOND = "from limits import clamp\nassert clamp(10, 0, 9) == 9\n"
PREPARED: dict[str, tuple[tuple[str, ...], str]] = {
    "the next check": (("sh", "-c", "python3 -B second.py"), "open('second.py', 'w')"),
    "what steers it": (("make", "-s"), "open('Makefile', 'w').write('all:\\n\\ttrue\\n')"),
    "start-up code": (
        ("env", "PYTHONPATH=.", "python3", "-B", "-c", "import second"),
        "open('sitecustomize.py', 'w').write('import os; os._exit(0)')",
    ),
    "a compiled file": (
        ("python3", "-B", "-c", "import second"),
        "open('x.py', 'w'); import py_compile; py_compile.compile('x.py', '__pycache__/second.cpython-%d%d.pyc' % "
        "__import__('sys').version_info[:2], invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)",
    ),
    "the code as it should be": (
        ("sh", "-c", "python3 -B second.py"),
        "open('limits.py', 'w').write('clamp = lambda n, low, high: min(n, high)')",
    ),
}
"""A second command, and code under test that makes it pass while the first runs."""


def prepared(repository: Repository, name: str) -> tuple[Task, bytes]:
    """Make a task of two commands, and a patch whose code prepares the second while the first runs."""
    second, act = PREPARED[name]
    own = {"first.py": "import limits\n", "second.py": SECOND}
    checks = Checks((Command(("python3", "-B", "first.py")), Command(second)), own)
    files = {"limits.py": SOURCE, "Makefile": "all:\n\tpython3 -B second.py\n", **own}
    task = repository.task(files, {"limits.py": REPAIRED}, checks)
    return task, repository.edit({"limits.py": f"{SOURCE}{act}\n"})


@pytest.mark.parametrize("name", PREPARED)
async def test_no_command_prepares_the_next(name: str, repository: Repository) -> None:
    task, cheat = prepared(repository, name)
    reward = TestsReward()
    for patch, value in ((task.reference, 1.0), (repository.edit({"a.py": b""}), 0.0), (cheat, 0.0)):
        found = await reward(task, make_patched_episode(task, patch), Local())
        assert found.value == value, found
    async with Local().open(task) as fresh:  # the positive control: one workspace for both
        await fresh.exec(["git", "apply", "-"], stdin=cheat)
        assert [(await fresh.exec(command.argv)).ok for command in task.checks.commands] == [True, True]
