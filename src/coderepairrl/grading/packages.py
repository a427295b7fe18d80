"""Rules in the benchmarks' packages, each in a separate environment.

Their parsers read the log and their functions decide (`programs`), so that verdicts equal published ones. Versions are
pinned; dependencies unused in judging are left out.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from coderepairrl.errors import GraderFault, PrerequisiteError
from coderepairrl.grading import programs
from coderepairrl.grading.rules import Report, outcome
from coderepairrl.processes.installs import tool
from coderepairrl.types import Checks

_SECONDS = 120.0
_SHOWN = 200


@dataclass(frozen=True)
class Package:
    """Package of a benchmark: environment, program, and how to ask it."""

    name: str
    requirements: tuple[str, ...]
    program: str
    asked: Callable[[str, Checks], dict[str, Any]]

    def install(self) -> Path:
        """Environment, cached or made now. Raises `PrerequisiteError`."""
        return tool(self.name, self.requirements)

    def ask(self, questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Ask the program; answers in order. Raises CalledProcessError, TimeoutExpired, `PrerequisiteError`."""
        lines = "".join(f"{json.dumps(each)}\n" for each in questions)
        command = [str(self.install() / "bin/python"), "-I", "-c", self.program]
        done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=_SECONDS, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def __call__(self, log: str, argument: str, checks: Checks) -> Report:
        """Verdict on `log`. Raises `GraderFault` if the package cannot be installed."""
        try:
            [answer] = self.ask([{"log": log, **self.asked(argument, checks)}])
        except PrerequisiteError as error:
            raise GraderFault(
                f"the package that judges for {self.name} is not there: {error}",
                fix="prepare the tasks on a machine with a network (crrl tasks prepare)",
            ) from error
        except subprocess.TimeoutExpired:
            return Report(False, False, list(checks.named), {}, f"no end within {_SECONDS:g} s")
        except subprocess.CalledProcessError as error:
            last = error.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return Report(False, False, list(checks.named), {}, last[:_SHOWN] or f"exit code {error.returncode}")
        outcomes = {name: outcome(status) for name, status in answer["statuses"].items()}
        return Report(answer["found"], answer["resolved"], answer["failed"], outcomes)


def _named(checks: Checks) -> dict[str, Any]:
    return {"fail_to_pass": list(checks.fail_to_pass), "pass_to_pass": list(checks.pass_to_pass)}


def _swebench(argument: str, checks: Checks) -> dict[str, Any]:
    """Parser's name with options as a query (``parse_log_jest?eval_type=fail_only``)."""
    parser, _, more = argument.partition("?")
    defaults = {"eval_type": "pass_and_fail", "instance_id": "", "version": ""}
    return {"parser": parser, **defaults, **dict(parse_qsl(more)), **_named(checks)}


def _multi_swe_bench(argument: str, checks: Checks) -> dict[str, Any]:
    """Object with ``org``, ``repo``, ``tag``, ``number_interval`` and recorded test names.

    ``fail``, ``skip``, and ``pass`` (if not in the checks) are with the tests' patch alone; ``ran`` passed without any
    patch, but neither passed nor failed with it.
    """
    about = json.loads(argument)
    recorded = {
        "PASS": [*checks.pass_to_pass, *about.pop("pass")],
        "FAIL": about.pop("fail"),
        "SKIP": about.pop("skip"),
    }
    test = {name: status for status, names in recorded.items() for name in names}
    return {**about, "test": test, "run": dict.fromkeys(about.pop("ran"), "PASS"), "named": list(checks.named)}


def _swe_smith(argument: str, checks: Checks) -> dict[str, Any]:
    return {**json.loads(argument), **_named(checks)}


SWEBENCH = Package("swebench", ("swebench==5.0.2", "unidiff==0.7.5"), programs.SWEBENCH_REPORT, _swebench)
"""Verdicts as published, and no stricter: tests whose names were cut in the published lists pass by prefix, a skipped
PASS_TO_PASS test is no regression, and a log with ``PASSED`` lines is believed. Rewards that are trained on should ask
pytest (``results = "pytest"``). MIT licence.
"""
MULTI_SWE_BENCH = Package(
    "multi-swe-bench",
    (
        "multi-swe-bench==1.1.2", "dataclasses-json==0.6.7", "marshmallow==3.26.2", "mypy-extensions==1.2.0",
        "packaging==26.3", "typing-extensions==4.16.0", "typing-inspect==0.9.0", "unidiff==0.7.5",
    ),
    programs.MULTI_SWE_BENCH_REPORT,
    _multi_swe_bench,
)  # fmt: skip
"""A log parser per repository, and its rules: nothing fails that passed, and all passes that should. Apache-2.0."""
SWE_SMITH = Package(
    "swe-smith", ("swesmith==0.0.9", "swebench==4.1.0", "unidiff==0.7.5"), programs.SWE_SMITH_REPORT, _swe_smith
)
"""A command, a log parser and test files per repository. MIT licence."""
