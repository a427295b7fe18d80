"""Benchmarks judge by their own rules, in images built here in the layout of theirs."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import published
from coderepairrl import grading
from coderepairrl.environments.images import prepare_images
from coderepairrl.errors import RewardFault, TaskError
from coderepairrl.grading import harness
from coderepairrl.rewards.simple import make_patched_episode
from coderepairrl.rewards.tests import TestsReward
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.tasks import make_source, write_jsonl
from coderepairrl.tasks.prepare import list_image_names
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.sources.multi_swe_bench import MultiSweBench, _make_instance_checks
from coderepairrl.tasks.sources.swe_bench_pro import SweBenchPro
from coderepairrl.tasks.sources.swe_smith import SweSmith
from coderepairrl.types import Checks, Score, Task
from environments.conftest import open_folder, open_overlays
from environments.made import layout, pack_folder
from needs import need
from projects import write
from published import write_rows
from sandbox.images import root_file_system

BUG, REPAIR = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
FIX = "--- a/app.py\n+++ b/app.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
UNUSED = """asyncio concurrent ctypes curses dbm distutils email ensurepip html http idlelib lib2to3 logging
    multiprocessing pydoc_data sqlite3 tkinter tomllib unittest urllib venv wsgiref xml xmlrpc zoneinfo"""
"""Parts of Python's library that the images do without."""
OTHER = "--- a/other.py\n+++ b/other.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
"""The repair of another task, which applies here."""
RUNNER = """
import importlib, sys
sys.path.insert(0, ".")
for name in sys.argv[1:]:
    module = importlib.import_module(name.replace("/", ".").removesuffix(".py"))
    for test in [test for test in vars(module) if test.startswith("test_")]:
        try:
            getattr(module, test)()
            print(f"{name}::{test} PASSED")
        except AssertionError:
            print(f"{name}::{test} FAILED")
"""
"""A test runner for images that have none; its lines are pytest's, of verbose runs."""
TESTS = "from app import add\ndef test_add():\n    assert add(1, 2) == 3\ndef test_zero():\n    assert add(5, 0) == 5\n"
OLD_TESTS = "from app import add\ndef test_zero():\n    assert add(5, 0) == 5\n"
TEST_PATCH = """--- a/tests/test_app.py
+++ b/tests/test_app.py
@@ -1,3 +1,5 @@
 from app import add
+def test_add():
+    assert add(1, 2) == 3
 def test_zero():
     assert add(5, 0) == 5
"""
CHEAT = """--- a/tests/test_app.py
+++ b/tests/test_app.py
@@ -1,3 +1,3 @@
-from app import add
+add = lambda a, b: a + b
 def test_zero():
     assert add(5, 0) == 5
"""
"""A patch that edits tests, and nothing else."""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A cache for all of these tests, whose images have most in common; what judges is that of every day."""
    with open_folder() as folder:
        tools = folder / "environments/tools"
        tools.mkdir(parents=True)
        for package in (harness.SWEBENCH, harness.MULTI_SWE_BENCH, harness.SWE_SMITH):
            installed = package.install()
            (tools / installed.name).symlink_to(installed)
        yield folder


@pytest.fixture(autouse=True)
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRRL_CACHE", str(home))


@pytest.fixture
def backend(isolating: None) -> Iterator[Bubblewrap]:
    with open_overlays(file_bytes=16 << 20, disk_bytes=64 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("image") / "root"
    root_file_system(root)
    [library] = (root / "usr/lib").glob("python3*")
    for name in UNUSED.split():
        shutil.rmtree(library / name, ignore_errors=True)
    subprocess.run(["rm", "-rf", root / "testbed", *(root / "usr/lib/git-core").glob("git-*-*")], check=True)
    for name in ("mktemp", "patch"):  # that patches are tried with in the end
        if program := shutil.which(name):
            shutil.copy(program, root / "usr/bin")
    (root / "usr/bin/python").symlink_to("python3")
    (root / "usr/lib/runner.py").write_text(RUNNER)
    return pack_folder(root)


def commit_bug(folder: Path) -> None:
    """Make the folder a repository with the repair as a later, unreachable commit."""
    script = r"""
    git init -q -b main && git config user.name n && git config user.email e@e && git add -A && git commit -qm base
    printf 'def add(a, b):\n    return a + b\n' >app.py
    git commit --allow-empty -qam fix && git reset -q --hard HEAD~1
    """
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True)


class World:
    """Builds an image of a repository at `where` and files `beside` it, and the task of a row in that image."""

    def __init__(self, tmp_path: Path, programs: bytes, where: str, **settings: Any) -> None:
        self.folder, self.programs, self.where = tmp_path, programs, where
        self.settings = {"WorkingDir": f"/{where}", "Env": ["PATH=/usr/bin:/bin"], **settings}

    def build_image(self, files: dict[str, str], beside: dict[str, str]) -> str:
        root = self.folder / "root"
        write(root / self.where, files)
        commit_bug(root / self.where)
        write(root, beside)
        subprocess.run(
            "chmod -R a+rX . ; find . -path '*/bin/*' -exec chmod a+x {} +", shell=True, cwd=root, check=True
        )
        layers = [self.programs, pack_folder(root)]
        digest = layout(self.folder / "oci", layers, compress=lambda data: data, **self.settings)
        return f"oci:{self.folder}/oci@{digest}"

    def make_task(self, source: str, row: dict[str, Any], **options: Any) -> Task:
        tasks = list(make_source(source, path=write_rows(self.folder / "rows.jsonl", row), **options))
        prepare_images(list_image_names(tasks))
        write_jsonl(tasks, self.folder / "tasks.jsonl")
        [task] = make_source("jsonl", path=str(self.folder / "tasks.jsonl"))
        return task


async def grade(backend: Bubblewrap, task: Task, patch: str) -> grading.Verdict:
    async with backend.open(grading.use_checks_workspace(task)) as box:
        if patch:
            return await grading.grade_patch(box, task, patch.encode())
        return await grading.judge_sandbox(box, task.checks)


async def check_verdicts(backend: Bubblewrap, task: Task, *cheats: str, conflict: bool = False) -> None:
    """Check that the reference resolves, alone and with edited tests, unless these `conflict` with the benchmark's, and
    that no patch, another task's repair and edited tests alone do not."""
    verdict = await grade(backend, task, task.reference.decode())
    assert not verdict.problem, verdict
    for patch in ("", OTHER, *cheats):
        verdict = await grade(backend, task, patch)
        assert verdict.problem and (patch in cheats or not verdict.doubtful), (patch, verdict)
    for patch in cheats:
        verdict = await grade(backend, task, task.reference.decode() + patch)
        assert bool(verdict.problem) is conflict, (patch, verdict)


async def run_in_image(backend: Bubblewrap, task: Task, script: str) -> str:
    async with backend.open(task) as box:
        return (await box.exec(["bash", "-c", script])).output.decode()


async def score_reference(backend: Bubblewrap, task: Task) -> Score:
    return await TestsReward()(task, make_patched_episode(task, task.reference), backend)


async def check_fault(backend: Bubblewrap, task: Task, script: str) -> None:
    """Check that tests without results, those of `script`, are a fault of the grader and not a zero."""
    [command] = task.checks.commands
    broken = replace(command, argv=("bash", "-c", script, *command.argv[3:]))
    with pytest.raises(RewardFault, match="cannot run"):
        await score_reference(backend, replace(task, checks=replace(task.checks, commands=(broken,))))


# -- R2E-Gym

SUMMARY = """
echo "== short test summary info =="
.venv/bin/python /usr/lib/runner.py r2e_tests/test_1.py | while read -r name status; do echo "$status $name"; done
"""


async def test_r2e_gym_hides_its_tests_and_expects_the_outcomes_of_the_repair(
    backend: Bubblewrap, tmp_path: Path, programs: bytes
) -> None:
    world = World(tmp_path, programs, "testbed")
    files = {"app.py": BUG, "other.py": "x = 1\n", "run_tests.sh": SUMMARY, "tests/test_app.py": OLD_TESTS}
    more = "def test_broken():\n    assert add(1, 1) == 7\n"
    beside = {
        "r2e_tests/test_1.py": TESTS + more,
        "r2e_tests/__init__.py": "",
        "root/.local/bin/x": "",
        "testbed/.venv/bin/python": '#!/bin/sh\nexec /usr/bin/python3 "$@"\n',
        "testbed/__pycache__/app.cpython-311.pyc": "stale",
        "testbed/tests/__pycache__/test_1.cpython-311.pyc": "of a hidden test",
        "testbed/tests/test_1.pyc": "of a hidden test",
        "testbed/.venv/lib/__pycache__/six.cpython-311.pyc": "of a package",
    }
    image = world.build_image(files, beside)
    expected = {"test_add": "PASSED", "test_zero": "PASSED", "\u001b[1mtest_broken\u001b[0m - always": "FAILED"}
    row = published.make_r2e_row(image, "    return a - b", "    return a + b", "app.py", at=2)
    task = world.make_task("r2e_gym", row | {"expected_output_json": json.dumps(expected)})
    hidden = await run_in_image(
        backend, task, "ls -d /r2e_tests run_tests.sh; find / -xdev -name 'test_1*'; git log --oneline --all"
    )
    assert await run_in_image(backend, task, "command -v python") == "/root/.venv/bin/python\n"
    assert await run_in_image(backend, task, "find . -name '*.pyc'") == "./.venv/lib/__pycache__/six.cpython-311.pyc\n"
    assert "test_1.py" not in hidden and hidden.count("cannot access") == 2 and "fix" not in hidden, hidden
    made = "--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+x\n"
    same = FIX + made.format("run_tests.sh") + made.format("r2e_tests/x")
    assert not (await grade(backend, task, same)).problem, "what agents make in place of hidden files is left out"
    fake = "echo '== short test summary info =='; echo 'PASSED a::test_add'; echo 'PASSED a::test_zero'"
    await check_verdicts(backend, task, f"--- a/run_tests.sh\n+++ b/run_tests.sh\n@@ -0,0 +1 @@\n+{fake}\n")
    await check_fault(backend, task, "echo 'ImportError: no pytest'")


@pytest.mark.parametrize(
    ("log", "good"),
    [
        ("PASSED r/t.py::T::a\nFAILED r/t.py::b - no\nERROR r/t.py::c - x\n", True),
        ("PASSED r/t.py::T::a\nFAILED r/t.py::b\nERROR r/t.py::c\nPASSED r/t.py::d\n", False),
        ("PASSED r/t.py::T::a\nFAILED r/t.py::b\n", False),
        ("PASSED r/t.py::T::a\nPASSED r/t.py::b\nERROR r/t.py::c\n", False),
    ],
)
def test_r2e_gym_compares_whole_maps(log: str, good: bool) -> None:
    """Like `_calculate_reward_r2e`: equal names and outcomes; tests that failed on the repair must fail again."""
    expected = json.dumps({"T.a": "PASSED", "b": "FAILED", "c": "ERROR"})
    found = harness.judge_log(f"x\n=== short test summary info ===\n\x1b[32m{log}", f"r2e_gym:{expected}", Checks())
    assert found.resolved is good and found.found


# -- Multi-SWE-bench

MAVEN = """#!/bin/bash
cd /home/gson
PATCHES
echo "[INFO] Scanning for projects..."
for each in app keep; do
  failed=$(python /usr/lib/runner.py tests/test_$each.py | grep -c FAILED)
  mark=""; [ "$failed" = 0 ] || mark=" <<< FAILURE!"
  printf 'Running com.%s\\nTests run: 2, Failures: %s, Errors: 0, Skipped: 0, Time elapsed: 0.1 sec%s\\n\\n' \
    $each "$failed" "$mark"
done
"""
APPLY = "set -e; git apply --whitespace=nowarn /home/test.patch {} ; set +e"


def make_multi_row(image: str) -> dict[str, Any]:
    def result(passed: list[str], failed: list[str]) -> dict[str, Any]:
        return {"passed_tests": passed, "failed_tests": failed, "skipped_tests": []}

    status = {"run": "PASS", "test": "FAIL", "fix": "PASS"}
    return {
        **published.make_multi_row(FIX),
        **{"org": "google", "repo": "gson", "test_patch": TEST_PATCH, "image": image},
        **{"f2p_tests": {"com.app": status}, "p2p_tests": {}, "s2p_tests": {}, "n2p_tests": {}},
        "run_result": result(["com.app", "com.keep"], []),
        "test_patch_result": result(["com.keep"], ["com.app"]),
    }


async def test_multi_swe_bench_runs_its_script_and_lets_its_package_judge(
    backend: Bubblewrap, tmp_path: Path, programs: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published images hold the repair and the tests, which no agent finds and no empty patch applies."""
    world = World(tmp_path, programs, "home/gson", WorkingDir="/home/")
    keep = "from app import add\ndef test_one():\n    assert add(1, 0) == 1\n"
    files = {"app.py": BUG, "other.py": "x = 1\n", "tests/test_app.py": OLD_TESTS, "tests/test_keep.py": keep}
    scripts = {
        "home/fix.patch": FIX,
        "home/test.patch": TEST_PATCH,
        "home/run.sh": MAVEN.replace("PATCHES", ""),
        "home/test-run.sh": MAVEN.replace("PATCHES", APPLY.format("")),
        "home/fix-run.sh": MAVEN.replace("PATCHES", APPLY.format("/home/fix.patch")),
        "home/prepare.sh": "",
    }
    image = world.build_image(files, scripts)
    monkeypatch.setattr(MultiSweBench, "format_image_name", lambda self, row: row.text("image"))
    task = world.make_task("multi_swe_bench", make_multi_row(image), workspace="image")
    hidden = await run_in_image(backend, task, "pwd; ls /home; grep -rl 'a + b' /home; git log --oneline --all")
    assert hidden.split()[:2] == ["/home/gson", "gson"] and "a + b" not in hidden and "fix" not in hidden, hidden
    await check_verdicts(backend, task, CHEAT, conflict=True)
    broken = FIX.replace("return a + b", "return a + b if b else -a")
    verdict = await grade(backend, task, broken)
    assert "com.keep" in verdict.problem, "a test that is not named passed, and fails now"
    await check_fault(backend, task, "echo BUILD FAILURE")


REPORTS = """
import importlib.util, json, sys
{stubs}
stub_modules("docker", "git", "github", "swerex", "toml", "tqdm", "yaml")
register_package("multi_swe_bench.harness")
from multi_swe_bench.harness.report import Report
from multi_swe_bench.harness.test_result import TestResult
def result(found):
    sets = [{{name for name, status in found.items() if status == each}} for each in ("PASS", "FAIL", "SKIP")]
    return TestResult(*map(len, sets), *sets)
for line in sys.stdin:
    run, test, gold, fix = map(result, json.loads(line))
    recorded = Report("o", "r", 1, run_result=run, test_patch_result=test, fix_patch_result=gold)
    found = Report("o", "r", 1, run_result=run, test_patch_result=test, fix_patch_result=fix)
    kinds = ("p2p_tests", "f2p_tests", "s2p_tests", "n2p_tests")
    good = found.valid and all(set(getattr(recorded, kind)) <= set(getattr(found, kind)) for kind in kinds)
    print(json.dumps([recorded.valid, good, {{kind: sorted(getattr(recorded, kind)) for kind in kinds}}]))
"""


def test_multi_swe_bench_verdicts_on_random_maps_are_its_own() -> None:
    """The part of the recorded maps that a task keeps gives the verdicts of the benchmark's classes on the whole."""
    draw = random.Random(5)
    names = [f"com.T{number}" for number in range(6)]

    def status_map(like: dict[str, str]) -> dict[str, str]:
        drawn = {
            n: draw.choice(["PASS", "PASS", "FAIL", "SKIP", ""]) if draw.random() < 0.4 else like.get(n, "")
            for n in names
        }
        return {name: status for name, status in drawn.items() if status}

    run = [status_map(dict.fromkeys(names, "PASS")) for _ in range(2_000)]
    test = [status_map(each) for each in run]
    gold = [status_map(dict.fromkeys(names, "PASS")) for _ in test]
    fix = [status_map(each) for each in gold]
    stubs = (Path(harness.__file__).parent / "programs/absent.py").read_text()
    command = [str(harness.MULTI_SWE_BENCH.install() / "bin/python"), "-I", "-c", REPORTS.format(stubs=stubs)]
    lines = "".join(json.dumps(each) + "\n" for each in zip(run, test, gold, fix, strict=True))
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    real = [json.loads(line) for line in done.stdout.splitlines()]

    def recorded(found: dict[str, str]) -> dict[str, list[str]]:
        kinds = {"passed_tests": "PASS", "failed_tests": "FAIL", "skipped_tests": "SKIP"}
        return {column: [name for name, status in found.items() if status == kind] for column, kind in kinds.items()}

    def log(found: dict[str, str]) -> str:
        counts = {"PASS": (1, 0, 0), "FAIL": (1, 1, 0), "SKIP": (1, 0, 1)}
        line = "Running {}\nTests run: {}, Failures: {}, Errors: 0, Skipped: {}, Time elapsed: 0.1 sec{}\n\n"
        marks = {"FAIL": " <<< FAILURE!"}
        return "[INFO] start\n" + "".join(line.format(n, *counts[s], marks.get(s, "")) for n, s in found.items())

    questions, expected = [], []
    for (valid, good, kinds), runs, tests, fixes in zip(real, run, test, fix, strict=True):
        if not valid or not (kinds["f2p_tests"] or kinds["s2p_tests"] or kinds["n2p_tests"]):
            continue  # no such row is published
        maps = {kind: dict.fromkeys(named, "") for kind, named in kinds.items()}
        results = {"run_result": recorded(runs), "test_patch_result": recorded(tests)}
        checks = _make_instance_checks(Row("m", "r", {"org": "google", "repo": "gson", **maps, **results}))
        argument = checks.commands[0].results.partition(":")[2]
        questions.append({"log": log(fixes), **harness.MULTI_SWE_BENCH.make_question(argument, checks)})
        expected.append(good)
    answers = harness.MULTI_SWE_BENCH.ask(questions)
    assert [answer["resolved"] for answer in answers] == expected
    assert len(expected) > 300 and 0.1 < sum(expected) / len(expected) < 0.9


# -- SWE-smith


async def test_swe_smith_s_image_has_the_bug_and_not_the_tests_that_it_breaks(
    backend: Bubblewrap, tmp_path: Path, programs: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, programs, "testbed")
    files = {"app.py": REPAIR, "other.py": "x = 1\n", "tests/test_app.py": TESTS, "tests/test_keep.py": OLD_TESTS}
    image = world.build_image(files, {})
    tests = {"FAIL_TO_PASS": ["tests/test_app.py::test_add"], "PASS_TO_PASS": ["tests/test_keep.py::test_zero"]}
    bug = "--- a/app.py\n+++ b/app.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a + b\n+    return a - b\n"
    name = "mewwts__addict.75284f95"
    about = {"instance_id": f"{name}.func__1", "repo": f"swesmith/{name}", "patch": bug, "problem_statement": ""}
    row = {**published.ROW, **about, "image_name": image, **tests}
    asked = SweSmith._find_profile

    def profile(self: SweSmith, row: Any) -> dict[str, Any]:
        found = asked(self, row)
        assert "pytest" in found["command"] and found["files"] == [["tests/test_app.py"], ["tests/test_keep.py"]]
        return {**found, "command": "python /usr/lib/runner.py tests/test_app.py tests/test_keep.py"}

    monkeypatch.setattr(SweSmith, "_find_profile", profile)
    task = world.make_task("swe_smith", row, workspace="image")
    shown = await run_in_image(
        backend, task, "cat app.py; ls tests; git log --oneline --all | wc -l; git status --short; git show"
    )
    assert shown.startswith(f"{BUG}test_keep.py\n1\n") and "-    return" not in shown and "a + b" not in shown, shown
    await check_verdicts(backend, task, CHEAT.replace("test_app", "test_keep"))
    await check_fault(backend, task, "echo no tests")


# -- SWE-bench Pro

PARSER = """
import json, sys
lines = [line.split() for line in open(sys.argv[1]) if "::" in line]
json.dump({"tests": [{"name": name, "status": status} for name, status in lines]}, open(sys.argv[3], "w"))
"""


async def test_swe_bench_pro_runs_the_script_and_the_parser_of_the_instance(
    backend: Bubblewrap, tmp_path: Path, programs: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, programs, "app")
    image = world.build_image({"app.py": BUG, "other.py": "x = 1\n", "tests/test_app.py": OLD_TESTS}, {})
    own = {"run_script.sh": 'python /usr/lib/runner.py "${1//,/ }"\n', "parser.py": PARSER}
    write(tmp_path / "pro/run_scripts/instance_o__toy-1", own)
    row = {
        **published.ROW,
        **{"instance_id": "instance_o__toy-1", "patch": FIX, "test_patch": TEST_PATCH},
        **{"requirements": "", "interface": "", "dockerhub_tag": "t"},
        "selected_test_files_to_run": "['tests/test_app.py']",
        "fail_to_pass": "['tests/test_app.py::test_add']",
        "pass_to_pass": "[]",
    }
    monkeypatch.setattr(SweBenchPro, "format_image_name", lambda self, row: image)
    task = world.make_task("swe_bench_pro", row, workspace="image", scripts=str(tmp_path / "pro"))
    await check_verdicts(backend, task, CHEAT)
    await check_fault(backend, task, "true")
    with pytest.raises(TaskError, match=r"run_script\.sh"):
        world.make_task("swe_bench_pro", row, workspace="image", scripts=str(tmp_path))


# -- SWE-rebench


async def test_swe_rebench_runs_the_command_and_the_parser_of_the_row(
    backend: Bubblewrap, tmp_path: Path, programs: bytes
) -> None:
    world = World(tmp_path, programs, "toy")
    image = world.build_image({"app.py": BUG, "other.py": "x = 1\n", "tests/test_app.py": OLD_TESTS}, {})
    turned = "python /usr/lib/runner.py {} | while read -r name status; do echo $status $name; done"
    row = {
        **{**published.ROW, "patch": FIX, "test_patch": TEST_PATCH, "image_name": image},
        "install_config": {"test_cmd": turned.format("tests/test_app.py"), "log_parser": "parse_log_pytest"},
        "FAIL_TO_PASS": ["tests/test_app.py::test_add"],
        "PASS_TO_PASS": ["tests/test_app.py::test_zero"],
    }
    task = world.make_task("swe_rebench", row, workspace="image")
    await check_verdicts(backend, task, CHEAT)
    await check_fault(backend, task, "true")
    unknown = {**row, "install_config": {"test_cmd": ["true"], "log_parser": "parse_log_of_v2"}}
    with pytest.raises(RewardFault, match="parse_log_of_v2"):
        unread = world.make_task("swe_rebench", unknown, workspace="image")
        await score_reference(backend, unread)


# -- Java: Defects4J and GitBug-Java, with programs of ours that compile and run what they are given

SUM = "public class Sum {{ public static int add(int a, int b) {{ return a {} b; }} }}\n"
SUM_TEST = """public class SumTest {
    public void add() { if (Sum.add(1, 2) != 3) throw new RuntimeException("no"); }
    public void zero() { if (Sum.add(5, 0) != 5) throw new RuntimeException("no"); }
}
"""
MAIN = """
import java.lang.reflect.Method;
public class Main {
    public static void main(String[] names) throws Exception {
        for (Method test : Class.forName("SumTest").getDeclaredMethods()) {
            String how = "ok";
            try { test.invoke(new SumTest()); } catch (Exception e) { how = "failed"; }
            System.out.println("SumTest " + test.getName() + " " + how);
        }
    }
}
"""
COMPILE = """
here=$(dirname "$0"); out=/tmp/classes; mkdir -p $out
javac -d $out src/main/Sum.java src/test/SumTest.java "$here/Main.java" || exit 1
"""
DEFECTS4J = f"""#!/bin/sh
[ -f .defects4j.config ] || {{ echo "not a valid working directory" >&2; exit 1; }}
{COMPILE}
[ "$1" = compile ] && exit 0
java -cp $out Main >/tmp/out
grep failed /tmp/out | while read -r class test how; do
  printf -- '--- %s::%s\\njava.lang.RuntimeException: no\\n\\tat x\\n' $class $test
done >failing_tests
echo "Failing tests: $(grep -c -- '^---' failing_tests)"
"""
MVN = f"""#!/bin/sh
{COMPILE}
mkdir -p target/surefire-reports
{{
  echo '<?xml version="1.0"?><testsuite>'
  java -cp $out Main | while read -r class test how; do
    failure=""; [ $how = ok ] || failure='<failure message="no"/>'
    echo "<testcase classname='$class' name='$test'>$failure</testcase>"
  done
  echo '</testsuite>'
}} >target/surefire-reports/TEST-SumTest.xml
exit 1
"""


def make_java_patch(path: str, old: str, new: str) -> str:
    lines = [f"-{line}" for line in old.splitlines()] + [f"+{line}" for line in new.splitlines()]
    whole = "\n".join(lines)
    return f"--- a/{path}\n+++ b/{path}\n@@ -1,{len(old.splitlines())} +1,{len(new.splitlines())} @@\n{whole}\n"


JAVA_FIX = make_java_patch("src/main/Sum.java", SUM.format("-"), SUM.format("+"))
JAVA_CHEAT = make_java_patch("src/test/SumTest.java", SUM_TEST, SUM_TEST.replace("!= 3", "!= -1"))
WITHOUT = "".join(line for line in SUM_TEST.splitlines(keepends=True) if " add()" not in line)


TOOLS = {"tools/defects4j": DEFECTS4J, "tools/mvn": MVN, "tools/Main.java": MAIN, "other.py": "x = 1\n"}


@pytest.fixture
def machine(isolating: None) -> Iterator[Bubblewrap]:
    """A sandbox with this machine's JDK."""
    need(shutil.which("javac", path="/usr/bin"), "no JDK: .ci/run installs it")
    made = Bubblewrap(processes=512)
    made.require()
    yield made
    made.close()


async def test_defects4j_expects_that_no_test_fails(machine: Bubblewrap, tmp_path: Path) -> None:
    files = {"src/main/Sum.java": SUM.format("-"), "src/test/SumTest.java": SUM_TEST, **TOOLS}
    write(tmp_path / "Toy-3b", {**files, ".defects4j.config": "pid=Toy\nvid=3b\n"})
    (tmp_path / "Toy-3b/tools/defects4j").chmod(0o755)
    row = {
        "instance_id": "defects4j__Toy-3",
        "project": "Toy",
        "bug_id": 3,
        "patch": JAVA_FIX,
        "trigger_tests": [{"test": "SumTest::add", "error": "no"}],
    }
    options = {"path": write_rows(tmp_path / "rows.jsonl", row), "checkouts": str(tmp_path)}
    [task] = make_source("defects4j", **options, program="tools/defects4j")
    assert not next(iter(make_source("defects4j", **options))).checks
    await check_verdicts(machine, task, JAVA_CHEAT)
    other = make_java_patch("src/main/Sum.java", SUM.format("-"), SUM.format("+ 2 *"))
    found = await grade(machine, task, other.replace("+ 2 * b", "- b + 2 * b * (a == 1 ? 1 : 0) + (a == 5 ? 1 : 0)"))
    assert "SumTest::zero" in found.problem, "a test that passed before fails now"
    uncompiled = await grade(machine, task, make_java_patch("src/main/Sum.java", SUM.format("-"), "no Java\n"))
    assert uncompiled.doubtful, "a control decides whose fault that is"
    await check_fault(machine, task, "echo Cannot compile; exit 1")


async def test_gitbug_java_expects_no_failure_and_the_number_of_tests_of_the_repair(
    machine: Bubblewrap, tmp_path: Path
) -> None:
    repository = tmp_path / "o/toy"
    write(repository, {"src/main/Sum.java": SUM.format("-"), "src/test/SumTest.java": WITHOUT, **TOOLS})
    commit_bug(repository)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True).stdout.strip()
    row = {
        **{**published.ROW, "instance_id": "gitbug-java__o-toy-444444444444", "base_commit": head, "patch": JAVA_FIX},
        "test_patch": make_java_patch("src/test/SumTest.java", WITHOUT, SUM_TEST),
        "FAIL_TO_PASS": ["SumTest::add"],
        "PASS_TO_PASS": ["SumTest::zero"],
    }
    options = {"path": write_rows(tmp_path / "rows.jsonl", row), "clone": str(tmp_path / "{repository}")}
    [task] = make_source("gitbug_java", **options, command="sh tools/mvn")
    assert not next(iter(make_source("gitbug_java", **options))).checks
    await check_verdicts(
        machine, task, make_java_patch("src/test/SumTest.java", WITHOUT, WITHOUT.replace("!= 5", "!= 6"))
    )
    [command] = task.checks.commands
    more = replace(task, checks=replace(task.checks, commands=(replace(command, results="gitbug_java:3"),)))
    found = await grade(machine, more, JAVA_FIX)
    assert found.problem and not found.doubtful, "a test is missing"
    await check_fault(machine, task, 'mkdir "$0"')
