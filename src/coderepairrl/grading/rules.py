"""Rules by which benchmarks judge that need no package of theirs: what their tests left behind, read as they read it.

A rule is given the output of a command (or the files that it wrote, `harness.RESULT_FILES`), what the task's source
wrote behind the rule's name in `Command.results`, and the task's checks. None is stricter or more lenient than the
benchmark, since its numbers are to be compared with published ones; sources are named at each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from coderepairrl.grading.reports import Outcome, Outcomes, junit_cases
from coderepairrl.types import Checks


class Report(NamedTuple):
    """What a benchmark makes of a log: whether it has results, whether the task is resolved, which tests failed."""

    found: bool
    resolved: bool
    failed: list[str]
    outcomes: Outcomes
    broken: str = ""
    """How the benchmark's own program ended without a verdict. A log can bring that about, and so can a wrong name of a
    parser: as with a log without results, the control decides whose doing it is."""


_OUTCOMES = {
    **dict.fromkeys(["PASS", "PASSED", "XFAIL"], Outcome.PASSED),
    **dict.fromkeys(["SKIP", "SKIPPED"], Outcome.SKIPPED),
}


def outcome(status: str) -> Outcome:
    """The outcome that a status stands for; what is none of those that passed or were skipped has failed."""
    return _OUTCOMES.get(status, Outcome.FAILED)


def r2e_gym(log: str, argument: str, checks: Checks) -> Report:
    """R2E-Gym: every test of the summary of pytest ends as it did on the repaired commit, and there are no others.

    `argument` is the row's ``expected_output_json``. Source: ``r2egym/agenthub/runtime/docker.py``
    (``_calculate_reward_r2e``) and ``r2egym/repo_analysis/execution_log_parser.py``.
    """
    expected = _bare(json.loads(argument))
    found = _bare(_summary(re.sub(r"\x1b\[[0-9;]*m|\r", "", log)))
    differ = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    return Report(bool(found), not differ, sorted(differ), {name: outcome(status) for name, status in found.items()})


def _bare(statuses: Mapping[str, str]) -> dict[str, str]:
    """Without colours and messages in the names; of those that are then the same, the last one by the whole name."""
    plain = {re.sub(r"\x1b\[\d+m", "", name): statuses[name] for name in statuses}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}


def _summary(log: str) -> dict[str, str]:
    parts = log.split("short test summary info")
    found = {}
    for line in parts[1].strip().split("\n") if len(parts) > 1 else ():
        status = next((status for status in ("PASSED", "FAILED", "ERROR") if status in line), "")
        name = ".".join(line.split("::")[1:])
        if status:
            found[name if status == "PASSED" else name.split(" - ")[0]] = status
    return found


RAN = "the tests have run; failing_tests:"
"""Before the file, in the output of a command for `defects4j`."""


def defects4j(log: str, argument: str, checks: Checks) -> Report:
    """Defects4J: the project compiles, its tests run, and none of them fails.

    The log ends with a line `RAN` and the file ``failing_tests``, in which ``--- CLASS::METHOD``, or ``--- CLASS``,
    names a test, or tests, that failed. A fixed version has none: those that fail there are taken out of a checkout.
    Source: ``framework/bin/d4j/d4j-test`` and ``framework/core/Utils.pm`` (``get_failing_tests``).
    """
    _, ran, text = log.rpartition(f"{RAN}\n")
    failed = ["::".join(filter(None, names)) for names in re.findall(r"--- ([^:\n]+)(?:::([^:\n]+))?", text)]
    if not ran:
        return Report(False, False, list(checks.named), {})
    outcomes = dict.fromkeys(checks.named, Outcome.PASSED) | dict.fromkeys(failed, Outcome.FAILED)
    outcomes |= {name: Outcome.FAILED for name in checks.named if name.partition("::")[0] in failed}
    return Report(True, not failed, failed, outcomes)


def gitbug_java(log: str, argument: str, checks: Checks) -> Report:
    """GitBug-Java: as many tests were executed as on the repaired commit (`argument`), and none of them failed.

    `log` are the files of JUnit's reports. Names are ``CLASS::NAME``. Source: ``gitbug/bug.py`` (``run``).
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
    """SWE-bench Pro: every named test is among those that its parser reports as passed.

    `log` is the object that ``parser.py`` of the instance writes. Source: ``swe_bench_pro_eval.py``.
    """
    try:
        tests: list[dict[str, Any]] = json.loads(log)["tests"]
        found = [(str(test["name"]), str(test["status"])) for test in tests]
    except (ValueError, LookupError, TypeError, RecursionError):
        return Report(False, False, list(checks.named), {})
    passed = {name for name, status in found if status == "PASSED"}
    failed = [name for name in checks.named if name not in passed]
    outcomes = {name: Outcome.PASSED if name in passed else outcome(status) for name, status in found}
    return Report(bool(found), not failed, failed, outcomes)
