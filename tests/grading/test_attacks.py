"""Cheats against the runners, each in a real sandbox: none passes, and without a witness each does."""

from __future__ import annotations

from pathlib import Path

import pytest

from coderepairrl import sandbox as sandboxes
from coderepairrl.grading import apply, grade
from coderepairrl.grading.checks import restore
from coderepairrl.grading.steering import left_out
from coderepairrl.protocols import SandboxBackend
from coderepairrl.types import Checks, Command, Task
from grading.cheats import ANY, PYTEST, REPAIRED, SOURCE, UNITTEST
from rewards.folder import Repository, bwrap

CASES = """import unittest

from limits import clamp


class Clamp(unittest.TestCase):
    def test_high(self):
        value = clamp(10, 0, 9)
        self.assertEqual(value, 9)
        del value

    def test_low(self):
        self.assertEqual(clamp(-1, 0, 9), 0)


if __name__ == "__main__":
    unittest.main()
"""
PLAIN = """from limits import clamp


def test_high():
    assert clamp(10, 0, 9) == 9


def test_low():
    assert clamp(-1, 0, 9) == 0
"""
FIRST = "import limits  # noqa: F401 - before the other tests do\n"
FINE = "import unittest\n\n\nclass Fine(unittest.TestCase):\n    def test_fine(self):\n        pass\n"
COMMANDS = {
    "script": ("python3", "-B", "test_limits.py"),
    "unittest": ("python3", "-B", "-m", "unittest"),
    "pytest": ("python3", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    "pytest of cases": ("python3", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
}
NOT_BY = {
    "script": {
        *("skips when imported", "tests that are written anew", "a run that stops"),
        *("classes that are built without tests",),
    },
    "pytest of cases": {"failures as successes", "tests that are not run", "a run that stops", "expects to fail"},
}
"""What is no cheat there, as its control shows: it does not pass without a witness either."""
PLAYED = [
    *[("script", name) for name in (*ANY, *UNITTEST) if name not in NOT_BY["script"]],
    *[("unittest", name) for name in (*ANY, *UNITTEST)],
    *[("pytest", name) for name in (*ANY, *PYTEST) if "cases" not in name],
    *[("pytest of cases", name) for name in UNITTEST if name not in NOT_BY["pytest of cases"]],
    ("pytest of cases", "test cases without content"),
]


@pytest.fixture(scope="session")
def backend() -> SandboxBackend:
    """The real sandbox, which is shown the folder that has pytest."""
    bwrap()
    packages = Path(pytest.__file__).parents[1]
    env = {"PYTHONPATH": str(packages), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return sandboxes.make("bwrap", binds=(str(packages),), env=env)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    folder = tmp_path / "repository"
    folder.mkdir()
    return Repository(folder)


def made(repository: Repository, kind: str) -> Task:
    tests = {"test_limits.py": PLAIN if kind == "pytest" else CASES, "test_a.py": FIRST, "test_b.py": FINE}
    repository.commit({"limits.py": SOURCE.encode(), **{name: text.encode() for name, text in tests.items()}})
    oracle = repository.edit({"limits.py": REPAIRED.encode()})
    checks = Checks((Command(COMMANDS[kind], 30.0),), tests)
    return Task(f"t/{kind}", "", "python", f"dir:{repository.folder}", oracle, checks)


def cheat(repository: Repository, name: str) -> bytes:
    return repository.edit({path: text.encode() for path, text in {**ANY, **UNITTEST, **PYTEST}[name].items()})


@pytest.mark.parametrize("kind", COMMANDS)
async def test_a_repair_passes_and_the_bug_does_not(kind: str, repository: Repository, backend: SandboxBackend) -> None:
    task = made(repository, kind)
    async with backend.open(task) as fresh:
        assert (await grade(fresh, task, task.reference)).problem == ""
    patch = repository.edit({"limits.py": b"# nothing\n" + SOURCE.encode()})
    async with backend.open(task) as fresh:
        assert "check failed" in (await grade(fresh, task, patch)).problem


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] == "pytest of cases")) for each in PLAYED],
)
async def test_cheats_do_not_pass(kind: str, name: str, repository: Repository, backend: SandboxBackend) -> None:
    task = made(repository, kind)
    async with backend.open(task) as fresh:
        assert (await grade(fresh, task, cheat(repository, name))).problem


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), PLAYED)
async def test_without_a_witness_they_do(kind: str, name: str, repository: Repository, backend: SandboxBackend) -> None:
    """The positive control: the exit code says that all is well."""
    task = made(repository, kind)
    async with backend.open(task) as fresh:
        assert await apply(fresh, cheat(repository, name), left_out(task.reference, task.checks)) == ""
        assert await restore(fresh, task.checks) == ""
        done = await fresh.exec(COMMANDS[kind], timeout=30.0)
        assert done.ok, done.output.decode()
