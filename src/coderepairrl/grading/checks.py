"""A patch and the task's checks in a fresh sandbox: apply, restore, run. What a task's exam and the rewards share.

Faults of the sandbox are raised as `SandboxFault`; everything else is a verdict on the patch.
"""

from __future__ import annotations

import re
import secrets
from fnmatch import fnmatchcase
from typing import NamedTuple

from coderepairrl.errors import SandboxFault
from coderepairrl.grading import witness
from coderepairrl.grading.reports import PARSERS, Outcome, Outcomes, lacking, worst
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks, Command, ExecResult, Task

_APPLY = ("git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn")
_APPLY_SECONDS = 60.0
_REFUSED = (1, 128)
"""Exit codes of a git that read the patch and does not take it."""
_SHOWN = 200
_LOG_BYTES = 16 << 20
"""Of a command whose output says which tests passed. What stands beyond is missing, and fails."""
_NAMED = 3

STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "pytest.py", "sitecustomize.py", "usercustomize.py"),
    *("*_test.go", "go.work", "Cargo.toml", ".cargo/*", "build.rs", "package.json", ".npmrc", ".mocharc*"),
    *("jest.config.*", "vitest.config.*", "vite.config.*"),
)
"""Files that steer a test runner, or count as tests by their name: what a patch does to them is left out before it is
judged, unless the task's reference changes a file of that kind too."""

RESULTS = "{results}"
"""In the words of a command: a path outside of the workspace, drawn for the run, for the runner's result files."""
_READ = 'if [ -d "$0" ]; then find "$0" -type f -name "*.xml" -exec cat {} +; else cat "$0"; fi; rm -rf "$0"'


class Verdict(NamedTuple):
    """What is wrong with a patch, or nothing; and the outcome of each test that reported one."""

    problem: str
    outcomes: Outcomes = {}  # noqa: RUF012 - a NamedTuple's default, which nobody changes


async def grade(sandbox: Sandbox, task: Task, patch: bytes) -> Verdict:
    """Apply `patch` in a fresh sandbox of `task`, put the checks' files back, and run them. Raises `SandboxFault`."""
    refused = await apply(sandbox, patch, left_out(task.reference))
    return Verdict(refused) if refused else await judge(sandbox, task.checks)


def left_out(reference: bytes) -> tuple[str, ...]:
    """The patterns of `STEERING` that no file of the task's reference matches."""
    paths = re.findall(rb"^(?:\+\+\+|---|rename to|rename from) (?:[ab]/)?(.*?)\r?$", reference, re.MULTILINE)
    touched = [path.decode("utf-8", "replace") for path in paths]

    return tuple(
        pattern for pattern in STEERING if not any(fnmatchcase(f"/{path}", f"*/{pattern}") for path in touched)
    )


async def apply(sandbox: Sandbox, patch: bytes, without: tuple[str, ...] = ()) -> str:
    """Apply `patch`, but for the files that match `without`; why it does not apply, or nothing.

    Raises `SandboxFault` for a sandbox without a working git.
    """
    excluded = [f"--exclude={each}" for pattern in without for each in (pattern, f"*/{pattern}")]
    result = await sandbox.exec([*_APPLY, *excluded, "-"], stdin=patch, timeout=_APPLY_SECONDS)
    if result.ok:
        return ""
    said = _said(result).partition("\n")[0][:_SHOWN]
    if result.timed_out or result.exit_code not in _REFUSED:
        how = "ran out of time" if result.timed_out else f"exited with {result.exit_code}"
        raise SandboxFault(f"`git apply` {how} in the sandbox: {said}", fix="the sandbox needs git")
    return f"the patch does not apply: {said}"


async def judge(sandbox: Sandbox, checks: Checks) -> Verdict:
    """Put the checks' own files back, then run the checks."""
    unrestored = await restore(sandbox, checks)
    return Verdict(unrestored) if unrestored else await run(sandbox, checks)


async def restore(sandbox: Sandbox, checks: Checks) -> str:
    """Put the checks' own files back; why that is impossible, or nothing."""
    for path, content in checks.restore.items():
        try:
            await sandbox.write(path, content.encode("utf-8", "surrogateescape"))
        except OSError as error:  # the patch made a folder, a link out of the workspace, ... of it
            return f"the patch leaves no way to restore {path}: {error}"
    return ""


async def run(sandbox: Sandbox, checks: Checks) -> Verdict:
    """Run the checks in order. A command that must pass as a whole and does not ends it.

    The problem names the check, how it failed, and what it said last; or the tests that should have passed.
    """
    outcomes: Outcomes = {}
    for command in checks.commands:
        problem, found, last = await _run(sandbox, command, checks)
        outcomes = worst(outcomes.items(), found.items())
        if problem:
            return Verdict(_problem(command, problem, last), outcomes)
    if failed := lacking(outcomes, checks.named):
        names = "; ".join(f"{name} ({_outcome(outcomes, name)})" for name in failed[:_NAMED])
        return Verdict(f"{len(failed)} of {len(checks.named)} tests did not pass: {names}", outcomes)
    return Verdict("", outcomes)


async def _run(sandbox: Sandbox, command: Command, checks: Checks) -> tuple[str, Outcomes, str]:
    """How a command failed as a whole, or nothing; the outcomes of its tests; and its last line."""
    if not command.results:
        problem, last = await _plain(sandbox, command, checks)
        return problem, {}, last
    result, said = await _reported(sandbox, command)
    last = _said(result).rpartition("\n")[2]
    if result.timed_out:
        return _how(result, command), {}, last
    if not checks.named:
        if not said.outcomes:
            return "no test reported a result", {}, last
        failed = [name for name, outcome in said.outcomes.items() if outcome is Outcome.FAILED]
        if failed or not said.ok:
            return f"{failed[0]} failed" if failed else _how(result, command), said.outcomes, last
    return "", said.outcomes, last


async def _plain(sandbox: Sandbox, command: Command, checks: Checks) -> tuple[str, str]:
    """A command that is judged by its exit code, and, if it is a Python script, by its last line."""
    word, argv = witness.new_word(), witness.script(command.argv)
    stdin = "\n".join((word, *checks.restore)).encode("utf-8", "surrogateescape") if argv else b""
    result = await sandbox.exec(argv or command.argv, stdin=stdin, timeout=command.timeout)
    said = _said(result)
    problem = ""
    if not result.ok:
        problem = _how(result, command)
    elif argv and not said.endswith(word):
        problem = "it printed too much" if result.truncated else "it ended before its last line"
    return problem, said.replace(word, "").strip().rpartition("\n")[2]


async def _reported(sandbox: Sandbox, command: Command) -> tuple[ExecResult, witness.Said]:
    """Run a command whose tests report; `Said.ok` is whether the runner was content."""
    if command.results == "pytest":
        plugin = await witness.Plugin.prepare(sandbox)
        result = await _exec(sandbox, command, plugin.command(command.argv))
        return result, await plugin.outcomes(sandbox, _LOG_BYTES)
    watched = witness.unittest(command.argv) if command.results == "unittest" else []
    if watched:
        word = witness.new_word()
        result = await _exec(sandbox, command, watched, word)
        return result, witness.said(result.output, word)
    path = f"/tmp/crrl-{secrets.token_hex(16)}"
    result = await _exec(sandbox, command, [word.replace(RESULTS, path) for word in command.argv])
    text = result.output
    if any(RESULTS in word for word in command.argv):
        text = (await sandbox.exec(["sh", "-c", _READ, path], max_bytes=_LOG_BYTES)).output
    return result, witness.Said(result.ok, PARSERS[command.results](text.decode("utf-8", "replace")))


async def _exec(sandbox: Sandbox, command: Command, argv: list[str], word: str = "") -> ExecResult:
    return await sandbox.exec(argv, stdin=word.encode(), timeout=command.timeout, max_bytes=_LOG_BYTES)


def _problem(command: Command, how: str, last: str) -> str:
    return f"check failed ({how}): {' '.join(command.argv)}" + (f": {last[:_SHOWN]}" if last else "")


def _how(result: ExecResult, command: Command) -> str:
    return f"no end within {command.timeout:g} s" if result.timed_out else f"exit code {result.exit_code}"


def _outcome(outcomes: Outcomes, name: str) -> str:
    return outcomes[name].name.lower() if name in outcomes else "not reported"


def _said(result: ExecResult) -> str:
    return result.output.decode("utf-8", "replace").strip()
