"""Cheats against test runners in a real sandbox: each passes without a witness, none with it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.grading import apply_patch, grade_patch, restore_files, witness
from coderepairrl.grading.reports import PARSERS, find_failed_tests
from coderepairrl.grading.steering import list_excluded_patterns
from coderepairrl.protocols import SandboxBackend
from coderepairrl.rewards.tests import GradedTests
from coderepairrl.types import Checks, Command, Task
from grading import cheats
from rewards.folder import Local, Repository, bwrap, grade_in_sandbox

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
CASES = """import unittest

from limits import clamp


class Clamp(unittest.TestCase):
    def test_high(self):
        value = clamp(10, 0, 9)
        self.assertEqual(value, 9)
        del value

    def test_low(self):
        self.assertEqual(clamp(-1, 0, 9), 0)


if __name__ == "__main__":
    unittest.main()
"""
PLAIN = """from limits import clamp


def test_high():
    assert clamp(10, 0, 9) == 9


def test_low():
    assert clamp(-1, 0, 9) == 0
"""
FIRST = "import limits  # noqa: F401 - before the other tests do\n"
FINE = "import unittest\n\n\nclass Fine(unittest.TestCase):\n    def test_fine(self):\n        pass\n"
COMMANDS = {
    "script": ("python3", "-B", "test_limits.py"),
    "unittest": ("python3", "-B", "-m", "unittest"),
    "pytest": ("python3", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    "pytest of cases": ("python3", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
}
NOT_BY = {
    "script": {
        *(name for name in cheats.SWAPPED if "loaded" in name or "away" in name),
        *("skips when imported", "tests that are rewritten", "a run that stops"),
        *("classes that are built without tests",),
    },
    "unittest": {"tests that an object takes away"},
    "pytest": {"tests that an object takes away"},
    "pytest of cases": {"failures as successes", "tests that are not run", "a run that stops", "expects to fail"},
}
"""Cheats that do not pass with these runners, even without a witness."""
PLAYED = [
    *[("script", name) for name in (*cheats.ANY, *cheats.UNITTEST) if name not in NOT_BY["script"]],
    *[("unittest", name) for name in (*cheats.ANY, *cheats.UNITTEST)],
    *[("pytest", name) for name in (*cheats.ANY, *cheats.PYTEST) if "cases" not in name],
    *[("pytest of cases", name) for name in cheats.UNITTEST if name not in NOT_BY["pytest of cases"]],
    ("pytest of cases", "test cases without content"),
    *[(kind, name) for kind in COMMANDS for name in cheats.SWAPPED if name not in NOT_BY.get(kind, ())],
]


@pytest.fixture(scope="session")
def backend() -> SandboxBackend:
    """The real sandbox, which is shown the folder that has pytest."""
    packages = str(Path(pytest.__file__).parents[1])
    return bwrap(binds=(packages,), env={"PYTHONPATH": packages, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def made(repository: Repository, kind: str) -> Task:
    limits = PLAIN if kind == "pytest" else CASES
    tests = {"test_limits.py": limits, "test_a.py": FIRST, "test_b.py": FINE, "test_z.py": ""}
    checks = Checks((Command(COMMANDS[kind], 30.0),), tests)
    return repository.task({"limits.py": cheats.SOURCE, **tests}, {"limits.py": cheats.REPAIRED}, checks, f"t/{kind}")


NAMES = {"unittest": "test_limits.Clamp.test_{}", "pytest": "test_limits.py::test_{}"}


async def share(task: Task, kind: str, patch: bytes, backend: SandboxBackend) -> float:
    """Return what `patch` earns if the tests are named and each decides by itself."""
    high, low = (NAMES[kind].format(name) for name in ("high", "low"))
    named = Checks((Command(COMMANDS[kind], 30.0, kind),), task.checks.restore, (high,), (low,))
    return GradedTests().value(await grade_in_sandbox(replace(task, checks=named), patch, backend), named)


def cheat(repository: Repository, name: str) -> bytes:
    return repository.edit({**cheats.ANY, **cheats.SWAPPED, **cheats.UNITTEST, **cheats.PYTEST}[name])


@pytest.mark.parametrize("kind", COMMANDS)
async def test_a_repair_passes_and_the_bug_does_not(kind: str, repository: Repository, backend: SandboxBackend) -> None:
    task = made(repository, kind)
    assert (await grade_in_sandbox(task, task.reference, backend)).problem == ""
    bug = repository.edit({"limits.py": f"# nothing\n{cheats.SOURCE}"})
    assert "check failed" in (await grade_in_sandbox(task, bug, backend)).problem
    assert kind not in NAMES or await share(task, kind, task.reference, backend) == 1.0


@pytest.mark.parametrize("kind", ["script", "unittest", "pytest"])
async def test_tests_may_be_made_in_any_way(kind: str, repository: Repository) -> None:
    """With decorators, metaclasses, generated and removed methods."""
    env = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable)
    checks = Checks((Command((*env, *COMMANDS[kind][1:]), 30.0),), {"test_limits.py": cheats.HONEST})
    task = repository.task({"helpers.py": cheats.HONEST_HELPERS}, {"a.py": "1\n"}, checks)
    verdict = await grade_in_sandbox(task, task.reference)
    assert verdict.problem == ""
    assert len(verdict.outcomes) == (0 if kind == "script" else 18)


@pytest.mark.parametrize("kind", ["script", "unittest", "pytest"])
async def test_a_test_may_trace_what_it_tests(kind: str, repository: Repository, backend: SandboxBackend) -> None:
    """Code under test may not, since a trace can change the lines and variables of a test."""
    task = made(repository, kind)
    traced = "import sys\nseen = []\nsys.settrace(lambda frame, event, arg: seen.append(frame))\nsys.settrace(None)\n"
    own = {**task.checks.restore, "test_limits.py": traced + task.checks.restore["test_limits.py"]}
    task = replace(task, checks=replace(task.checks, restore=own))
    assert (await grade_in_sandbox(task, task.reference, backend)).problem == ""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*each, marks=[pytest.mark.real] * (each[0] == "pytest of cases")) for each in PLAYED],
)
async def test_cheats_do_not_pass(kind: str, name: str, repository: Repository, backend: SandboxBackend) -> None:
    """Neither as a whole nor for a share of named tests. The control: the exit code is 0."""
    task, patch = made(repository, kind), cheat(repository, name)
    assert (await grade_in_sandbox(task, patch, backend)).problem
    if kind in NAMES:
        assert await share(task, kind, patch, backend) == 0.0
    async with backend.open(task) as fresh:
        assert await apply_patch(fresh, patch, list_excluded_patterns(task.reference, task.checks)) == ""
        assert await restore_files(fresh, task.checks) == ""
        done = await fresh.exec(COMMANDS[kind], timeout=30.0)
        assert done.ok, done.output.decode()


ENDED = {
    "sys.exit": [name for name in cheats.SCRIPT if "sys.exit" in name or "ends" in name],
    "sys.exit by another name": ["functions that are sys.exit", "functions that end the script"],
    "exit": ["exit that returns"],
    "os._exit": ["os._exit that returns"],
    "raise": ["SystemExit in exchange", "SystemExit in exchange once"],
    "unittest.main": [name for name in cheats.SCRIPT if name.startswith("sys.exit")],
    "assert": ["functions that end the script", "functions that are sys.exit", "true is all"],
}
"""Cheats that make a script end well, by how it would otherwise end."""


def script(repository: Repository, end: str) -> Task:
    text = f"from limits import clamp\nhigh = clamp(10, 0, 9)\n{cheats.ENDS[end]}"
    checks = Checks((Command(("python3", "-B", "check.py"), 30.0),), {"check.py": text})
    return repository.task({"limits.py": cheats.SOURCE, "check.py": text}, {"limits.py": cheats.REPAIRED}, checks)


@pytest.mark.parametrize("end", cheats.ENDS)
async def test_a_script_ends_by_its_own_last_line_alone(end: str, repository: Repository) -> None:
    """With the controls: the reference passes, the bug does not, and each cheat does where the exit code decides."""
    task, backend = script(repository, end), Local()
    bug = repository.edit({"limits.py": f"# nothing\n{cheats.SOURCE}"})
    assert (await grade_in_sandbox(task, task.reference)).problem == ""
    assert (await grade_in_sandbox(task, bug)).problem.startswith("check failed (exit code 1)")
    for name in ENDED[end]:
        patch = repository.edit(cheats.SCRIPT[name])
        async with backend.open(task) as fresh:
            assert (await grade_patch(fresh, task, patch)).problem, name
            assert (await fresh.exec(task.checks.commands[0].argv)).ok, f"{name}: the control"


@pytest.mark.parametrize(
    ("kind", "module"),
    [("unittest", "json"), ("pytest", "json"), ("pytest", "iniconfig"), ("pytest", "_pytest/__init__")],
)
async def test_runners_do_not_start_with_modules_of_the_workspace(
    kind: str, module: str, repository: Repository, backend: SandboxBackend
) -> None:
    """A patch may change such a module of the repository; the runner does not import it."""
    repository.commit({f"{module}.py": "raise ImportError\n"})
    task = made(repository, kind)
    assert (await grade_in_sandbox(task, task.reference, backend)).problem == ""
    patch = repository.edit({f"{module}.py": cheats.WORDS + cheats.SOURCE})
    assert "test_high failed" in (await grade_in_sandbox(task, patch, backend)).problem


@pytest.mark.parametrize("flags", [("-I",), ("-E", "-B"), ("-P",)])
async def test_an_isolated_python_has_a_witness_too(
    flags: tuple[str, ...], repository: Repository, backend: SandboxBackend
) -> None:
    task = made(repository, "unittest")
    command = Command(("python3", *flags, "-m", "unittest"), 30.0)
    apart = replace(task, checks=replace(task.checks, commands=(command,)))
    assert (await grade_in_sandbox(apart, cheat(repository, "ends the process"), backend)).problem
    assert (await grade_in_sandbox(apart, task.reference, backend)).problem == ""


async def test_compiled_tests_do_not_run(repository: Repository, backend: SandboxBackend) -> None:
    """Python does not compare a compiled file with its source if the file says so."""
    task = made(repository, "unittest")
    script = (
        "import py_compile, sys; open('x.py', 'w').write('import unittest'); "
        "print(py_compile.compile('x.py', f'__pycache__/test_limits.{sys.implementation.cache_tag}.pyc', "
        "'test_limits.py', invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH))"
    )
    async with backend.open(task) as fresh:
        name = (await fresh.exec(["python3", "-c", script])).output.decode().strip()
        patch = repository.edit({name: await fresh.read(name)}, "--binary")
        assert (await fresh.exec(COMMANDS["unittest"])).ok, "the positive control"
    assert "test_high failed" in (await grade_in_sandbox(task, patch, backend)).problem


JS = """import test from "node:test";
import assert from "node:assert";
import { clamp } from "./limits.mjs";

test("low", () => assert.equal(clamp(-1, 0, 9), 0));
test("high", () => assert.equal(clamp(10, 0, 9), 9));
"""
IMPORTS = JS.replace("assert.equal(clamp(10, 0, 9), 9)", "assert.ok([9].includes(clamp(10, 0, 9)))")
REQUIRES = """const { clamp } = require("./limits.cjs");
const test = require("node:test");
const assert = require("node:assert");

test("low", () => assert.equal(clamp(-1, 0, 9), 0));
test("high", () => assert.ok([9].includes(clamp(10, 0, 9))));
"""
JAVA = """package tests;

import org.junit.*;

public class ClampTest {
    @Test public void low() { Assert.assertEquals(0, programs.Clamp.clamp(-1, 0, 9)); }
    @Test public void high() { Assert.assertEquals(9, programs.Clamp.clamp(10, 0, 9)); }
}
"""
PROGRAM = """import test from "node:test";
import assert from "node:assert";
import { spawnSync } from "node:child_process";

test("a program", () => assert.equal(spawnSync(process.execPath, ["-e", "process.exit(0)"]).status, 0));
setTimeout(() => process.exit(0), 300);
"""


TAP = ("node", "--test", "--test-reporter=tap")


def made_for_node(repository: Repository, argv: tuple[str, ...]) -> Task:
    tests = {"limits.test.mjs": JS, "program.test.mjs": PROGRAM}
    repair = {"limits.mjs": cheats.MODULE.replace(": n)", ": n > high ? high : n)")}
    checks = Checks((Command(argv, 30.0, "node"),), tests)
    return replace(repository.task({"limits.mjs": cheats.MODULE, **tests}, repair, checks), language="javascript")


@needs_node
@pytest.mark.parametrize("name", cheats.NODE)
async def test_cheats_do_not_pass_in_node(name: str, repository: Repository) -> None:
    """Programs that tests start may end their process, and so may tests after their end."""
    task = made_for_node(repository, TAP)
    patch = repository.edit({"limits.mjs": cheats.NODE[name]})
    async with bwrap().open(task) as fresh:
        assert (await grade_patch(fresh, task, patch)).problem
        assert (await fresh.exec(TAP, timeout=30.0)).ok, "the positive control"


SPOKEN = [*(("mjs", name) for name in cheats.NAMED), *(("cjs", name) for name in cheats.COMMONJS)]
"""Cheats by the ending of the module."""


def made_of_names(repository: Repository, ending: str) -> Task:
    """A task that names its tests, of a module that is imported (``mjs``) or required (``cjs``)."""
    module, tests = (cheats.MODULE, IMPORTS) if ending == "mjs" else (cheats.COMMON, REQUIRES)
    repair = {f"limits.{ending}": module.replace(": n)", ": n > high ? high : n)")}
    own = {f"limits.test.{ending}": tests}
    checks = Checks((Command(TAP, 30.0, "node"),), own, ("low", "high"))
    return replace(repository.task({f"limits.{ending}": module, **own}, repair, checks), language="javascript")


def spoken(repository: Repository, ending: str, name: str) -> bytes:
    """The patch of a cheat of `SPOKEN`."""
    return repository.edit({f"limits.{ending}": {"mjs": cheats.NAMED, "cjs": cheats.COMMONJS}[ending][name]})


@needs_node
@pytest.mark.parametrize(("ending", "name"), SPOKEN)
async def test_cheats_do_not_pass_for_named_tests_in_node(ending: str, name: str, repository: Repository) -> None:
    task, backend = made_of_names(repository, ending), bwrap()
    patch = spoken(repository, ending, name)
    assert not (await grade_in_sandbox(task, task.reference, backend)).problem
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, patch)).problem
        printed = (await fresh.exec(TAP, timeout=30.0)).output.decode()
        assert not find_failed_tests(PARSERS["node"](printed), task.checks.named), "the positive control"


MOCKS = """const test = require("node:test");
const assert = require("node:assert");
const made = require("./limits.cjs");

Array.prototype.last = function () { return this[this.length - 1]; };
test("assigns", () => {
  const { max } = Math;
  Math.max = () => 42;
  assert.equal(made.max(1), 42);
  Math.max = max;
  assert.equal(made.max(1), 1);
});
test("mocks", (t) => {
  t.mock.method(JSON, "stringify", () => "mocked");
  const exit = t.mock.method(process, "exit", () => {});
  process.exit(1);
  assert.deepEqual([exit.mock.callCount(), JSON.stringify(1), [1, 2].last()], [1, "mocked", 2]);
});
test("inherits", () => {
  "use strict";
  const map = new Map();
  map.get = () => "of its own";
  assert.deepEqual([map.get(1), new made.Stack().push(1)], ["of its own", "pushed"]);
});
test("is offered what would replace it", () => {
  made.replace();
  try { made.mock(); } catch { /* no */ }
  assert.equal(Math.max(1), 1);
});
"""
MOCKED = """exports.max = (n) => Math.max(n);
exports.Stack = function () {};
exports.Stack.prototype = Object.create(Array.prototype);
exports.Stack.prototype.push = () => "pushed";
exports.replace = Object.getOwnPropertyDescriptor(Math, "max").set.bind(Math, () => 42);
const { mock } = require("node:test");
exports.mock = mock.method.bind(mock, Math, "max", () => 42);
setTimeout(Reflect.set, 0, Math, "max", () => 42);
Math.max = () => 42;
"""


@needs_node
async def test_tests_of_node_may_replace_what_code_under_test_may_not(repository: Repository) -> None:
    """Built-ins, by assignment and by mocks; objects that inherit a built-in may override it."""
    tests = {"limits.test.cjs": MOCKS}
    task = repository.task({"limits.cjs": MOCKED, **tests}, {}, Checks((Command(TAP, 30.0, "node"),), tests))
    verdict = await grade_in_sandbox(task, b"", bwrap())
    assert not verdict.problem, verdict
    assert len(verdict.outcomes) == 4
    patch = repository.edit({"limits.cjs": f"Array.prototype[Symbol.iterator] = function* () {{}};\n{MOCKED}"})
    assert (await grade_in_sandbox(task, patch, bwrap())).problem, "lists that are empty for a loop over the cases"


def made_for_junit(repository: Repository) -> Task:
    files = {"programs/Clamp.java": cheats.CLASS, "tests/ClampTest.java": JAVA}
    repair = {"programs/Clamp.java": cheats.CLASS.replace(": n;", ": n > high ? high : n;")}
    checks = witness.make_junit_checks({"tests/ClampTest.java": JAVA}, ["programs/Clamp.java"], "tests.ClampTest")
    return replace(repository.task(files, repair, checks), language="java")


async def test_cheats_do_not_pass_in_junit(repository: Repository) -> None:
    if shutil.which("javac") is None or not all(Path(jar).exists() for jar in witness.JARS.split(":")):
        pytest.skip("a JDK, or JUnit 4, is not installed")
    task, backend = made_for_junit(repository), bwrap()
    patches = {name: repository.edit({"programs/Clamp.java": text}) for name, text in cheats.JUNIT.items()}
    for name, patch in {"the reference": task.reference, "nothing": b"", **patches}.items():
        verdict = await grade_in_sandbox(task, patch, backend)
        assert (not verdict.problem) is (name == "the reference"), (name, verdict)


@needs_node
async def test_a_repair_passes_in_node(repository: Repository) -> None:
    for argv in (("node", "--test"), ("env", "A=1", "node", "--test", "--test-reporter=spec")):
        task = made_for_node(repository, argv)
        verdict = await grade_in_sandbox(task, task.reference, bwrap())
        assert verdict.problem == "", verdict
        assert {*verdict.outcomes} >= {"low", "high", "a program"}
