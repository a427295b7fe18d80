"""The verdict of a benchmark's own harness: its parsers read the log of a task's tests, its rules decide.

A `Command` whose `results` is ``swebench:PARSER`` is judged so, by the parser that a row of the benchmark names; what
else some parsers ask for follows like a query (``swebench:parse_log_jest?eval_type=fail_only&version=3.0``). Verdicts
equal published ones, and are no stricter than they are: tests whose names were cut in the published lists pass by
prefix, a skipped test of PASS_TO_PASS is no regression, and a log that prints ``PASSED`` lines is believed. Rewards
that are trained on should ask pytest itself (``results = "pytest"``).

Source: swebench (MIT licence), the version that is pinned here, in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from coderepairrl.errors import GraderFault, PrerequisiteError, SandboxFault
from coderepairrl.grading import programs
from coderepairrl.grading.reports import Outcome, Outcomes
from coderepairrl.processes.installs import tool
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks, Command

PREFIX = "swebench:"
PACKAGES = ("swebench==5.0.2", "unidiff==0.7.5")
_APPLY = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
"""The harness's attempts at a patch, in its order; after each that fails the tree is put back."""
_RESET = "git checkout -- . ; git clean -fd"
_TRY = f"""
patch=$(mktemp) && cat >"$patch" || exit 2
{"".join(f'{command} "$patch" && exit 0; {_RESET}; ' for command in _APPLY)}
git apply --check --reverse "$patch" && exit 0
exit 1
"""
_APPLY_SECONDS = 120.0
_LOG_BYTES = 64 << 20
_REPORT_SECONDS = 120.0
_SHOWN = 200
_DEFAULTS = {"eval_type": "pass_and_fail", "instance_id": "", "version": ""}
_PASSED = {"PASSED", "XFAIL"}


class Report(NamedTuple):
    """What the harness makes of a log: whether it has results, whether the instance is resolved, which tests failed."""

    found: bool
    resolved: bool
    failed: list[str]
    outcomes: Outcomes
    broken: str = ""
    """How the harness itself ended without a verdict. A log can bring that about, and so can a wrong name of a parser:
    as with a log without results, the control decides whose doing it is."""


def install() -> Path:
    """The environment of the harness, from the cache or made now. Raises `PrerequisiteError`."""
    return tool("swebench", PACKAGES)


def judges(checks: Checks) -> bool:
    """Whether the harness judges these checks."""
    return any(command.results.startswith(PREFIX) for command in checks.commands)


async def apply(sandbox: Sandbox, patch: bytes) -> str:
    """Apply `patch` as the harness does, leniently; why that is impossible, or nothing. Raises `SandboxFault`."""
    if not patch.strip():
        return ""
    done = await sandbox.exec(["bash", "-c", _TRY], stdin=patch, timeout=_APPLY_SECONDS)
    if done.timed_out:  # a patch can be made to take long
        return f"the patch could not be tried within {_APPLY_SECONDS:g} s"
    if done.exit_code not in (0, 1):
        why = done.output[-200:].decode("utf-8", "replace").strip()
        raise SandboxFault(f"the patch could not be tried: {why}", fix="the sandbox needs git and patch")
    return "" if done.ok else "the patch does not apply, not even with fuzz"


async def run(sandbox: Sandbox, command: Command, checks: Checks) -> tuple[Report, bool]:
    """Run `command` and let the harness judge its log; and whether it ran out of time.

    Raises `SandboxFault`, and `GraderFault` where the harness is not installed and cannot be.
    """
    result = await sandbox.exec(command.argv, timeout=command.timeout, max_bytes=_LOG_BYTES)
    if result.timed_out:
        return Report(False, False, list(checks.named), {}), True
    log = result.output.decode("utf-8", "replace")
    return await asyncio.to_thread(report, log, command.results, checks), False


def report(log: str, results: str, checks: Checks) -> Report:
    """The harness's verdict on `log`: the output of a script with the harness's marks, or of the test command alone.

    Raises `GraderFault` where the harness is not installed and cannot be.
    """
    parser, _, more = results.removeprefix(PREFIX).partition("?")
    asked: dict[str, Any] = {"log": log, "parser": parser, **_DEFAULTS, **dict(parse_qsl(more))}
    asked |= {"fail_to_pass": list(checks.fail_to_pass), "pass_to_pass": list(checks.pass_to_pass)}
    try:
        inside = install() / "bin/python"
    except PrerequisiteError as error:
        raise GraderFault(
            f"the harness of SWE-bench is not there: {error}",
            fix="prepare the tasks on a machine with a network (crrl data prepare)",
        ) from error
    try:
        done = subprocess.run(
            [str(inside), "-I", "-c", programs.SWEBENCH_REPORT],
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=_REPORT_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return Report(False, False, list(checks.named), {}, f"no end within {_REPORT_SECONDS:g} s")
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return Report(False, False, list(checks.named), {}, last[:_SHOWN] or f"exit code {error.returncode}")
    found = json.loads(done.stdout)
    outcomes = {name: _outcome(status) for name, status in found["statuses"].items()}
    return Report(found["found"], found["resolved"], found["failed"], outcomes)


def _outcome(status: str) -> Outcome:
    if status in _PASSED:
        return Outcome.PASSED
    return Outcome.SKIPPED if status == "SKIPPED" else Outcome.FAILED
