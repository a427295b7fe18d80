"""The harness of SWE-bench judges logs by its own rules."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import GraderFault, SandboxFault
from coderepairrl.grading import harness, judge_sandbox, programs
from coderepairrl.protocols import SandboxBackend
from coderepairrl.sandbox.fake import ScriptedSandbox
from coderepairrl.tasks.prepare import prepare_tasks
from coderepairrl.types import Checks, Command, Task
from rewards.folder import grade_in_sandbox

RESULTS = "swebench:parse_log_pytest?eval_type=pass_and_fail&instance_id=a__b-1&version=1.0"


def make_checks(script: str = "true", **named: tuple[str, ...]) -> Checks:
    return Checks((Command(("sh", "-c", script), results=RESULTS),), {}, **named)


def test_a_log_that_breaks_a_parser_is_a_failed_attempt() -> None:
    """A patch that prints it gets a score, and does not end the run."""
    results = RESULTS.replace("parse_log_pytest", "parse_log_django")
    report = harness.judge_log("a ... ok\nFAIL:\n", results, make_checks(fail_to_pass=("a",)))
    assert not report.resolved and not report.found and report.failed == ["a"] and "IndexError" in report.broken


def test_a_log_that_a_parser_warns_about_is_a_failed_attempt() -> None:
    """Maven's parser prints a warning about tests without a result, if the build of a patch fails."""
    results = RESULTS.replace("parse_log_pytest", "parse_log_maven")
    log = "+ mvn test -B -pl a -Dtest=T#a\n[INFO] BUILD SUCCESS\n+ mvn test -B -pl a -Dtest=T#b\n"
    report = harness.judge_log(log, results, make_checks(fail_to_pass=("T#a", "T#b")))
    assert (report.found, report.resolved, report.failed) == (True, False, ["T#b"])


ORACLE = """
import importlib.util, json, sys, types
[root] = importlib.util.find_spec("swebench").submodule_search_locations
sys.modules["swebench.harness"] = bare = types.ModuleType("swebench.harness")  # its own imports docker and more
bare.__path__ = [root + "/harness"]
from swebench.harness.grading import EvalType, get_eval_tests_report, get_resolution_status
for line in sys.stdin:
    asked = json.loads(line)
    names = {"FAIL_TO_PASS": asked["fail_to_pass"], "PASS_TO_PASS": asked["pass_to_pass"]}
    report = get_eval_tests_report(asked["map"], names, eval_type=EvalType(asked["eval_type"]))
    print(get_resolution_status(report), flush=True)
"""


def random_case(draw: random.Random) -> dict[str, object]:
    """Named tests, whole or cut within their brackets, and how some of them ended, beside others."""
    parts = ["a", "b[x]", "b[x-y]", "b[x-z]", "c[1-[2]]", "c[1-[3]]", "d.e", "f"]
    tests = [f"t{number}.py::test_{part}" for number in range(2) for part in parts]
    weights = draw.choice([(1, 1, 1, 1, 1), (30, 1, 1, 3, 3)])
    statuses = draw.choices(["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"], weights, k=len(tests))
    found = {name: status for name, status in zip(tests, statuses, strict=True) if draw.random() < 0.95}
    named = [
        name.partition("-")[0] if draw.random() < 0.4 else name for name in draw.sample(tests, k=draw.randint(1, 6))
    ]
    at = draw.randint(1, len(named))
    return {"map": found or {"other": "PASSED"}, "fail_to_pass": named[:at], "pass_to_pass": named[at:]}


def test_verdicts_on_random_status_maps_are_the_harness_s() -> None:
    """2,000 maps, printed as a log and judged, against its functions on the maps themselves; FAIL_ONLY, too."""
    draw = random.Random(16)
    cases = [random_case(draw) | {"eval_type": draw.choice(["pass_and_fail", "fail_only"])} for _ in range(2_000)]
    about = {"parser": "parse_log_pytest", "instance_id": "a__b-1", "version": "1.0"}
    logs = ["".join(f"{status} {name}\n" for name, status in case["map"].items()) for case in cases]  # type: ignore[attr-defined]
    asked = [{**case, **about, "log": log} for case, log in zip(cases, logs, strict=True)]

    def answers(program: str, lines: list[dict[str, object]]) -> list[str]:
        command = [str(harness.SWEBENCH.install() / "bin/python"), "-I", "-c", program]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.splitlines()

    ours = [json.loads(line) for line in answers(programs.SWEBENCH_REPORT, asked)]
    real = [line == "RESOLVED_FULL" for line in answers(ORACLE, cases)]
    assert [each["statuses"] for each in ours] == [case["map"] for case in cases]
    assert [each["resolved"] for each in ours] == real and len(real) == 2_000
    for kind in ("pass_and_fail", "fail_only"):
        share = sum(good for good, case in zip(real, cases, strict=True) if case["eval_type"] == kind) / 2_000
        assert 0.05 < share < 0.45, "both verdicts occur"


FLOOD = (b"x" * 1_999 + b"\n") * 34_000
PRINTED = {
    "node": b"TAP version 13\nok 1 - a\n",
    "junit": b"<testsuite><testcase name='a'/></testsuite>",
    "unittest": b"a ... ok\n",
    "defects4j:": f"{harness.RAN}\n".encode(),
}


@pytest.mark.parametrize("results", PRINTED)
async def test_results_before_an_output_that_is_cut_off_do_not_count(results: str) -> None:
    """Code under test may print results, and then more output than is read."""
    named = Checks((Command(("run",), results=results),), {}, ("a",))
    for flood, passes in ((b"", True), (FLOOD, False)):
        printed = PRINTED[results] + flood
        verdict = await judge_sandbox(ScriptedSandbox({}, {"run": printed, "sh": printed}), named)
        assert (verdict.problem == "") is passes and verdict.doubtful is not passes, verdict


@pytest.fixture
def chosen(isolating: None) -> Iterator[SandboxBackend]:
    """The sandbox that this machine isolates with."""
    backend = sandbox.make_backend(sandbox.choose_backend().name)
    yield backend
    backend.close()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/a.txt").write_text("".join(f"{number}\n" for number in range(30)))
    checks = make_checks("cat results", fail_to_pass=("t.py::a",))
    return Task("a", "p", "text", f"dir:{tmp_path}/w", b"", checks=checks)


FUZZY = b"""--- a/a.txt
+++ b/a.txt
@@ -13,5 +13,5 @@
 other
 12
-13
+thirteen
 14
 15
"""


@pytest.mark.parametrize(("patch", "problem"), [(FUZZY, ""), (b"--- a/b\n+++ b/b\n@@ -1 +1 @@\n-x\n+y\n", "not even")])
async def test_patches_apply_as_leniently_as_in_the_harness(
    task: Task, patch: bytes, problem: str, chosen: SandboxBackend
) -> None:
    """A different line of context is accepted, a missing file is not."""
    async with chosen.open(task) as box:
        refused = await harness.apply_by_rules(box, patch, harness.RULES["swebench"])
        assert problem in refused and bool(problem) == bool(refused)
        assert (b"thirteen" in await box.read("a.txt")) is not bool(problem)


@pytest.mark.parametrize(
    ("rules", "lacking"), [("swebench", "patch"), ("multi_swe_bench", "git"), ("swe_bench_pro", "python")]
)
async def test_without_a_program_that_it_needs_there_is_no_verdict(
    task: Task, rules: str, lacking: str, chosen: SandboxBackend
) -> None:
    """As in an image that lacks it: a fault that names the program, not a failed patch."""
    linked = "mkdir /tmp/bin; cd /tmp/bin; ln -s $(command -v bash) python"
    linked += "; for name in bash cat git mktemp patch; do ln -s $(command -v $name) .; done"
    async with chosen.open(task) as box:
        assert (await box.exec(["sh", "-c", f"{linked}; rm {lacking}"])).ok
        run = box.exec
        box.exec = lambda argv, **more: run(["env", "PATH=/tmp/bin", *argv], **more)  # type: ignore[method-assign]
        with pytest.raises(SandboxFault, match=lacking) as caught:
            await harness.apply_by_rules(box, FUZZY, harness.RULES[rules])
    assert lacking in caught.value.fix


async def test_the_output_of_a_command_is_judged(task: Task, chosen: SandboxBackend) -> None:
    """An unknown parser gives no verdict on the patch."""
    for line, resolved in (("PASSED t.py::a", True), ("FAILED t.py::a - no", False)):
        patch = f"--- /dev/null\n+++ b/results\n@@ -0,0 +1 @@\n+{line}\n".encode()
        verdict = await grade_in_sandbox(task, patch, chosen)
        assert (not verdict.problem) is resolved, verdict
    nothing = await grade_in_sandbox(task, b"", chosen)
    assert nothing.problem.startswith("no test reported a result") and nothing.doubtful
    [command] = task.checks.commands
    unknown = replace(command, results="swebench:parse_log_nonsense")
    verdict = await grade_in_sandbox(replace(task, checks=replace(task.checks, commands=(unknown,))), b"", chosen)
    assert verdict.doubtful and "KeyError: 'parse_log_nonsense'" in verdict.problem


async def test_preparing_installs_the_harness(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing harness is a fault of the grader, neither a zero nor the end of a run."""
    await prepare_tasks([task])
    assert (harness.SWEBENCH.install() / "bin/python").exists()
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(GraderFault, match="package that judges for swebench cannot be installed") as caught:
        harness.judge_log("PASSED t.py::a\n", RESULTS, task.checks)
    assert "crrl tasks prepare" in caught.value.fix
