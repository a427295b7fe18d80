"""Judging by a benchmark's procedure: its way of applying patches, its script, its rules on the log.

Applies to a `Command` whose `results` is ``NAME:ARGUMENT`` with a NAME in `RULES`: `rules` of ours that read what tests
leave, or the benchmark's `packages`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple

from coderepairrl.errors import SandboxFault
from coderepairrl.grading import packages, rules
from coderepairrl.grading.packages import Package
from coderepairrl.grading.rules import Report
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks, Command

_SWEBENCH = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
"""SWE-bench's attempts at applying a patch, in its order, the tree restored after each failure."""
_SWE_SMITH = ("git apply --verbose", "git apply --verbose --reject", "patch --batch --fuzz=5 -p1 -i")
_TRYING = "git patch mktemp"
_RESET = "git checkout -- . ; git clean -fd"
_PRESENT = 'for name in {}; do command -v $name >/dev/null || {{ echo "it has no $name"; exit 2; }}; done\n'
"""Checks for needed programs before a patch can remove them: missing ones are no verdict."""
FIX_PATCH = "/home/fix.patch"
"""Path of the patch in Multi-SWE-bench's scripts, which apply it with that of the tests."""
_APPLY_SECONDS = 120.0
_LOG_BYTES = 64 << 20
_TEST_FOLDERS = ("test/*", "*/test/*", "tests/*", "*/tests/*")
_BINARY = re.compile(rb"^(Binary files .* differ|GIT binary patch)$", re.MULTILINE)
RESULT_FILES = "{results}"
"""Placeholder in a command for the random path, outside the workspace, of the runner's result files."""
READ = r"""
each='for file; do cat "$file"; printf "\0"; done'
if [ -d "$0" ]; then find "$0" -type f -name '*.xml' -exec sh -c "$each" sh {} +; else cat "$0"; fi
rm -rf "$0"
"""
"""Prints the result files at a path; those of a folder each end with NUL."""


class Rules(NamedTuple):
    """Rules of a benchmark: what decides, and how patches are applied."""

    judge: Callable[[str, str, Checks], Report]
    apply: str = ""
    """Script that applies the patch on standard input, once it has found what is `needed`; exit code 1: does not apply.
    Without one, patches are applied as for other checks, but for files that match `left_out`.
    """
    needed: str = "git"
    """Programs of the image besides bash, space-separated, that this script and those of the checks run."""
    left_out: tuple[str, ...] = ()
    binary: bool = True
    """Whether changes of binary files are applied."""
    lists: bool = False
    """Whether only tests named in `Checks` decide: without `fail_to_pass` every patch would be right."""


def _attempts(commands: Iterable[str], last: str) -> str:
    tries = "".join(f'{command} "$patch" && exit 0; {_RESET}; ' for command in commands)
    return f'patch=$(mktemp) && cat >"$patch" || exit 2\n{tries}\n{last}'


RULES = {
    "swebench": Rules(
        packages.SWEBENCH,
        _attempts(_SWEBENCH, 'git apply --check --reverse "$patch" && exit 0\nexit 1\n'),
        _TRYING,
        lists=True,
    ),
    "multi_swe_bench": Rules(packages.MULTI_SWE_BENCH, f"cat >{FIX_PATCH} || exit 2"),
    "swe_smith": Rules(packages.SWE_SMITH, _attempts(_SWE_SMITH, "exit 1"), _TRYING, lists=True),
    "swe_bench_pro": Rules(
        rules.swe_bench_pro, "git apply -v - || exit 1", "git mktemp python", binary=False, lists=True
    ),
    "r2e_gym": Rules(rules.r2e_gym, left_out=("run_tests.sh", "r2e_tests", "r2e_tests/*")),
    "defects4j": Rules(
        rules.defects4j, left_out=(*_TEST_FOLDERS, ".defects4j.config", "defects4j.build.properties", "failing_tests")
    ),
    "gitbug_java": Rules(rules.gitbug_java, left_out=_TEST_FOLDERS),
}
"""Rules by name."""


def rules_of(results: str) -> Rules | None:
    """Rules that `Command.results` names, or None."""
    name, colon, _ = results.partition(":")
    return RULES.get(name) if colon else None


def judged_by(checks: Checks) -> Rules | None:
    """Rules of the benchmark that judges these checks, or None."""
    return next(filter(None, (rules_of(command.results) for command in checks.commands)), None)


def install(some: Iterable[Checks]) -> None:
    """Install the packages that judge these checks. Raises `PrerequisiteError`."""
    judges = {chosen.judge for chosen in map(judged_by, some) if chosen is not None}
    for package in (judge for judge in judges if isinstance(judge, Package)):
        package.install()


async def apply(sandbox: Sandbox, patch: bytes, chosen: Rules) -> str:
    """Apply `patch` as the benchmark does; return why that fails, or "". Raises `SandboxFault`."""
    if not patch.strip():
        return ""
    if not chosen.binary:
        parts = re.split(rb"(?=^diff --git )", patch, flags=re.MULTILINE)
        patch = b"".join(part for part in parts if not _BINARY.search(part))
    script = _PRESENT.format(chosen.needed) + chosen.apply
    done = await sandbox.exec(["bash", "-c", script], stdin=patch, timeout=_APPLY_SECONDS)
    if done.timed_out:  # a patch can be made to take long
        return f"the patch could not be tried within {_APPLY_SECONDS:g} s"
    if done.exit_code not in (0, 1):
        reason = done.output[-200:].decode("utf-8", "replace").strip()
        needed = f"the sandbox, so the image if it has one, needs bash, {', '.join(chosen.needed.split())}"
        raise SandboxFault(f"the patch could not be tried in the sandbox: {reason}", fix=needed)
    return "" if done.ok else "the patch does not apply, not even with fuzz"


async def run(sandbox: Sandbox, command: Command, checks: Checks) -> tuple[Report, bool]:
    """Run `command` and let the benchmark judge its log; also return whether it timed out.

    Raises `SandboxFault`, and `GraderFault` if the judge cannot be installed.
    """
    path = drawn_path()
    argv = [word.replace(RESULT_FILES, path) for word in command.argv]
    result = await sandbox.exec(argv, timeout=command.timeout, max_bytes=_LOG_BYTES)
    if result.timed_out:
        return Report(False, False, list(checks.named), {}), True
    output = result.output
    if any(RESULT_FILES in word for word in command.argv):
        output = (await sandbox.exec(["sh", "-c", READ, path], max_bytes=_LOG_BYTES)).output
    return await asyncio.to_thread(report, output.decode("utf-8", "replace"), command.results, checks), False


def drawn_path() -> str:
    """Random path for `RESULT_FILES`."""
    return f"/tmp/crrl-{secrets.token_hex(16)}"


def report(log: str, results: str, checks: Checks) -> Report:
    """Benchmark's verdict on `log`. Raises `GraderFault` if the judge cannot be installed."""
    name, _, argument = results.partition(":")
    return RULES[name].judge(log, argument, checks)
