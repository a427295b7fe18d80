"""Judging by a benchmark's procedure: its way of applying patches, its script, its rules for the log.

Applies to a `Command` whose `results` is ``NAME:ARGUMENT`` with a NAME in `RULES`. A rule gets the command's output (or
its `RESULT_FILES`), the argument, and the checks, and is exactly as strict as its benchmark: a function of ours, or the
benchmark's own package (`Package`), whose parsers and functions give the published verdicts.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from coderepairrl.errors import GraderFault, PrerequisiteError, SandboxFault
from coderepairrl.grading import programs
from coderepairrl.grading.reports import Outcome, Outcomes, merge_outcomes, read_junit_cases
from coderepairrl.processes.installs import install_tool
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks, Command, ExecResult

_PACKAGE_SECONDS = 120.0
_SHOWN_CHARS = 200


@dataclass(frozen=True)
class Package:
    """Package of a benchmark, and the program that asks it for verdicts."""

    name: str
    requirements: tuple[str, ...]
    program: str
    make_question: Callable[[str, Checks], dict[str, Any]]

    def install(self) -> Path:
        """Install it unless cached; return the environment. Raises `PrerequisiteError`."""
        return install_tool(self.name, self.requirements)

    def ask(self, questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Ask the program; answers in order. Raises CalledProcessError, TimeoutExpired, `PrerequisiteError`."""
        lines = "".join(f"{json.dumps(each)}\n" for each in questions)
        command = [str(self.install() / "bin/python"), "-I", "-c", self.program]
        done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=_PACKAGE_SECONDS, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def __call__(self, log: str, argument: str, checks: Checks) -> HarnessReport:
        """Verdict on `log`. Raises `GraderFault` if the package cannot be installed."""
        try:
            [answer] = self.ask([{"log": log, **self.make_question(argument, checks)}])
        except PrerequisiteError as error:
            raise GraderFault(
                f"the package that judges for {self.name} cannot be installed: {error}",
                fix="prepare the tasks on a machine with a network (crrl tasks prepare)",
            ) from error
        except subprocess.TimeoutExpired:
            return report_no_results(checks, f"not finished within {_PACKAGE_SECONDS:g} s")
        except subprocess.CalledProcessError as error:
            last = error.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return report_no_results(checks, last[:_SHOWN_CHARS] or f"exit code {error.returncode}")
        outcomes = {name: parse_status(status) for name, status in answer["statuses"].items()}
        return HarnessReport(answer["found"], answer["resolved"], answer["failed"], outcomes)


def _list_named_tests(checks: Checks) -> dict[str, Any]:
    return {"fail_to_pass": list(checks.fail_to_pass), "pass_to_pass": list(checks.pass_to_pass)}


def _make_swebench_question(argument: str, checks: Checks) -> dict[str, Any]:
    """Read a parser's name with options as a query (``parse_log_jest?eval_type=fail_only``)."""
    parser, _, options = argument.partition("?")
    defaults = {"eval_type": "pass_and_fail", "instance_id": "", "version": ""}
    return {"parser": parser, **defaults, **dict(parse_qsl(options)), **_list_named_tests(checks)}


def _make_multi_swe_bench_question(argument: str, checks: Checks) -> dict[str, Any]:
    """Read ``org``, ``repo``, ``tag``, ``number_interval`` and recorded test names.

    ``fail``, ``skip``, and ``pass`` (if not in the checks) are outcomes with the tests' patch alone; ``ran`` passed
    without any patch, but neither passed nor failed with the tests' patch.
    """
    row = json.loads(argument)
    names_by_status = {
        "PASS": [*checks.pass_to_pass, *row.pop("pass")],
        "FAIL": row.pop("fail"),
        "SKIP": row.pop("skip"),
    }
    with_tests_patch = {name: status for status, names in names_by_status.items() for name in names}
    without_patch = dict.fromkeys(row.pop("ran"), "PASS")
    return {**row, "test": with_tests_patch, "run": without_patch, "named": list(checks.named)}


SWEBENCH = Package("swebench", ("swebench==5.0.2", "unidiff==0.7.5"), programs.SWEBENCH_REPORT, _make_swebench_question)
"""Verdicts are as published, and no stricter: tests whose names are cut in the published lists pass by prefix, a
skipped PASS_TO_PASS test is not a regression, and a log with ``PASSED`` lines is believed. Rewards for training should
use pytest (``results = "pytest"``). MIT licence.
"""
MULTI_SWE_BENCH = Package(
    "multi-swe-bench",
    (
        "multi-swe-bench==1.1.2", "dataclasses-json==0.6.7", "marshmallow==3.26.2", "mypy-extensions==1.2.0",
        "packaging==26.3", "typing-extensions==4.16.0", "typing-inspect==0.9.0", "unidiff==0.7.5",
    ),
    programs.MULTI_SWE_BENCH_REPORT,
    _make_multi_swe_bench_question,
)  # fmt: skip
"""Has a log parser per repository. No test that passed may fail, and all named ones must pass. Apache-2.0."""
SWE_SMITH = Package(
    "swe-smith",
    ("swesmith==0.0.9", "swebench==4.1.0", "unidiff==0.7.5"),
    programs.SWE_SMITH_REPORT,
    lambda argument, checks: {**json.loads(argument), **_list_named_tests(checks)},
)
"""Has a command, a log parser and test files per repository. MIT licence."""


class HarnessReport(NamedTuple):
    """Verdict on a log: whether it has results, whether the task is resolved, failed tests."""

    found: bool
    resolved: bool
    failed: list[str]
    outcomes: Outcomes
    broken: str = ""
    """Error of the benchmark's program. The log or a wrong parser name can cause it; as for a log without results, a
    control run on the reference decides.
    """


def report_no_results(checks: Checks, broken: str = "") -> HarnessReport:
    """Verdict on a log without results."""
    return HarnessReport(False, False, list(checks.named), {}, broken)


_OUTCOME_BY_STATUS = {
    **dict.fromkeys(["PASS", "PASSED", "XFAIL"], Outcome.PASSED),
    **dict.fromkeys(["SKIP", "SKIPPED"], Outcome.SKIPPED),
}


def parse_status(status: str) -> Outcome:
    """Convert a status; unless passed or skipped it is a failure."""
    return _OUTCOME_BY_STATUS.get(status, Outcome.FAILED)


def r2e_gym(log: str, argument: str, checks: Checks) -> HarnessReport:
    """R2E-Gym: exactly the tests of the repaired commit in pytest's summary, with their recorded outcomes.

    `argument` is the row's ``expected_output_json``. Source: ``r2egym/agenthub/runtime/docker.py``
    (``_calculate_reward_r2e``), ``r2egym/repo_analysis/execution_log_parser.py``.
    """
    expected = _strip_names(json.loads(argument))
    without_colours = re.sub(r"\x1b\[[0-9;]*m|\r", "", log)
    statuses = _strip_names(_parse_statuses(without_colours))
    differ = [name for name in expected.keys() | statuses.keys() if expected.get(name) != statuses.get(name)]
    return HarnessReport(
        bool(statuses), not differ, sorted(differ), {name: parse_status(status) for name, status in statuses.items()}
    )


def _strip_names(statuses: Mapping[str, str]) -> dict[str, str]:
    """Strip colours and messages from names; of names that become equal, the last in sorted order counts."""
    plain = {re.sub(r"\x1b\[\d+m", "", name): statuses[name] for name in statuses}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}


def _parse_statuses(log: str) -> dict[str, str]:
    parts = log.split("short test summary info")
    statuses = {}
    for line in parts[1].strip().split("\n") if len(parts) > 1 else ():
        name = ".".join(line.split("::")[1:])
        if status := next((status for status in ("PASSED", "FAILED", "ERROR") if status in line), ""):
            statuses[name if status == "PASSED" else name.split(" - ")[0]] = status
    return statuses


RAN = "the tests have run; failing_tests:"
"""Line before ``failing_tests``, in the output of a command for `defects4j`."""


def defects4j(log: str, argument: str, checks: Checks) -> HarnessReport:
    """Defects4J: the project compiles, its tests run, and none fails.

    The log ends with `RAN` and ``failing_tests``, where ``--- CLASS::METHOD`` or ``--- CLASS`` is a failure. Tests that
    fail on a fixed version are removed at checkout. Source: ``framework/bin/d4j/d4j-test``, ``framework/core/Utils.pm``
    (``get_failing_tests``).
    """
    _, ran, text = log.rpartition(f"{RAN}\n")
    failed = ["::".join(filter(None, names)) for names in re.findall(r"--- ([^:\n]+)(?:::([^:\n]+))?", text)]
    if not ran:
        return report_no_results(checks)
    outcomes = dict.fromkeys(checks.named, Outcome.PASSED) | dict.fromkeys(failed, Outcome.FAILED)
    outcomes |= {name: Outcome.FAILED for name in checks.named if name.partition("::")[0] in failed}
    return HarnessReport(True, not failed, failed, outcomes)


def gitbug_java(log: str, argument: str, checks: Checks) -> HarnessReport:
    """GitBug-Java: as many tests ran as on the repaired commit (`argument`), and none failed.

    `log` are JUnit's reports. Names are ``CLASS::NAME``. Source: ``gitbug/bug.py`` (``run_harness_command``).
    """
    cases = [("::".join(filter(None, (within, name))), outcome) for within, name, outcome in read_junit_cases(log)]
    failed = [name for name, outcome in cases if outcome is Outcome.FAILED]
    executed = sum(outcome is not Outcome.SKIPPED for _, outcome in cases)
    outcomes = merge_outcomes(cases)
    missing = [name for name in checks.named if name not in outcomes] if executed != int(argument) else []
    return HarnessReport(bool(cases), not failed and executed == int(argument), [*failed, *missing], outcomes)


def swe_bench_pro(log: str, argument: str, checks: Checks) -> HarnessReport:
    """SWE-bench Pro: its parser reports every named test as passed.

    `log` is the output of the instance's ``parser.py``. Source: ``swe_bench_pro_eval.py``.
    """
    try:
        tests: list[dict[str, Any]] = json.loads(log)["tests"]
        statuses = [(str(test["name"]), str(test["status"])) for test in tests]
    except (ValueError, LookupError, TypeError, RecursionError):
        return report_no_results(checks)
    passed = {name for name, status in statuses if status == "PASSED"}
    failed = [name for name in checks.named if name not in passed]
    outcomes = {name: Outcome.PASSED if name in passed else parse_status(status) for name, status in statuses}
    return HarnessReport(bool(statuses), not failed, failed, outcomes)


# SWE-bench's attempts at applying a patch, in its order, the tree restored after each failure
_SWEBENCH_APPLY = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
_SWE_SMITH_APPLY = ("git apply --verbose", "git apply --verbose --reject", "patch --batch --fuzz=5 -p1 -i")
# programs of both lists
_APPLY_PROGRAMS = "git patch mktemp"
_RESET_TREE = "git checkout -- . ; git clean -fd"
# exits with 2 if a program is missing, before a patch could remove it: then there is no verdict
_REQUIRE_PROGRAMS = 'for name in {}; do command -v $name >/dev/null || {{ echo "it has no $name"; exit 2; }}; done\n'
FIX_PATCH = "/home/fix.patch"
"""Path of the patch in Multi-SWE-bench's scripts, which apply it with the tests' patch."""
_APPLY_SECONDS = 120.0
# limit of a log; a longer one counts as empty (`run_and_read`)
_LOG_BYTES = 64 << 20
_TEST_FOLDERS = ("test/*", "*/test/*", "tests/*", "*/tests/*")
_BINARY = re.compile(rb"^(Binary files .* differ|GIT binary patch)$", re.MULTILINE)
RESULT_FILES = "{results}"
"""Placeholder in a command for the random path of the runner's result files, outside the workspace."""
# prints the result files at a path; those of a folder each end with NUL
_READ_RESULTS = r"""
each='for file; do cat "$file"; printf "\0"; done'
if [ -d "$0" ]; then find "$0" -type f -name '*.xml' -exec sh -c "$each" sh {} +; else cat "$0"; fi
rm -rf "$0"
"""


class Rules(NamedTuple):
    """Rules of a benchmark: what decides, and how patches are applied."""

    judge: Callable[[str, str, Checks], HarnessReport]
    apply: str = ""
    """Script that applies the patch on standard input; exit code 1: does not apply. Without one, patches are applied
    as for other checks.
    """
    programs: str = "git"
    """Programs besides bash that `apply` and the checks run in the image, separated by spaces."""
    excluded: tuple[str, ...] = ()
    """Patterns of files that a patch may not change if there is no `apply`."""
    applies_binary: bool = True
    """Whether changes of binary files are applied."""
    needs_named_tests: bool = False
    """Whether only tests named in `Checks` decide, so that without `fail_to_pass` every patch would pass."""


def _make_apply_script(commands: Iterable[str], last: str) -> str:
    tries = "".join(f'{command} "$patch" && exit 0; {_RESET_TREE}; ' for command in commands)
    return f'patch=$(mktemp) && cat >"$patch" || exit 2\n{tries}\n{last}'


RULES = {
    "swebench": Rules(
        SWEBENCH,
        _make_apply_script(_SWEBENCH_APPLY, 'git apply --check --reverse "$patch" && exit 0\nexit 1\n'),
        _APPLY_PROGRAMS,
        needs_named_tests=True,
    ),
    "multi_swe_bench": Rules(MULTI_SWE_BENCH, f"cat >{FIX_PATCH} || exit 2"),
    "swe_smith": Rules(
        SWE_SMITH, _make_apply_script(_SWE_SMITH_APPLY, "exit 1"), _APPLY_PROGRAMS, needs_named_tests=True
    ),
    "swe_bench_pro": Rules(
        swe_bench_pro, "git apply -v - || exit 1", "git mktemp python", applies_binary=False, needs_named_tests=True
    ),
    "r2e_gym": Rules(r2e_gym, excluded=("run_tests.sh", "r2e_tests", "r2e_tests/*")),
    "defects4j": Rules(
        defects4j, excluded=(*_TEST_FOLDERS, ".defects4j.config", "defects4j.build.properties", "failing_tests")
    ),
    "gitbug_java": Rules(gitbug_java, excluded=_TEST_FOLDERS),
}


def find_rules(results: str) -> Rules | None:
    """Rules that `Command.results` names, or None."""
    name, colon, _ = results.partition(":")
    return RULES.get(name) if colon else None


def find_benchmark_rules(checks: Checks) -> Rules | None:
    """Rules of the benchmark that judges these checks, or None."""
    return next(filter(None, (find_rules(command.results) for command in checks.commands)), None)


def install_judges(checks: Iterable[Checks]) -> None:
    """Install the packages that judge these checks. Raises `PrerequisiteError`."""
    judges = {rules.judge for rules in map(find_benchmark_rules, checks) if rules is not None}
    for judge in judges:
        if isinstance(judge, Package):
            judge.install()


async def apply_by_rules(sandbox: Sandbox, patch: bytes, rules: Rules) -> str:
    """Apply `patch` as the benchmark does; return why that fails, or "". Raises `SandboxFault`."""
    if not patch.strip():
        return ""
    if not rules.applies_binary:
        parts = re.split(rb"(?=^diff --git )", patch, flags=re.MULTILINE)
        patch = b"".join(part for part in parts if not _BINARY.search(part))
    script = _REQUIRE_PROGRAMS.format(rules.programs) + rules.apply
    done = await sandbox.exec(["bash", "-c", script], stdin=patch, timeout=_APPLY_SECONDS)
    if done.timed_out:  # a patch can be made to take long
        return f"the patch could not be tried within {_APPLY_SECONDS:g} s"
    if done.exit_code not in (0, 1):
        reason = done.output[-200:].decode("utf-8", "replace").strip()
        required = f"the sandbox (its image, if it has one) needs bash, {', '.join(rules.programs.split())}"
        raise SandboxFault(f"the patch could not be tried in the sandbox: {reason}", fix=required)
    return "" if done.ok else "the patch does not apply, not even with fuzz"


async def run_harness_command(sandbox: Sandbox, command: Command, checks: Checks) -> tuple[HarnessReport, bool]:
    """Run `command` and let the benchmark judge its log; also return whether it timed out.

    Raises `SandboxFault`, and `GraderFault` if the benchmark's package cannot be installed.
    """
    result, log = await run_and_read(sandbox, command, command.argv, _LOG_BYTES)
    if result.timed_out:
        return report_no_results(checks), True
    return await asyncio.to_thread(judge_log, log, command.results, checks), False


async def run_and_read(
    sandbox: Sandbox, command: Command, argv: Sequence[str], max_bytes: int, stdin: bytes = b""
) -> tuple[ExecResult, str]:
    """Run `argv` for `command`; also return what it prints, or writes to `RESULT_FILES`. Raises `SandboxFault`.

    Output beyond `max_bytes` counts as empty: it could begin with forged passes and hide the failures.
    """
    path = f"/tmp/crrl-{secrets.token_hex(16)}"
    words = [word.replace(RESULT_FILES, path) for word in argv]
    result = await sandbox.exec(words, stdin=stdin, timeout=command.timeout, max_bytes=max_bytes)
    decisive = result
    if any(RESULT_FILES in word for word in argv) and not result.timed_out:
        decisive = await sandbox.exec(["sh", "-c", _READ_RESULTS, path], max_bytes=max_bytes)
    if decisive.truncated:
        note = f"\nit printed or wrote more than {max_bytes >> 20} MiB"
        return replace(result, output=result.output + note.encode()), ""
    return result, decisive.output.decode("utf-8", "replace")


def judge_log(log: str, results: str, checks: Checks) -> HarnessReport:
    """Judge `log` by the benchmark's rules. Raises `GraderFault` if their package cannot be installed."""
    name, _, argument = results.partition(":")
    return RULES[name].judge(log, argument, checks)
