"""Judging a patch by the task's checks in a fresh sandbox.

A failing sandbox raises `SandboxFault`, everything else is a verdict on the patch. `reports` parses test runners'
output; `witness` guards runs against early exits; `harness` judges by a benchmark's rules.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from coderepairrl.errors import SandboxFault, UnjudgedPatch
from coderepairrl.grading import harness, programs, witness
from coderepairrl.grading.collect import copy_collected_files
from coderepairrl.grading.reports import PARSERS, Outcome, Outcomes, find_failed_tests, merge_outcomes
from coderepairrl.grading.steering import (
    can_shadow_module,
    escape_pattern,
    find_shadowed_module,
    find_stand_in,
    list_excluded_patterns,
    list_new_packages,
    read_touched_files,
)
from coderepairrl.processes.caches import has_extensions
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.types import Checks, Command, ExecResult, Task

# allows names that Windows refuses: a diff of any workspace applies to a fresh one
_GIT_APPLY = (
    "git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", "-c", "core.protectNTFS=false",
    "apply", "--whitespace=nowarn",
)  # fmt: skip
_LIST_FILES = (*_GIT_APPLY, "--numstat", "-z")
# output of `_LIST_FILES` for a file, perhaps after a warning
_NUMSTAT_ENTRY = re.compile(rb"(?:.*?\n)??(?:\d+|-)\t(?:\d+|-)\t(.+)", re.DOTALL)
# shell script that prints those of its arguments that do not exist, NUL-terminated
_PRINT_MISSING_PATHS = """for path; do [ -e "$path" ] || [ -L "$path" ] || printf '%s\\0' "$path"; done"""
_APPLY_SECONDS = 60.0
# exit codes of git for a patch that does not apply, or is no patch; others are the sandbox's fault
_DOES_NOT_APPLY_CODES = (1, 128)
# names of sources and build scripts of compiled modules
_COMPILED_SOURCE = re.compile(r"\.(pyx|pxd|pxi|c|cc|cpp|cxx|h|hpp)(\.(in|tp|templ|tpl))?$|(^|/)setup\w*\.py$")
# limit of all patterns of excluded new files together, since a command line is bounded
_PATTERN_CHARS = 1 << 16
_SHOWN_CHARS = 200
# limit of a command's parsed output. Beyond it no test has a result.
_LOG_BYTES = 16 << 20
# most files or tests that a message names
_MOST_SHOWN = 3

CANNOT_RUN_CODES = (126, 127)
"""Exit codes of a shell and of the sandbox for an unusable and a missing program."""
# hint, at the end of a check's output, that it may never have begun; a control run decides (`rewards.tests`)
_LACKS_PROGRAM = re.compile(
    r"No module named|not found|No such file or directory|can't open file|cannot find|could not find|not installed|"
    r"Permission denied|error while loading shared libraries",
    re.IGNORECASE,
)
_LACKS_PROGRAM_CHARS = 2_000


class Verdict(NamedTuple):
    """Problem of a patch (empty if none), and the outcome of each reported test."""

    problem: str
    outcomes: Outcomes = {}  # noqa: RUF012 - a NamedTuple's default, never changed in place
    doubtful: bool = False
    """The failed check may never have begun, because of the sandbox instead of the patch."""
    stopped: bool = False
    """A command that must pass as a whole failed; `outcomes` are those of the commands before it."""


def use_checks_workspace(task: Task) -> Task:
    """`task` in its checks' workspace, unless they collect files from the task's own."""
    return task if task.checks.collect else replace(task, workspace=task.checks.workspace or task.workspace)


async def grade_patch(sandbox: Sandbox, task: Task, patch: bytes) -> Verdict:
    """Apply `patch` in a fresh sandbox, restore the checks' files, run the checks. Raises `SandboxFault`.

    All commands share the sandbox, so one can prepare the next; `grade_apart` prevents that.
    """
    refused = await apply_graded_part(sandbox, task, patch)
    return Verdict(refused) if refused else await judge_sandbox(sandbox, task.checks)


async def grade_apart(backend: SandboxBackend, task: Task, patch: bytes) -> Verdict:
    """Grade `patch` with a fresh sandbox for each command. Raises `SandboxFault`."""
    if task.checks.collect:
        async with backend.open(task) as box:
            refused = await apply_graded_part(box, task, patch)
            return Verdict(refused) if refused else await judge_state(backend, task, box)

    async def prepare(sandbox: Sandbox) -> str:
        return await apply_graded_part(sandbox, task, patch) or await restore_files(sandbox, task.checks)

    return await run_checks(task.checks, lambda: backend.open(use_checks_workspace(task)), prepare)


async def apply_graded_part(sandbox: Sandbox, task: Task, patch: bytes) -> str:
    """Apply the graded part of `patch`; return why it does not apply, or "".

    Raises `UnjudgedPatch` for a patch of sources whose compiled extensions are in the environment.
    """
    changed = sorted(filter(_COMPILED_SOURCE.search, read_touched_files(patch)))
    if changed and has_extensions(task.environment):
        raise UnjudgedPatch(
            f"{task.id}: it cannot be judged natively, since its modules are compiled without its change of "
            f"{', '.join(changed[:_MOST_SHOWN])}",
            fix="judge it in the benchmark's image: workspace=image",
        )
    rules = harness.find_benchmark_rules(task.checks)
    if rules is not None and rules.apply:
        return await harness.apply_by_rules(sandbox, patch, rules)
    without = list_excluded_patterns(task.reference, task.checks, sandbox.workdir)
    without += rules.excluded if rules is not None else ()
    shadowing = await _find_shadowing_files(sandbox, patch, without, task)
    if shadowing is None or sum(map(len, shadowing)) > _PATTERN_CHARS:
        return "the patch does not apply: it has too many new files that Python could import instead of its own modules"
    return await apply_patch(sandbox, patch, without + shadowing)


async def _find_shadowing_files(
    sandbox: Sandbox, patch: bytes, without: tuple[str, ...], task: Task
) -> tuple[str, ...] | None:
    """Patterns of new files that Python could import instead of its own modules or a runner's; None: too many files.

    Allows modules of existing packages, of packages in new folders that the checks do not mention, and names that the
    reference touches.
    """
    if not can_shadow_module(patch):
        return ()
    excluded = [f"--exclude={pattern}" for pattern in without]
    listed = await sandbox.exec(
        [*_LIST_FILES, *excluded, "-"], stdin=patch, timeout=_APPLY_SECONDS, max_bytes=_LOG_BYTES
    )
    if listed.truncated:
        return None
    entries = map(_NUMSTAT_ENTRY.fullmatch, listed.output.split(b"\0"))
    paths = [entry[1].decode("utf-8", "surrogateescape") for entry in entries if entry]
    repaired_names = {find_shadowed_module(path) for path in read_touched_files(task.reference)}
    new_packages = list_new_packages(paths)
    may_have_links = b"120000" in patch  # git's mode of symbolic links
    stand_ins = {
        path: find_stand_in(path, new_packages, links=may_have_links)
        for path in paths
        if find_shadowed_module(path) not in repaired_names
    }
    suspects = [path for path, stand_in in stand_ins.items() if stand_in]
    if not suspects:
        return ()
    mentioned = "\n".join([*task.checks.restore, *(word for command in task.checks.commands for word in command.argv)])
    unmentioned = [folder for folder in new_packages if folder.rpartition("/")[2] not in mentioned]
    new_folders = await _filter_paths(sandbox, _PRINT_MISSING_PATHS, unmentioned) or ()
    suspects = [
        path for path in suspects if not any(stand_ins[path].startswith(f"{folder}/") for folder in new_folders)
    ]
    new_files = await _filter_paths(sandbox, programs.NEW_FILES, suspects)
    return tuple(escape_pattern(path) for path in (suspects if new_files is None else new_files))


async def _filter_paths(sandbox: Sandbox, script: str, paths: Sequence[str]) -> list[str] | None:
    """Select the `paths` that a shell script prints; None if it fails."""
    if not paths:
        return []
    listing = await sandbox.exec(["sh", "-c", script, "sh", *paths], max_bytes=_LOG_BYTES)
    return listing.output.decode("utf-8", "surrogateescape").split("\0")[:-1] if listing.ok else None


async def apply_patch(sandbox: Sandbox, patch: bytes, without: tuple[str, ...] = ()) -> str:
    """Apply `patch` except to files that match `without`; return why it does not apply, or "".

    Raises `SandboxFault` for a sandbox without a working git.
    """
    if not patch.strip():
        return ""
    excluded = [f"--exclude={pattern}" for pattern in without]
    result = await sandbox.exec([*_GIT_APPLY, *excluded, "-"], stdin=patch, timeout=_APPLY_SECONDS)
    if result.ok:
        return ""
    message = _output_text(result).partition("\n")[0][:_SHOWN_CHARS]
    if result.timed_out or result.exit_code not in _DOES_NOT_APPLY_CODES:
        how = "ran out of time" if result.timed_out else f"exited with {result.exit_code}"
        raise SandboxFault(f"`git apply` {how} in the sandbox: {message}", fix="the sandbox needs git")
    return f"the patch does not apply: {message}"


async def judge_sandbox(sandbox: Sandbox, checks: Checks) -> Verdict:
    """Run the checks in `sandbox` as it is, restoring their files before each command."""
    return await run_checks(checks, lambda: nullcontext(sandbox), lambda box: restore_files(box, checks))


async def judge_state(backend: SandboxBackend, task: Task, box: Sandbox) -> Verdict:
    """Run the checks in `box` as it is; if they collect files, the last in a fresh sandbox. Raises `SandboxFault`."""
    checks = task.checks
    if not checks.collect:
        return await judge_sandbox(box, checks)
    *before, last = checks.commands
    verdict = await judge_sandbox(box, replace(checks, commands=tuple(before)))
    if verdict.problem:
        return verdict
    async with backend.open(replace(task, workspace=checks.workspace or task.workspace, limits={})) as fresh:
        if refused := await copy_collected_files(box, fresh, checks):
            return Verdict(refused, doubtful=True)
        return await judge_sandbox(fresh, replace(checks, commands=(last,)))


async def restore_files(sandbox: Sandbox, checks: Checks) -> str:
    """Restore the checks' files without following links; return why that is impossible, or ""."""
    for path, content in checks.restore.items():
        try:
            await sandbox.write(path, content.encode("utf-8", "surrogateescape"), follow=False)
        except OSError as error:  # the patch may have put a folder there, or a file in place of its folder
            return f"the patch leaves no way to restore {path}: {error}"
    return ""


async def run_checks(
    checks: Checks,
    open_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]],
    prepare: Callable[[Sandbox], Awaitable[str]],
) -> Verdict:
    """Run checks in order, each in its sandbox, until one fails that must pass as a whole.

    `prepare` returns why a sandbox cannot be prepared, or "". The problem names the check, its failure and last output,
    or the tests that should have passed.
    """
    outcomes: Outcomes = {}
    unreported = ""
    for command in checks.commands:
        async with open_sandbox() as sandbox:
            if refused := await prepare(sandbox):
                return Verdict(refused, outcomes)
            if harness.find_rules(command.results) is not None:
                return await _judge_by_harness(sandbox, command, checks)
            ran = await try_command(sandbox, command, checks)
        outcomes = merge_outcomes(outcomes.items(), ran.outcomes.items())
        if ran.problem:
            return Verdict(_describe_failure(command, ran), outcomes, ran.doubtful, stopped=True)
        if ran.doubtful:
            command_line = " ".join(command.argv)
            first = f"; no test of `{command_line}` reported a result: {ran.last_line[:_SHOWN_CHARS]}"
            unreported = unreported or first
    if failed := find_failed_tests(outcomes, checks.named):
        described = [
            f"{name} ({outcomes[name].name.lower() if name in outcomes else 'not reported'})"
            for name in failed[:_MOST_SHOWN]
        ]
        problem = f"{len(failed)} of {len(checks.named)} tests did not pass: {'; '.join(described)}{unreported}"
        return Verdict(problem, outcomes, bool(unreported))
    return Verdict("", outcomes)


async def _judge_by_harness(sandbox: Sandbox, command: Command, checks: Checks) -> Verdict:
    report, timed_out = await harness.run_harness_command(sandbox, command, checks)
    if report.resolved:
        return Verdict("", report.outcomes)
    if timed_out:
        return Verdict(
            f"check failed (not finished within {command.timeout:g} s): {' '.join(command.argv)}", report.outcomes
        )
    names = "; ".join(report.failed[:_MOST_SHOWN])
    total = len(checks.named) or len(report.outcomes)
    problem = f"{len(report.failed)} of {total} tests did not end as they should: {names}"
    reason = "" if report.found else "no test reported a result; "
    reason += f"the harness broke ({report.broken}); " if report.broken else ""
    return Verdict(reason + problem, report.outcomes, doubtful=not report.found)


class CommandRun(NamedTuple):
    """Finished command of the checks; `problem` and `doubtful` as in `Verdict`."""

    problem: str
    outcomes: Outcomes
    result: ExecResult
    doubtful: bool = False

    @property
    def last_line(self) -> str:
        """Last line of output."""
        return _output_text(self.result).rpartition("\n")[2]


async def try_command(sandbox: Sandbox, command: Command, checks: Checks) -> CommandRun:
    """Run a command judged by its runner's reports or exit code. Raises `SandboxFault`."""
    results = command.results or witness.detect_runner(command.argv)
    if not results:
        return await _run_by_exit_code(sandbox, command, checks)
    result, report = await run_reporting_command(sandbox, replace(command, results=results), checks)
    outcomes = report.outcomes
    tests_decide = bool(command.results and checks.named)
    if result.timed_out:
        return CommandRun(_describe_exit(result, command), {}, result)
    if not outcomes:
        return CommandRun("" if tests_decide else "no test reported a result", {}, result, doubtful=True)
    if tests_decide:
        return CommandRun("", outcomes, result)
    failed = [name for name, outcome in outcomes.items() if outcome is Outcome.FAILED]
    if failed or not report.ok:
        return CommandRun(f"{failed[0]} failed" if failed else _describe_exit(result, command), outcomes, result)
    return CommandRun("" if Outcome.PASSED in outcomes.values() else "no test passed", outcomes, result)


async def _run_by_exit_code(sandbox: Sandbox, command: Command, checks: Checks) -> CommandRun:
    """Run a command judged by exit code and, for a Python script, by reaching its last line."""
    word, argv = witness.make_word(), witness.watch_script(command.argv)
    stdin = witness.make_witness_input(sandbox, checks, word) if argv else b""
    result = await sandbox.exec(argv or command.argv, stdin=stdin, timeout=command.timeout)
    text = _output_text(result)
    problem = ""
    if not result.ok:
        problem = _describe_exit(result, command)
    elif argv and word not in text:  # threads and what runs at exit may print after it
        problem = "it printed too much" if result.truncated else "it ended before its last line"
    doubtful = result.exit_code in CANNOT_RUN_CODES or bool(_LACKS_PROGRAM.search(text[-_LACKS_PROGRAM_CHARS:]))
    result = replace(result, output=result.output.replace(word.encode(), b""))
    return CommandRun(problem, {}, result, bool(problem) and not result.timed_out and doubtful)


async def run_reporting_command(
    sandbox: Sandbox, command: Command, checks: Checks
) -> tuple[ExecResult, witness.Report]:
    """Run a command whose tests report (`Command.results`). Raises `SandboxFault`."""
    if command.results == "pytest":
        plugin = await witness.PytestPlugin.prepare(sandbox, command, checks)
        if isinstance(plugin, ExecResult):
            return plugin, witness.Report(False, {})
        result = await _exec_command(sandbox, command, plugin.wrap_command(command.argv, sandbox.workdir))
        return result, await plugin.read_report(sandbox, _LOG_BYTES)
    watch = {"unittest": witness.watch_unittest, "junit": witness.watch_junit}.get(command.results)
    if watch and (watched := watch(command.argv)):
        word = witness.make_word()
        facts = witness.make_witness_input(sandbox, checks, f"{word} {witness.format_limits(command)}")
        result = await _exec_command(sandbox, command, watched, facts)
        report = witness.parse_report(result.output, word)
        return replace(result, output=witness.strip_report(result.output, word)), report
    argv, stdin = [*command.argv], b""
    if command.results == "node":
        argv, stdin = witness.guard_node_command(argv, sandbox.workdir, checks)
    result, log = await harness.run_and_read(sandbox, command, argv, _LOG_BYTES, stdin)
    if command.results == "node" and result.exit_code == witness.ENDED_EARLY:
        return result, witness.Report(False, {})
    return result, witness.Report(result.ok, PARSERS[command.results](log))


async def _exec_command(sandbox: Sandbox, command: Command, argv: list[str], stdin: bytes = b"") -> ExecResult:
    return await sandbox.exec(argv, stdin=stdin, timeout=command.timeout, max_bytes=_LOG_BYTES)


def _describe_failure(command: Command, ran: CommandRun) -> str:
    ending = f": {ran.last_line[:_SHOWN_CHARS]}" if ran.last_line else ""
    return f"check failed ({ran.problem}): {' '.join(command.argv)}{ending}"


def _describe_exit(result: ExecResult, command: Command) -> str:
    return f"not finished within {command.timeout:g} s" if result.timed_out else f"exit code {result.exit_code}"


def _output_text(result: ExecResult) -> str:
    return result.output.decode("utf-8", "replace").strip()
