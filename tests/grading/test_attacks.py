"""Cheats against the runners, each in a real sandbox: none passes, and without a witness each does."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl import sandbox as sandboxes
from coderepairrl.grading import apply_patch, grade_patch, restore, witness
from coderepairrl.grading.reports import PARSERS, lacking
from coderepairrl.grading.steering import left_out
from coderepairrl.protocols import SandboxBackend
from coderepairrl.rewards.tests import GradedTests
from coderepairrl.types import Checks, Command, Task
from grading.cheats import (
    ANY,
    CLASS,
    COMMON,
    COMMONJS,
    ENDS,
    HONEST,
    HONEST_HELPERS,
    JUNIT,
    MODULE,
    NAMED,
    NODE,
    PYTEST,
    REPAIRED,
    SCRIPT,
    SOURCE,
    SWAPPED,
    UNITTEST,
    WORDS,
)
from rewards.folder import Local, Repository, bwrap

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
        *(name for name in SWAPPED if "loaded" in name or "away" in name),
        *("skips when imported", "tests that are written anew", "a run that stops"),
        *("classes that are built without tests",),
    },
    "unittest": {"tests that an object takes away"},
    "pytest": {"tests that an object takes away"},
    "pytest of cases": {"failures as successes", "tests that are not run", "a run that stops", "expects to fail"},
}
"""What is no cheat there, as its control shows: it does not pass without a witness either."""
PLAYED = [
    *[("script", name) for name in (*ANY, *UNITTEST) if name not in NOT_BY["script"]],
    *[("unittest", name) for name in (*ANY, *UNITTEST)],
    *[("pytest", name) for name in (*ANY, *PYTEST) if "cases" not in name],
    *[("pytest of cases", name) for name in UNITTEST if name not in NOT_BY["pytest of cases"]],
    ("pytest of cases", "test cases without content"),
    *[(kind, name) for kind in COMMANDS for name in SWAPPED if name not in NOT_BY.get(kind, ())],
]


@pytest.fixture(scope="session")
def backend() -> SandboxBackend:
    """The real sandbox, which is shown the folder that has pytest."""
    bwrap()
    packages = Path(pytest.__file__).parents[1]
    env = {"PYTHONPATH": str(packages), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return sandboxes.make_backend("bwrap", binds=(str(packages),), env=env)


def made(repository: Repository, kind: str) -> Task:
    tests = {
        "test_limits.py": PLAIN if kind == "pytest" else CASES,
        "test_a.py": FIRST,
        "test_b.py": FINE,
        "test_z.py": "",
    }
    repository.commit({"limits.py": SOURCE.encode(), **{name: text.encode() for name, text in tests.items()}})
    oracle = repository.edit({"limits.py": REPAIRED.encode()})
    checks = Checks((Command(COMMANDS[kind], 30.0),), tests)
    return Task(f"t/{kind}", "", "python", f"dir:{repository.folder}", oracle, checks)


def cheat(repository: Repository, name: str) -> bytes:
    return repository.edit(
        {path: text.encode() for path, text in {**ANY, **SWAPPED, **UNITTEST, **PYTEST}[name].items()}
    )


@pytest.mark.parametrize("kind", COMMANDS)
async def test_a_repair_passes_and_the_bug_does_not(kind: str, repository: Repository, backend: SandboxBackend) -> None:
    task = made(repository, kind)
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, task.reference)).problem == ""
    patch = repository.edit({"limits.py": b"# nothing\n" + SOURCE.encode()})
    async with backend.open(task) as fresh:
        assert "check failed" in (await grade_patch(fresh, task, patch)).problem


@pytest.mark.parametrize("kind", ["script", "unittest", "pytest"])
async def test_tests_may_be_made_in_any_way(kind: str, repository: Repository) -> None:
    """They are what their file says, decorators, metaclasses and all."""
    repository.commit({"helpers.py": HONEST_HELPERS.encode()})
    patch = repository.edit({"a.py": b"1\n"})
    env = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable)
    checks = Checks((Command((*env, *COMMANDS[kind][1:]), 30.0),), {"test_limits.py": HONEST})
    task = Task("t/honest", "", "python", f"dir:{repository.folder}", patch, checks)
    async with Local().open(task) as fresh:
        verdict = await grade_patch(fresh, task, patch)
        assert verdict.problem == ""
        assert len(verdict.outcomes) == (0 if kind == "script" else 18)


@pytest.mark.parametrize("kind", ["script", "unittest", "pytest"])
async def test_a_test_may_trace_what_it_tests(kind: str, repository: Repository, backend: SandboxBackend) -> None:
    """Code under test may not: with a trace it could change the lines and variables of a test."""
    task = made(repository, kind)
    traced = "import sys\nseen = []\nsys.settrace(lambda frame, event, arg: seen.append(frame))\nsys.settrace(None)\n"
    own = {**task.checks.restore, "test_limits.py": traced + task.checks.restore["test_limits.py"]}
    task = replace(task, checks=replace(task.checks, restore=own))
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, task.reference)).problem == ""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*each, marks=[pytest.mark.real] * (each[0] == "pytest of cases")) for each in PLAYED],
)
async def test_cheats_do_not_pass(kind: str, name: str, repository: Repository, backend: SandboxBackend) -> None:
    task = made(repository, kind)
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, cheat(repository, name))).problem


GRADED = [each for each in PLAYED if each[0] in ("unittest", "pytest")]
REPAIR = "the repair"


@pytest.mark.parametrize(("kind", "name"), [*GRADED, ("unittest", REPAIR), ("pytest", REPAIR)])
async def test_cheats_earn_nothing_where_tests_are_graded(
    kind: str, name: str, repository: Repository, backend: SandboxBackend
) -> None:
    """Tests that are named decide by themselves, so that one cheated test would earn a share."""
    task = made(repository, kind)
    of = "test_limits.Clamp." if kind == "unittest" else "test_limits.py::"
    command = Command(COMMANDS[kind], 30.0, kind)
    named = Checks((command,), task.checks.restore, (f"{of}test_high",), (f"{of}test_low",))
    patch = task.reference if name == REPAIR else cheat(repository, name)
    async with backend.open(task) as fresh:
        verdict = await grade_patch(fresh, replace(task, checks=named), patch)
    assert GradedTests().value(verdict, named) == (1.0 if name == REPAIR else 0.0)


@pytest.mark.parametrize(("kind", "name"), PLAYED)
async def test_without_a_witness_they_do(kind: str, name: str, repository: Repository, backend: SandboxBackend) -> None:
    """The positive control: the exit code says that all is well."""
    task = made(repository, kind)
    async with backend.open(task) as fresh:
        assert await apply_patch(fresh, cheat(repository, name), left_out(task.reference, task.checks)) == ""
        assert await restore(fresh, task.checks) == ""
        done = await fresh.exec(COMMANDS[kind], timeout=30.0)
        assert done.ok, done.output.decode()


ENDED = {
    "sys.exit": [name for name in SCRIPT if "sys.exit" in name or "ends" in name],
    "sys.exit by another name": ["functions that are sys.exit", "functions that end the script"],
    "exit": ["exit that returns"],
    "os._exit": ["os._exit that returns"],
    "raise": ["SystemExit in exchange", "SystemExit in exchange once"],
    "unittest.main": [name for name in SCRIPT if name.startswith("sys.exit")],
    "assert": ["functions that end the script", "functions that are sys.exit", "true is all"],
}
"""The cheats that make a script end well, by how it would end otherwise."""


def script(repository: Repository, end: str) -> Task:
    text = f"from limits import clamp\nhigh = clamp(10, 0, 9)\n{ENDS[end]}"
    repository.commit({"limits.py": SOURCE.encode(), "check.py": text.encode()})
    oracle = repository.edit({"limits.py": REPAIRED.encode()})
    checks = Checks((Command(("python3", "-B", "check.py"), 30.0),), {"check.py": text})
    return Task("t/script", "", "python", f"dir:{repository.folder}", oracle, checks)


@pytest.mark.parametrize("end", ENDS)
async def test_a_script_ends_by_its_own_last_line_alone(end: str, repository: Repository) -> None:
    """With the controls: the reference passes, the bug does not, and each cheat does where the exit code decides."""
    task, backend = script(repository, end), Local()
    patches = {name: repository.edit({"limits.py": SCRIPT[name]["limits.py"].encode()}) for name in ENDED[end]}
    bug = repository.edit({"limits.py": b"# nothing\n" + SOURCE.encode()})
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, task.reference)).problem == ""
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, bug)).problem.startswith("check failed (exit code 1)")
    passed, paid = [], []
    for name, patch in patches.items():
        async with backend.open(task) as fresh:
            if not (await grade_patch(fresh, task, patch)).problem:
                passed.append(name)
            paid += [name] * (await fresh.exec(task.checks.commands[0].argv)).ok
    assert (passed, sorted(paid)) == ([], sorted(ENDED[end]))


@pytest.mark.parametrize(
    ("kind", "module"),
    [("unittest", "json"), ("pytest", "json"), ("pytest", "iniconfig"), ("pytest", "_pytest/__init__")],
)
async def test_runners_do_not_start_with_modules_of_the_workspace(
    kind: str, module: str, repository: Repository, backend: SandboxBackend
) -> None:
    """One that the repository has is the patch's to change, and is not what the runner imports."""
    repository.commit({f"{module}.py": b"raise ImportError\n"})
    task = made(repository, kind)
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, task.reference)).problem == ""
    text = WORDS + SOURCE
    async with backend.open(task) as fresh:
        patch = repository.edit({f"{module}.py": text.encode()})
        assert "test_high failed" in (await grade_patch(fresh, task, patch)).problem


@pytest.mark.parametrize("flags", [("-I",), ("-E", "-B"), ("-P",)])
async def test_a_python_that_is_started_apart_is_asked_too(
    flags: tuple[str, ...], repository: Repository, backend: SandboxBackend
) -> None:
    task = made(repository, "unittest")
    for name, passes in (("ends the process", False), ("", True)):
        command = Command(("python3", *flags, "-m", "unittest"), 30.0)
        apart = replace(task, checks=replace(task.checks, commands=(command,)))
        async with backend.open(task) as fresh:
            patch = cheat(repository, name) if name else task.reference
            assert ((await grade_patch(fresh, apart, patch)).problem == "") is passes


async def test_compiled_tests_are_not_what_runs(repository: Repository, backend: SandboxBackend) -> None:
    """Python believes a compiled file that says that it need not be compared with its source."""
    task = made(repository, "unittest")
    script = (
        "import py_compile; open('x.py', 'w').write('import unittest'); "
        "py_compile.compile('x.py', '__pycache__/test_limits.cpython-311.pyc', 'test_limits.py', "
        "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    async with backend.open(task) as fresh:
        version = (
            await fresh.exec(["python3", "-c", "import sys; print(sys.implementation.cache_tag)"])
        ).output.decode()
        made_ = await fresh.exec(["python3", "-c", script.replace("cpython-311", version.strip())])
        assert made_.ok, made_.output
        name = f"__pycache__/test_limits.{version.strip()}.pyc"
        patch = repository.edit({name: await fresh.read(name)}, "--binary")
        assert (await fresh.exec(COMMANDS["unittest"])).ok, "the positive control"
    async with backend.open(task) as fresh:
        assert "test_high failed" in (await grade_patch(fresh, task, patch)).problem


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


def made_for_node(repository: Repository, argv: tuple[str, ...]) -> Task:
    tests = {"limits.test.mjs": JS, "program.test.mjs": PROGRAM}
    repository.commit({"limits.mjs": MODULE.encode(), **{name: text.encode() for name, text in tests.items()}})
    oracle = repository.edit({"limits.mjs": MODULE.replace(": n)", ": n > high ? high : n)").encode()})
    checks = Checks((Command(argv, 30.0, "node"),), tests)
    return Task("t/node", "", "javascript", f"dir:{repository.folder}", oracle, checks)


@pytest.mark.parametrize("name", NODE)
async def test_cheats_do_not_pass_in_node(name: str, repository: Repository) -> None:
    """With what a program and a test of its own may do: a process ends, and so does the tests'."""
    if shutil.which("node") is None:
        pytest.skip("Node is not installed")
    argv, backend = ("node", "--test", "--test-reporter=tap"), bwrap()
    task = made_for_node(repository, argv)
    patch = repository.edit({"limits.mjs": NODE[name].encode()})
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, patch)).problem
        assert (await fresh.exec(argv, timeout=30.0)).ok, "the positive control"


SPOKEN = [*(("mjs", name) for name in NAMED), *(("cjs", name) for name in COMMONJS)]
"""Cheats by the ending of the module."""


def made_of_names(repository: Repository, ending: str) -> Task:
    """A task that names its tests, of a module that is imported (``mjs``) or required (``cjs``)."""
    module, tests = (MODULE, IMPORTS) if ending == "mjs" else (COMMON, REQUIRES)
    repository.commit({f"limits.{ending}": module.encode(), f"limits.test.{ending}": tests.encode()})
    oracle = repository.edit({f"limits.{ending}": module.replace(": n)", ": n > high ? high : n)").encode()})
    command = Command(("node", "--test", "--test-reporter=tap"), 30.0, "node")
    checks = Checks((command,), {f"limits.test.{ending}": tests}, ("low", "high"))
    return Task("t/node", "", "javascript", f"dir:{repository.folder}", oracle, checks)


def spoken(repository: Repository, ending: str, name: str) -> bytes:
    """The patch of a cheat of `SPOKEN`."""
    return repository.edit({f"limits.{ending}": {"mjs": NAMED, "cjs": COMMONJS}[ending][name].encode()})


@pytest.mark.parametrize(("ending", "name"), SPOKEN)
async def test_cheats_do_not_pass_for_named_tests_in_node(ending: str, name: str, repository: Repository) -> None:
    if shutil.which("node") is None:
        pytest.skip("Node is not installed")
    task, backend = made_of_names(repository, ending), bwrap()
    patch = spoken(repository, ending, name)
    async with backend.open(task) as fresh:
        assert not (await grade_patch(fresh, task, task.reference)).problem
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, patch)).problem
        printed = (await fresh.exec(task.checks.commands[0].argv, timeout=30.0)).output.decode()
        assert not lacking(PARSERS["node"](printed), task.checks.named), "the positive control"


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


async def test_tests_of_node_may_replace_what_code_under_test_may_not(repository: Repository) -> None:
    """Built-ins, by assignment and by mocks; and an object that inherits one may have another."""
    if shutil.which("node") is None:
        pytest.skip("Node is not installed")
    tests = {"limits.test.cjs": MOCKS}
    repository.commit({"limits.cjs": MOCKED.encode(), "limits.test.cjs": MOCKS.encode()})
    checks = Checks((Command(("node", "--test", "--test-reporter=tap"), 30.0, "node"),), tests)
    task = Task("t/node", "", "javascript", f"dir:{repository.folder}", b"", checks)
    async with bwrap().open(task) as fresh:
        verdict = await grade_patch(fresh, task, b"")
    assert not verdict.problem, verdict
    assert len(verdict.outcomes) == 4
    patch = repository.edit({"limits.cjs": b"Array.prototype[Symbol.iterator] = function* () {};\n" + MOCKED.encode()})
    async with bwrap().open(task) as fresh:
        assert (await grade_patch(fresh, task, patch)).problem, "lists that are empty for a loop over the cases"


def made_for_junit(repository: Repository) -> Task:
    repository.commit({"programs/Clamp.java": CLASS.encode(), "tests/ClampTest.java": JAVA.encode()})
    oracle = repository.edit({"programs/Clamp.java": CLASS.replace(": n;", ": n > high ? high : n;").encode()})
    checks = witness.junit_checks({"tests/ClampTest.java": JAVA}, ["programs/Clamp.java"], "tests.ClampTest")
    return Task("t/junit", "", "java", f"dir:{repository.folder}", oracle, checks)


async def test_cheats_do_not_pass_in_junit(repository: Repository) -> None:
    if shutil.which("javac") is None or not all(Path(jar).exists() for jar in witness.JARS.split(":")):
        pytest.skip("a JDK, or JUnit 4, is not installed")
    task, backend = made_for_junit(repository), bwrap()
    cheats = {name: repository.edit({"programs/Clamp.java": text.encode()}) for name, text in JUNIT.items()}
    for name, patch in {"the reference": task.reference, "nothing": b"", **cheats}.items():
        async with backend.open(task) as fresh:
            verdict = await grade_patch(fresh, task, patch)
        assert (not verdict.problem) is (name == "the reference"), (name, verdict)


async def test_a_repair_passes_in_node(repository: Repository) -> None:
    if shutil.which("node") is None:
        pytest.skip("Node is not installed")
    backend = bwrap()
    for argv in (("node", "--test"), ("env", "A=1", "node", "--test", "--test-reporter=spec")):
        task = made_for_node(repository, argv)
        async with backend.open(task) as fresh:
            verdict = await grade_patch(fresh, task, task.reference)
            assert verdict.problem == "", verdict
            assert {*verdict.outcomes} >= {"low", "high", "a program"}
