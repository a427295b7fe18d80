"""Judging as a benchmark itself does: a patch applied in its way, its tests run by its script, its rules on the log.

A `Command` whose `results` is ``NAME:ARGUMENT``, NAME being one of `RULES`, is judged so. The rules are `rules` of ours
that read what a benchmark's tests leave, or `packages` of theirs.
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
"""SWE-bench's attempts at a patch, in its order; after each that fails the tree is put back."""
_SWE_SMITH = ("git apply --verbose", "git apply --verbose --reject", "patch --batch --fuzz=5 -p1 -i")
_TRYING = "git patch mktemp"
_RESET = "git checkout -- . ; git clean -fd"
_PRESENT = 'for name in {}; do command -v $name >/dev/null || {{ echo "it has no $name"; exit 2; }}; done\n'
"""What judging needs is looked for before a patch can take it away: its lack is no verdict."""
FIX_PATCH = "/home/fix.patch"
"""Where Multi-SWE-bench's scripts find the patch, which they apply together with that of the tests."""
_APPLY_SECONDS = 120.0
_LOG_BYTES = 64 << 20
_TEST_FOLDERS = ("test/*", "*/test/*", "tests/*", "*/tests/*")
_BINARY = re.compile(rb"^(Binary files .* differ|GIT binary patch)$", re.MULTILINE)
RESULT_FILES = "{results}"
"""In the words of a command: a path outside of the workspace, drawn for the run, for the runner's result files."""
READ = r"""
each='for file; do cat "$file"; printf "\0"; done'
if [ -d "$0" ]; then find "$0" -type f -name '*.xml' -exec sh -c "$each" sh {} +; else cat "$0"; fi
rm -rf "$0"
"""
"""Prints the result files at a path, those of a folder each with a NUL at its end."""


class Rules(NamedTuple):
    """How a benchmark judges: what decides, and how patches are applied."""

    judge: Callable[[str, str, Checks], Report]
    apply: str = ""
    """A script that applies the patch in its standard input, when it has found what is `needed`: exit code 1 where it
    does not apply. Without one, patches are applied as for other checks, but for files that match `left_out`."""
    needed: str = "git"
    """Programs of the image, beside bash, with spaces between them, that this script and those of the checks run."""
    left_out: tuple[str, ...] = ()
    binary: bool = True
    """Whether changes of binary files are applied, too."""
    lists: bool = False
    """Whether only the tests that `Checks` names decide: without `fail_to_pass` every patch would be right."""


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
"""By name."""


def rules_of(results: str) -> Rules | None:
    """The rules that `Command.results` names, if it names any."""
    name, colon, _ = results.partition(":")
    return RULES.get(name) if colon else None


def judged_by(checks: Checks) -> Rules | None:
    """The rules that judge these checks, if a benchmark does."""
    return next(filter(None, (rules_of(command.results) for command in checks.commands)), None)


def install(some: Iterable[Checks]) -> None:
    """Install the packages that judge these checks. Raises `PrerequisiteError`."""
    judges = {found.judge for found in map(judged_by, some) if found is not None}
    for package in (judge for judge in judges if isinstance(judge, Package)):
        package.install()


async def apply(sandbox: Sandbox, patch: bytes, chosen: Rules) -> str:
    """Apply `patch` as the benchmark does; why that is impossible, or nothing. Raises `SandboxFault`."""
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
        why = done.output[-200:].decode("utf-8", "replace").strip()
        needed = f"the sandbox, so the image if it has one, needs bash, {', '.join(chosen.needed.split())}"
        raise SandboxFault(f"the patch could not be tried in the sandbox: {why}", fix=needed)
    return "" if done.ok else "the patch does not apply, not even with fuzz"


async def run(sandbox: Sandbox, command: Command, checks: Checks) -> tuple[Report, bool]:
    """Run `command` and let the benchmark judge its log; and whether it ran out of time.

    Raises `SandboxFault`, and `GraderFault` where what judges is not installed and cannot be.
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
    """For `RESULT_FILES`."""
    return f"/tmp/crrl-{secrets.token_hex(16)}"


def report(log: str, results: str, checks: Checks) -> Report:
    """The benchmark's verdict on `log`. Raises `GraderFault` where what judges is not installed and cannot be."""
    name, _, argument = results.partition(":")
    return RULES[name].judge(log, argument, checks)
