"""Mutants of a user's package or repository, verified by its own tests."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from coderepairrl.errors import TaskError
from coderepairrl.grading import CANNOT_RUN_CODES, try_command
from coderepairrl.grading.reports import Outcome
from coderepairrl.grading.witness import detect_runner
from coderepairrl.processes import hostgit
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import SandboxBackend
from coderepairrl.tasks.base import write_tree
from coderepairrl.tasks.mutants.mutations import Mutation, list_mutations
from coderepairrl.types import Checks, Command, Task

SKIPPED = frozenset({".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", "build", "dist", ".tox", "target"})
_MAX_DESELECTED = 20
SHOWN_LINES = 6
"""Lines of the failing tests' output that an issue quotes."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A verified bug; `output` is the end of the output of `command`.

    With the bug, tests in `fail_to_pass` fail or do not run; lists are empty without reports of single tests.
    """

    path: str
    mutation: Mutation
    broken: str
    fixed: str
    output: str
    command: tuple[str, ...] = ()
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """``path:function/kind-digest``."""
        digest = hashlib.sha256(f"{self.path}\0{self.fixed}\0{self.broken}".encode()).hexdigest()[:8]
        return f"{self.path}:{self.mutation.function}/{self.mutation.kind.replace(' ', '-')}-{digest}"


def read_tree(root: Path) -> dict[str, bytes]:
    """Files of a folder, or of a repository's HEAD; a package folder keeps its name, for imports.

    Raises `TaskError`.
    """
    try:
        if not root.is_dir():
            raise TaskError(f"{root} is not a folder", fix="give the folder of a Python package or a git repository")
        if (root / ".git").exists():
            with hostgit.open_view(hostgit.find_repository(root)) as view:
                paths = [root / name for name in view.files(view.head())]
                if view.changes(untracked=False):
                    raise TaskError(f"{root} has uncommitted changes", fix="commit or stash them first")
        else:
            paths = [path for path in root.rglob("*") if not SKIPPED & set(path.relative_to(root).parts)]
        files = sorted(path for path in paths if path.is_file() and not path.is_symlink())
        base = root.parent if (root / "__init__.py").exists() else root
        return {str(path.relative_to(base)): path.read_bytes() for path in files}
    except OSError as error:
        raise TaskError(f"{root} cannot be read: {error}", fix="give a folder that you may read") from error


def list_candidates(files: Mapping[str, bytes], only: str, modules: Collection[str]) -> list[tuple[str, str, Mutation]]:
    """All (path, source, mutation) of Python code that is not a test and whose path matches the glob `only`.

    `modules`, if known, limits them to installed files. Raises `TaskError`.
    """
    candidates: list[tuple[str, str, Mutation]] = []
    unreadable: list[str] = []
    for path, data in files.items():
        is_installed = path.endswith(".py") and path in (modules or files)
        if is_installed and fnmatch(path, only) and not is_test_or_docs(path):
            try:
                source = data.decode("utf-8")
                candidates += [(path, source, mutation) for mutation in list_mutations(source)]
            except (SyntaxError, ValueError) as error:
                unreadable.append(f"{path}: {error}")
    if not candidates:
        reason = f"; unreadable: {'; '.join(unreadable[:3])}" if unreadable else ""
        raise TaskError(
            f"no mutable function in the Python code of {len(files)} files (only={only!r}){reason}",
            fix="point path at Python code",
        )
    return candidates


async def find_bugs(
    files: Mapping[str, bytes],
    command: Sequence[str],
    sandbox: SandboxBackend,
    *,
    most: int,
    only: str,
    seed: int,
    timeout: float,
    environment: str = "",
    modules: Collection[str] = (),
    leave_out: bool = False,
) -> list[Bug]:
    """Up to `most` verified bugs in random order: `command` passes on `files`, and fails within `timeout` with the bug.

    Only tests that pass twice without a bug count. `leave_out` deselects a few failing pytest tests. Raises `TaskError`
    if tests fail without a bug, none run, or no bug is noticed; `SandboxFault` and `PrerequisiteError`.
    """
    pool = list_candidates(files, only, modules)
    Random(seed).shuffle(pool)
    by_key: dict[str, Bug] = {}
    with scratch("mutants") as folder:
        write_tree(folder / "tree", files)
        healthy = Task("mutants/healthy", "find bugs", "python", f"dir:{folder / 'tree'}", b"", environment=environment)
        runner = _TestRunner(command, timeout, sandbox, healthy)
        reliable = await _find_reliable_tests(runner, leave_out)
        tries = pool[: 4 * most]  # ends a search in which the tests notice fewer than a quarter
        for path, source, mutation in tries:
            broken = mutation.apply(source)
            ran = await runner.run({path: broken.encode()})
            failing, passing = tuple(sorted(reliable - ran.passing)), tuple(sorted(reliable & ran.passing))
            if ran.problem and not ran.is_late and (failing or not runner.results):
                bug = Bug(path, mutation, broken, source, ran.output_end, runner.command, failing, passing)
                by_key.setdefault(bug.key, bug)
            if len(by_key) == most:
                break
    if not by_key:
        raise TaskError(
            f"the tests notice none of {len(tries)} injected bugs: {' '.join(command)}",
            fix="give the command that runs them (the option command), or choose a package with better tests",
        )
    return list(by_key.values())


async def _find_reliable_tests(runner: _TestRunner, leave_out: bool) -> frozenset[str]:
    """Tests that pass twice without a bug; `leave_out` may reduce the runner's command."""
    ran = await runner.run()
    if leave_out and ran.problem and ran.failing and (reduced := await runner.deselect_failing()):
        runner.command = reduced
        ran = await runner.run()
    reliable = ran.passing
    if runner.results and not ran.problem:
        ran = await runner.run()
        reliable &= ran.passing
    if ran.problem:
        raise await runner.explain_failure(ran)
    if runner.results and not reliable:
        raise TaskError(
            f"no test is reported to pass in two runs: {' '.join(runner.command)}\n{ran.output_end}",
            fix="give the command that runs the tests: the option command (docs/guides/mutants.md)",
        )
    return reliable


class _TestRun(NamedTuple):
    """Result of a test run; `problem` is empty if the tests pass."""

    problem: str
    is_late: bool
    output: str
    passing: frozenset[str]
    failing: tuple[str, ...]
    has_started: bool

    @property
    def output_end(self) -> str:
        """End of the output."""
        return "\n".join(self.output.splitlines()[-SHOWN_LINES:])


_MISSING_MODULE = re.compile(r"(?:No module named|cannot import name .* from) '?([A-Za-z0-9_]+)")
_MISSING_PLUGIN = (
    (re.compile(r"unrecognized arguments: (.*)"), "the option {!r} belongs to a plugin that is not installed"),
    (re.compile(r"fixture '(\w+)' not found"), "the fixture {!r} belongs to a plugin that is not installed"),
    (re.compile(r"Missing required plugins: (.*)"), "the plugin {!r} is not installed"),
)


class _TestRunner:
    def __init__(self, command: Sequence[str], timeout: float, sandbox: SandboxBackend, healthy: Task) -> None:
        self.command = tuple(command)
        self.results = detect_runner(command)
        self._timeout = timeout
        self._sandbox = sandbox
        self._healthy = healthy

    async def run(self, changed: Mapping[str, bytes] = MappingProxyType({}), command: Sequence[str] = ()) -> _TestRun:
        """Run the tests with the files `changed`."""
        argv = tuple(command) or self.command
        full_command = Command(argv, self._timeout, self.results, test_timeout=2 * self._timeout)
        async with self._sandbox.open(self._healthy) as fresh:
            for path, content in changed.items():
                await fresh.write(path, content)
            ran = await try_command(fresh, full_command, Checks())
            output = ran.result.output.decode("utf-8", "replace").replace(f"{fresh.workdir}/", "").strip()
        passing = frozenset(name for name, outcome in ran.outcomes.items() if outcome is Outcome.PASSED)
        failing = tuple(name for name, outcome in ran.outcomes.items() if outcome is Outcome.FAILED)
        has_started = ran.result.exit_code not in CANNOT_RUN_CODES or bool(ran.outcomes)
        return _TestRun(ran.problem, ran.result.timed_out, output, passing, failing, has_started)

    async def deselect_failing(self) -> tuple[str, ...]:
        """Command that deselects failing tests; empty if it is not pytest's or too many fail."""
        if self.results != "pytest":
            return ()
        ran = await self.run(command=[word for word in self.command if word not in ("-x", "--exitfirst")])
        few = 0 < len(ran.failing) <= min(_MAX_DESELECTED, len(ran.passing))
        return (*self.command, *(f"--deselect={name}" for name in ran.failing)) if few else ()

    async def explain_failure(self, ran: _TestRun) -> TaskError:
        """Error for tests that fail without a bug: the cause, and the fix."""
        command = " ".join(self.command)
        if ran.is_late:
            return TaskError(f"the tests did not end in {self._timeout:g} s: {command}", fix="raise the option timeout")
        if re.search(r"no tests ran|collected 0 items|Ran 0 tests", ran.output) and not ran.failing:
            return TaskError(
                f"there are no tests: {command}\n{ran.output_end}",
                fix="name the repository (archives of a release may come without tests), or the command that runs them",
            )
        if not ran.has_started:
            return TaskError(
                f"{command} cannot be run in the sandbox: {ran.output_end}", fix="name a program in the option command"
            )
        problem = f"the tests fail before any bug is injected ({ran.problem}): {command}\n{ran.output_end}"
        if missing := _MISSING_MODULE.search(ran.output):
            return TaskError(
                problem,
                fix=f"the module {missing[1]!r} is not installed: name its package in the option requirements, as in "
                f"requirements={missing[1]}; if it is the project's own, start the option command with "
                "env PYTHONPATH=FOLDER",
            )
        for pattern, cause in _MISSING_PLUGIN:
            if match := pattern.search(ran.output):
                advice = "name its package in the option requirements, as in requirements='pytest-mock'"
                return TaskError(problem, fix=f"{cause.format(match[1])}: {advice}")
        if ran.failing and (reduced := await self.deselect_failing()):
            left_out = len(reduced) - len(self.command)
            return TaskError(
                f"{left_out} tests fail before any bug is injected: {command}\n{ran.output_end}",
                fix=f"leave them out, if they should fail here: command={shlex.quote(shlex.join(reduced))}",
            )
        return TaskError(problem, fix="give the command that passes in the sandbox: the option command")


def is_test_or_docs(path: str) -> bool:
    """Whether a package file is test, documentation or setup instead of code."""
    *folders, name = path.split("/")
    return (
        name.startswith(("test_", "check_"))
        or name.endswith("_test.py")
        or name in ("conftest.py", "setup.py")
        or bool({"tests", "test", "docs", "examples"} & set(folders))
    )
