"""Benchmark rules that need no package: read what tests left, as the benchmark does.

A rule gets a command's output (or files, `harness.RESULT_FILES`), the argument in `Command.results`, and the checks.
Each is exactly as strict as its benchmark, for numbers comparable with published ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from coderepairrl.grading.reports import Outcome, Outcomes, junit_cases
from coderepairrl.types import Checks


class Report(NamedTuple):
    """Verdict on a log: whether it has results, whether the task is resolved, failed tests."""

    found: bool
    resolved: bool
    failed: list[str]
    outcomes: Outcomes
    broken: str = ""
    """How the benchmark's program ended without a verdict. A log can cause that, and so can a wrong parser name: as
    with a log without results, the control decides which.
    """


_OUTCOMES = {
    **dict.fromkeys(["PASS", "PASSED", "XFAIL"], Outcome.PASSED),
    **dict.fromkeys(["SKIP", "SKIPPED"], Outcome.SKIPPED),
}


def outcome(status: str) -> Outcome:
    """Convert a status; unless passed or skipped it is a failure."""
    return _OUTCOMES.get(status, Outcome.FAILED)


def r2e_gym(log: str, argument: str, checks: Checks) -> Report:
    """R2E-Gym: exactly the tests of the repaired commit in pytest's summary, with their recorded outcomes.

    `argument` is the row's ``expected_output_json``. Source: ``r2egym/agenthub/runtime/docker.py``
    (``_calculate_reward_r2e``), ``r2egym/repo_analysis/execution_log_parser.py``.
    """
    expected = _bare(json.loads(argument))
    statuses = _bare(_summary(re.sub(r"\x1b\[[0-9;]*m|\r", "", log)))
    differ = [name for name in expected.keys() | statuses.keys() if expected.get(name) != statuses.get(name)]
    return Report(
        bool(statuses), not differ, sorted(differ), {name: outcome(status) for name, status in statuses.items()}
    )


def _bare(statuses: Mapping[str, str]) -> dict[str, str]:
    """Strip colours and messages from names; of equal ones the last by full name counts."""
    plain = {re.sub(r"\x1b\[\d+m", "", name): statuses[name] for name in statuses}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}


def _summary(log: str) -> dict[str, str]:
    parts = log.split("short test summary info")
    statuses = {}
    for line in parts[1].strip().split("\n") if len(parts) > 1 else ():
        status = next((status for status in ("PASSED", "FAILED", "ERROR") if status in line), "")
        name = ".".join(line.split("::")[1:])
        if status:
            statuses[name if status == "PASSED" else name.split(" - ")[0]] = status
    return statuses


RAN = "the tests have run; failing_tests:"
"""Line before the file, in the output of a command for `defects4j`."""


def defects4j(log: str, argument: str, checks: Checks) -> Report:
    """Defects4J: the project compiles, its tests run, and none fails.

    The log ends with `RAN` and ``failing_tests``, where ``--- CLASS::METHOD`` or ``--- CLASS`` is a failure. Tests that
    fail on a fixed version are removed at checkout. Source: ``framework/bin/d4j/d4j-test``, ``framework/core/Utils.pm``
    (``get_failing_tests``).
    """
    _, ran, text = log.rpartition(f"{RAN}\n")
    failed = ["::".join(filter(None, names)) for names in re.findall(r"--- ([^:\n]+)(?:::([^:\n]+))?", text)]
    if not ran:
        return Report(False, False, list(checks.named), {})
    outcomes = dict.fromkeys(checks.named, Outcome.PASSED) | dict.fromkeys(failed, Outcome.FAILED)
    outcomes |= {name: Outcome.FAILED for name in checks.named if name.partition("::")[0] in failed}
    return Report(True, not failed, failed, outcomes)


def gitbug_java(log: str, argument: str, checks: Checks) -> Report:
    """GitBug-Java: as many tests ran as on the repaired commit (`argument`), and none failed.

    `log` are JUnit's reports. Names are ``CLASS::NAME``. Source: ``gitbug/bug.py`` (``run``).
    """
    cases = [("::".join(filter(None, (within, name))), outcome) for within, name, outcome in junit_cases(log)]
    failed = [name for name, outcome in cases if outcome is Outcome.FAILED]
    executed = sum(outcome is not Outcome.SKIPPED for _, outcome in cases)
    outcomes: Outcomes = {}
    for name, outcome in cases:
        outcomes[name] = max(outcome, outcomes.get(name, outcome))
    missing = [name for name in checks.named if name not in outcomes] if executed != int(argument) else []
    return Report(bool(cases), not failed and executed == int(argument), [*failed, *missing], outcomes)


def swe_bench_pro(log: str, argument: str, checks: Checks) -> Report:
    """SWE-bench Pro: its parser reports every named test as passed.

    `log` is the output of the instance's ``parser.py``. Source: ``swe_bench_pro_eval.py``.
    """
    try:
        tests: list[dict[str, Any]] = json.loads(log)["tests"]
        statuses = [(str(test["name"]), str(test["status"])) for test in tests]
    except (ValueError, LookupError, TypeError, RecursionError):
        return Report(False, False, list(checks.named), {})
    passed = {name for name, status in statuses if status == "PASSED"}
    failed = [name for name in checks.named if name not in passed]
    outcomes = {name: Outcome.PASSED if name in passed else outcome(status) for name, status in statuses}
    return Report(bool(statuses), not failed, failed, outcomes)
