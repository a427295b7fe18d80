"""A subtest decides for its test only if it fails, or if code under test skips it."""

from __future__ import annotations

import sys

import pytest

from coderepairrl.grading import Outcome
from coderepairrl.grading.reports import PARSERS
from coderepairrl.types import Checks, Command
from rewards.folder import Repository, grade_in_sandbox

PASSED, SKIPPED, FAILED = Outcome
CODE = """import unittest
def add(a, b): return a + b
def skip(): raise unittest.SkipTest('no')
def leave():
    import pytest
    pytest.skip('no')
"""
CASES = """import unittest
from sums import add, skip
class T(unittest.TestCase):
    def check(self, *steps):
        for step in steps:
            with self.subTest(step=step):
                step()
    def test_passing(self): self.check(lambda: self.assertEqual(add(1, 1), 2), lambda: None)
    def test_one_skipped(self): self.check(lambda: None, lambda: self.skipTest('here'))
    def test_one_failing(self): self.check(lambda: None, lambda: self.fail(), lambda: None)
    def test_skipped_by_the_code(self): self.check(lambda: None, skip)
    @unittest.skip('no')
    def test_skipped(self): self.check()
"""
FIXTURES = """import pytest
from sums import add, leave
def test_passing(subtests):
    for number in range(2):
        with subtests.test(number=number): assert add(number, 1) == number + 1
def test_one_skipped(subtests):
    with subtests.test(): pytest.skip('here')
def test_one_failing(subtests):
    with subtests.test(): assert add(1, 1) == 3
def test_skipped_by_the_code(subtests):
    with subtests.test(): leave()
@pytest.mark.skip
def test_skipped(subtests): pass
"""
OUTCOMES = {
    "test_passing": PASSED,
    "test_one_skipped": PASSED,
    "test_one_failing": FAILED,
    "test_skipped_by_the_code": FAILED,
    "test_skipped": SKIPPED,
}
OF_UNITTEST = OUTCOMES | {"test_one_skipped": SKIPPED}
"""unittest reports a test with a skipped subtest as skipped, pytest as passed."""
RUNNERS = {
    "unittest": (("-m", "unittest"), {"test_sums.py": CASES}),
    "pytest": (("-m", "pytest", "-q", "-p", "no:cacheprovider"), {"test_sums.py": CASES, "test_fix.py": FIXTURES}),
}


@pytest.mark.parametrize("kind", RUNNERS)
async def test_outcomes_are_those_of_tests(kind: str, repository: Repository) -> None:
    argv, tests = RUNNERS[kind]
    command = Command(("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, *argv), 30.0)
    found = (await grade_in_sandbox(repository.task({"sums.py": CODE}, {}, Checks((command,), tests)), b"")).outcomes
    files = [name for name in found if name.endswith("passing")]
    assert len(files) == len(tests)
    said = OUTCOMES if kind == "pytest" else OF_UNITTEST
    assert found == {file.replace("test_passing", name): outcome for file in files for name, outcome in said.items()}


def test_unittests_text_says_the_same() -> None:
    text = """\
test_one_skipped (test_m.T.test_one_skipped) ...
  test_one_skipped (test_m.T.test_one_skipped) (i=1) ... skipped 'here'
test_one_failing (test_m.T.test_one_failing) ...
  test_one_failing (test_m.T.test_one_failing) [why] (i=1) ... FAIL
test_passing (test_m.T.test_passing) ... ok
"""
    assert PARSERS["unittest"](text) == {f"test_m.T.{name}": OF_UNITTEST[name] for name in [*OUTCOMES][:3]}
