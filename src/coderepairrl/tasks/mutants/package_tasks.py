"""Mutants of a user's own Python package or repository: the whole tree with one bug, verified by its own tests."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar, cast

from coderepairrl.errors import TaskError
from coderepairrl.grading import Outcome, Outcomes, reported, results_of
from coderepairrl.processes import hostgit
from coderepairrl.processes.children import run
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Sandbox
from coderepairrl.tasks.folders import write_tree
from coderepairrl.tasks.mutants.mutations import Mutation, mutations
from coderepairrl.types import Checks, Command, ExecResult

T = TypeVar("T")

SKIPPED = frozenset({".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", "build", "dist", ".tox"})
_DESELECTED = 20
SHOWN_LINES = 6
"""Lines of the failing tests' output that an issue quotes."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A verified bug in a package. `output` are the last lines that the failing tests printed.

    The tests of both lists pass without it; the first fail with it, or are not reached. Empty where the command does
    not report single tests. `command` is the one that ran them.
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
    """The files of a folder, or of a git repository's HEAD. Raises `TaskError`.

    A folder that is itself a package (it has an ``__init__.py``) keeps its name, so that it can be imported.
    """
    try:
        return _read_tree(root)
    except OSError as error:
        raise TaskError(f"{root} cannot be read: {error}", fix="give a folder that you may read") from error


def _read_tree(root: Path) -> dict[str, bytes]:
    if not root.is_dir():
        raise TaskError(f"{root} is not a folder", fix="give the folder of a Python package or a git repository")
    if (root / ".git").exists():
        with hostgit.view(hostgit.find(root)) as view:
            names = view.files(view.head())
            if view.changes(untracked=False):
                raise TaskError(f"{root} has uncommitted changes", fix="commit or stash them first")
        paths = [root / name for name in names]
    else:
        paths = [path for path in root.rglob("*") if not SKIPPED & set(path.relative_to(root).parts)]
    files = sorted(path for path in paths if path.is_file() and not path.is_symlink())
    base = root.parent if (root / "__init__.py").exists() else root
    return {str(path.relative_to(base)): path.read_bytes() for path in files}


def candidates(
    files: Mapping[str, bytes], only: str = "*", modules: Collection[str] = ()
) -> list[tuple[str, str, Mutation]]:
    """Every (path, source, mutation) of code that matches the glob `only` and is not a test.

    `modules` are the files that the project installs, if known: nothing else is broken. Raises `TaskError`.
    """
    found: list[tuple[str, str, Mutation]] = []
    broken: list[str] = []
    for path, data in files.items():
        if path.endswith(".py") and fnmatch(path, only) and not _is_test(path) and path in (modules or files):
            try:
                source = data.decode("utf-8")
                found += [(path, source, mutation) for mutation in mutations(source)]
            except (SyntaxError, ValueError) as error:
                broken.append(f"{path}: {error}")
    if not found:
        why = f"; unreadable: {'; '.join(broken[:3])}" if broken else ""
        raise TaskError(
            f"no mutable function in {len(files)} files (only={only!r}){why}", fix="point path at Python code"
        )
    return found


def bugs(
    files: Mapping[str, bytes],
    command: Sequence[str],
    *,
    only: str,
    seed: int,
    timeout: float,
    attempts: int,
    environment: Path | None = None,
    modules: Collection[str] = (),
    leave_out: bool = False,
) -> Iterator[Bug]:
    """Verified bugs in random order: `command` passes on `files` and fails, in time, with the bug.

    The command runs on this machine, in a temporary copy, with the programs of the virtual environment `environment` if
    there is one. Where it reports single tests it first runs twice without any bug, in two folders: only tests that
    pass both times are counted on. At most `attempts` mutations are tried (`candidates`). With
    `leave_out`, a few tests of pytest that fail without any bug are left out of the command. Raises `TaskError` when
    the tests already fail without any bug, when the command runs none, and when nothing at all makes them fail.
    """
    pool = candidates(files, only, modules)
    Random(seed).shuffle(pool)
    with scratch("mutants") as folder:
        tree = folder / "tree"
        runner, steady = _healthy(_Runner(command, timeout, environment), files, folder, leave_out)
        found = 0
        for path, source, mutation in pool[:attempts]:
            broken = mutation.apply(source)
            (tree / path).write_bytes(broken.encode())
            ran = runner.run(tree)
            (tree / path).write_bytes(files[path])
            failing, passing = tuple(sorted(steady - ran.passing)), tuple(sorted(steady & ran.passing))
            if ran.passed is False and (failing or not runner.results):
                found += 1
                yield Bug(path, mutation, broken, source, ran.shown, runner.command, failing, passing)
        if not found:
            tried = min(attempts, len(pool))
            raise TaskError(
                f"the tests notice none of {tried} injected bugs: {' '.join(command)}",
                fix="give the command that runs them (the option command), or choose a package with better tests",
            )


def _healthy(
    runner: _Runner, files: Mapping[str, bytes], folder: Path, leave_out: bool
) -> tuple[_Runner, frozenset[str]]:
    """Write `files` below ``folder / "tree"``; the runner to use, and the tests that pass there each time."""
    tree = folder / "tree"
    write_tree(tree, files)
    ran = runner.run(tree)
    if leave_out and not ran.passed and ran.failing and (less := runner.without_failing(tree)):
        runner = runner.with_command(less)
        ran = runner.run(tree)
    steady = ran.passing
    if runner.results and ran.passed:
        again = folder / "again"
        write_tree(again, files)
        ran = runner.run(again)
        steady &= ran.passing
    if not ran.passed:
        raise runner.refusal(ran, tree)
    if runner.results and not steady:
        raise TaskError(
            f"no test reports that it passes: {' '.join(runner.command)}\n{ran.shown}",
            fix="give the command that runs the tests: the option command (docs/guides/tasks.md)",
        )
    return runner, steady


class _Here:
    """A folder of this machine, where the user asked for the tests to be run, in the place of a sandbox."""

    def __init__(self, tree: Path, environment: Path | None) -> None:
        self.workdir = str(tree)
        self._environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
        self._environment.pop("PYTEST_ADDOPTS", None)
        if environment is not None:
            self._environment["PATH"] = f"{environment}/bin:{os.environ.get('PATH', os.defpath)}"

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_bytes: int = 1 << 20,
        cwd: str | None = None,
    ) -> ExecResult:
        """As `Sandbox.exec`, and never waits for anything in the event loop. Raises OSError without the program."""
        environment = {**self._environment, **(env or {})}
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            try:
                done = run(
                    argv,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    timeout=timeout,
                    cwd=cwd or self.workdir,
                    env=environment,
                )
            except subprocess.TimeoutExpired:
                return ExecResult(124, b"", timed_out=True)
        return ExecResult(done.returncode, done.stdout[:max_bytes], truncated=len(done.stdout) > max_bytes)


class _Ran(NamedTuple):
    """Whether the tests pass (None: they did not end in time), what they print, its end, and which of them pass."""

    passed: bool | None
    output: str = ""
    shown: str = ""
    passing: frozenset[str] = frozenset()
    failing: tuple[str, ...] = ()


_MODULE = re.compile(r"(?:No module named|cannot import name .* from) '?([A-Za-z0-9_]+)")
_CAUSES = (
    (re.compile(r"unrecognized arguments: (.*)"), "the option {!r} is of a plugin that is not there: {name_it}"),
    (re.compile(r"fixture '(\w+)' not found"), "the fixture {!r} is of a plugin that is not there: {name_it}"),
    (re.compile(r"Missing required plugins: (.*)"), "the plugin {!r} is not there: {name_it}"),
)
_NAME_IT = "name its package in the option requirements, as in requirements='pytest-mock'"


class _Runner:
    """Runs the tests by `command`, which may take `timeout` seconds."""

    def __init__(self, command: Sequence[str], timeout: float, environment: Path | None) -> None:
        self.command = tuple(command)
        self.results = results_of(command)
        self._timeout = timeout
        self._environment = environment

    def with_command(self, command: Sequence[str]) -> _Runner:
        """The same with another command."""
        return _Runner(command, self._timeout, self._environment)

    def run(self, tree: Path, command: Sequence[str] = ()) -> _Ran:
        """The tests in the folder `tree`. Raises `TaskError` where the command cannot be run."""
        asked = Command(tuple(command) or self.command, self._timeout, self.results, test_timeout=2 * self._timeout)
        try:
            done, outcomes = _at_once(_tested(_Here(tree, self._environment), asked))
        except OSError as error:
            raise TaskError(
                f"{' '.join(asked.argv)} cannot be run: {error}", fix="name a program in the option command"
            ) from error
        if done.timed_out:
            return _Ran(None)
        output = done.output.decode("utf-8", "replace").replace(f"{tree}/", "").strip()
        passing = frozenset(name for name, outcome in outcomes.items() if outcome is Outcome.PASSED)
        failing = tuple(name for name, outcome in outcomes.items() if outcome is Outcome.FAILED)
        return _Ran(done.exit_code == 0, output, "\n".join(output.splitlines()[-SHOWN_LINES:]), passing, failing)

    def without_failing(self, tree: Path) -> tuple[str, ...]:
        """The command without the tests that fail; nothing if that is none of pytest, or too many fail for that."""
        if self.results != "pytest":
            return ()
        ran = self.run(tree, [word for word in self.command if word not in ("-x", "--exitfirst")])
        few = 0 < len(ran.failing) <= min(_DESELECTED, len(ran.passing))
        return (*self.command, *(f"--deselect={name}" for name in ran.failing)) if few else ()

    def refusal(self, ran: _Ran, tree: Path) -> TaskError:
        """Why tests that do not pass without any bug cannot be used, and what to do."""
        command = " ".join(self.command)
        if ran.passed is None:
            return TaskError(f"the tests did not end in {self._timeout:g} s: {command}", fix="raise the option timeout")
        if re.search(r"no tests ran|collected 0 items|Ran 0 tests", ran.output) and not ran.failing:
            return TaskError(
                f"there are no tests: {command}\n{ran.shown}",
                fix="name the repository (archives of a release may come without tests), or the command that runs them",
            )
        problem = f"the tests fail before any bug is injected: {command}\n{ran.shown}"
        if lacking := _MODULE.search(ran.output):
            return TaskError(
                problem,
                fix=f"the module {lacking[1]!r} is not there: name its package in the option requirements, as in "
                f"requirements={lacking[1]}; if it is the project's own, start the option command with "
                "env PYTHONPATH=FOLDER",
            )
        for pattern, words in _CAUSES:
            if found := pattern.search(ran.output):
                return TaskError(problem, fix=words.format(found[1], name_it=_NAME_IT))
        if ran.failing and (less := self.without_failing(tree)):
            left_out = len(less) - len(self.command)
            return TaskError(
                f"{left_out} tests fail before any bug is injected: {command}\n{ran.shown}",
                fix=f"leave them out, if they should fail here: command={shlex.quote(shlex.join(less))}",
            )
        return TaskError(problem, fix="give the command that passes, here and in the sandbox: the option command")


async def _tested(here: _Here, command: Command) -> tuple[ExecResult, Outcomes]:
    if not command.results:
        return await here.exec(command.argv, timeout=command.timeout), {}
    done, report = await reported(cast(Sandbox, here), command, Checks())
    return done, report.outcomes


def _at_once(asked: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing: bugs are looked for where an event loop may be running."""
    try:
        asked.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    raise RuntimeError("it waited")


def _is_test(path: str) -> bool:
    parts = path.split("/")
    name = parts[-1]
    return (
        name.startswith(("test_", "check_"))
        or name.endswith("_test.py")
        or name in ("conftest.py", "setup.py")
        or bool({"tests", "test", "docs", "examples"} & set(parts[:-1]))
    )
