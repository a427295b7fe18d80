"""A grader that cannot run is a fault and no zero; what a policy breaks is a zero and no fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.errors import GraderFault
from coderepairrl.protocols import SandboxBackend
from coderepairrl.rewards import TestsReward, make_patched_episode
from coderepairrl.rewards.tests import StateTests
from coderepairrl.sandbox.wrapped import OpenSandboxBackend
from coderepairrl.types import Checks, Command, Score, Task
from rewards.folder import Local, Repository, bwrap

SOURCE = b"def add(a, b):\n    return a - b\n"
FIXED = SOURCE.replace(b"-", b"+")
TEST = "import sums\n\n\ndef test_add():\n    assert sums.add(2, 3) == 5\n"
SCRIPT = f"{TEST}\n\ntest_add()\n"
CASE = """import unittest

import sums


class T(unittest.TestCase):
    def test_add(self):
        self.assertEqual(sums.add(2, 3), 5)
"""
PYTEST = Command(("python3", "-m", "pytest", "-q", "test_sums.py"), 30.0, "pytest")
PLAIN = Command(("sh", "-c", "python3 -B test_sums.py"), 30.0)


MISSING = (Command(("no-such-runner",)), Command(("python3", "-m", "no_such", "-m", "pytest"), 30.0, "pytest"))


@pytest.fixture
def task(repository: Repository) -> Task:
    checks = Checks((PYTEST,), {"test_sums.py": TEST}, ("test_sums.py::test_add",))
    return repository.task({"sums.py": SOURCE}, {"sums.py": FIXED}, checks)


def commanded(task: Task, *commands: Command, test: str = TEST) -> Task:
    return replace(task, checks=Checks(commands, {"test_sums.py": test}))


async def judged(task: Task, patch: bytes, backend: Local, reward: TestsReward | None = None) -> Score:
    return await (reward or TestsReward())(task, make_patched_episode(task, patch), backend)


async def test_without_pytest_in_the_sandbox_a_repair_is_a_fault(task: Task, repository: Repository) -> None:
    backend = bwrap()
    unnamed = commanded(task, replace(PYTEST, results="pytest"))
    by_exit_code = commanded(task, replace(PYTEST, results=""))
    for each in (task, unnamed, by_exit_code):
        other = repository.edit({"sums.py": b"add = lambda *n: sum(n)\n"})
        for patch in (task.reference, other):  # the reference is its own control
            with pytest.raises(GraderFault, match="No module named pytest") as caught:
                await TestsReward()(each, make_patched_episode(each, patch), backend)
            assert "sandbox.options.binds" in caught.value.fix


@pytest.mark.parametrize(
    "argv", [("no-such-runner", "test"), ("sh", "-c", "no-such-runner test"), ("./missing",), ("python3", "missing.py")]
)
async def test_a_missing_program_is_a_fault(argv: tuple[str, ...], task: Task, backend: Local) -> None:
    with pytest.raises(GraderFault, match="not even on its reference"):
        await judged(commanded(task, Command(argv)), task.reference, backend)


BREAKS = {
    "exits as a shell does": b"import os; os._exit(127)\n",
    "says that a module is missing": b"import pytest_of_nowhere\n",
    "claims it": b"import sys; sys.exit('No module named pytest')\n",
    "prints it": b"print('sh: 1: pytest: not found'); import os; os._exit(126)\n",
}


@pytest.mark.parametrize("kind", ["plain", "unittest"])
async def test_what_a_patch_breaks_is_a_zero(kind: str, task: Task, repository: Repository, backend: Local) -> None:
    command = PLAIN if kind == "plain" else Command(("python3", "-m", "unittest", "-q"), 30.0, "unittest")
    task = commanded(task, command, test=SCRIPT if kind == "plain" else CASE)
    reward = TestsReward()
    for name, top in BREAKS.items():
        found = await judged(task, repository.edit({"sums.py": top + FIXED}), backend, reward)
        assert found.value == 0.0, name
    assert len(backend.opened) == len(BREAKS) + 1, "one control for all"
    assert (await judged(task, task.reference, backend, reward)).value == 1.0


async def test_a_runner_that_the_patch_deletes_is_a_zero(repository: Repository, backend: Local) -> None:
    repository.put({"sums.py": SOURCE, "tools/run": "#!/bin/sh\npython3 -B check.py\n"})
    (repository.folder / "tools/run").chmod(0o755)
    # a pattern, so that the command does not name it: what it names, a patch cannot delete
    checks = Checks((Command(("sh", "-c", "exec tools/r*n"), 30.0),), {"check.py": SCRIPT})
    task = repository.task({}, {"sums.py": FIXED}, checks)
    assert (await judged(task, task.reference, backend)).value == 1.0
    gone = repository.edit({"sums.py": FIXED, "tools/run": None})
    found = await judged(task, gone, backend)
    assert (found.value, "exit code 127" in found.note) == (0.0, True)


async def test_without_a_reference_the_untouched_tree_is_the_control(
    task: Task, repository: Repository, backend: Local
) -> None:
    bare = replace(commanded(task, PLAIN, test=SCRIPT), reference=b"")
    assert (await judged(bare, repository.edit({"sums.py": BREAKS["prints it"]}), backend)).value == 0.0
    for missing in MISSING:
        with pytest.raises(GraderFault, match="untouched repository"):
            await judged(commanded(bare, missing), task.reference, backend)


CONFTEST = "import sums\n"


@pytest.mark.parametrize("command", [PLAIN, PYTEST, replace(PYTEST, results=""), Command(("python3", "-m", "solve"))])
async def test_without_a_reference_no_patch_reaches_a_fault_by_leaving_undone_what_is_asked_for(
    command: Command, task: Task, repository: Repository, backend: Local
) -> None:
    """Checks of a module that the patch is to add do not begin on the untouched tree."""
    repository.commit({"sums.py": None, "other.py": SOURCE})
    checks = Checks((command,), {"test_sums.py": SCRIPT, "conftest.py": CONFTEST})
    bare = replace(task, reference=b"", checks=checks)
    idle = repository.edit({"other.py": FIXED})
    repair = repository.edit({"sums.py": FIXED, "solve.py": b"import test_sums\n"})
    found = await judged(bare, idle, backend)
    assert (found.value, bool(found.note)) == (0.0, True)
    async with backend.open(bare) as box:
        assert (
            await StateTests()(bare, make_patched_episode(bare, idle), OpenSandboxBackend(backend, box))
        ).value == 0.0
    assert (await judged(bare, repair, backend)).value == 1.0


async def stands(task: Task, change: str, backend: SandboxBackend, reward: StateTests) -> Score:
    """The score of an attempt that ran the shell commands `change`."""
    async with backend.open(task) as box:
        assert (await box.exec(["sh", "-c", change])).ok
        return await reward(task, make_patched_episode(task, b""), OpenSandboxBackend(backend, box))


async def test_checks_that_cannot_begin_in_the_workspace_of_an_attempt_are_a_fault(task: Task, backend: Local) -> None:
    """Whatever the attempt did; one that keeps checks from beginning that can, and one that does nothing, earn 0."""
    installed = Command(("sh", "-c", "cat made/answer && no-such-tool"), 30.0)
    for command in MISSING:
        for each in (replace(commanded(task, command), reference=b""), commanded(task, command)):
            for change in ("true", "rm sums.py"):
                with pytest.raises(GraderFault, match="cannot run in the sandbox"):
                    await stands(each, change, backend, StateTests())
    reward, unmade = StateTests(), replace(commanded(task, installed), reference=b"")
    assert (await stands(unmade, "true", backend, reward)).value == 0, "what it looks for is not there yet"
    cases = replace(commanded(task, Command(("python3", "-m", "unittest", "-q"), 30.0), test=CASE), reference=b"")
    for change, earned in (("true", 0), ("sed -i s/-/+/ sums.py", 1), ("echo 'import os; os._exit(127)' > sums.py", 0)):
        assert (await stands(cases, change, backend, reward)).value == earned, change


async def test_an_attempt_that_closes_the_temporary_folder_earns_nothing(task: Task) -> None:
    packages = str(Path(pytest.__file__).parents[1])
    backend = bwrap(binds=(packages,), env={"PYTHONPATH": packages, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    repair = "sed -i s/-/+/ sums.py"
    for change, earned in ((repair, 1), (f"{repair}; chmod 000 /tmp", 0)):
        assert (await stands(task, change, backend, StateTests())).value == earned, change
