"""Patches that are no diffs, or far too long, and code under test that runs wild: scored by rule, nothing is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from coderepairrl.rewards import make_patched_episode, make_rewards, score_episode
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.types import Checks, Command, Score, Task
from rewards import folder
from rewards.folder import Local, Repository

SOURCE = b"def add(a, b):\n    return a - b\n"
CHECK = "from maths import add\nassert add(2, 3) == 5\n"
HEAD = b"diff --git a/maths.py b/maths.py\n--- a/maths.py\n+++ b/maths.py\n"
PATCH = HEAD + b"@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
SIZE = 100_000

COMPARE = ("patch_edits", "patch_lines", "patch_similarity", "nano_similarity", "draft_similarity", "file_match")
HOSTILE = {
    "half a header": PATCH[:20],
    "no end": PATCH[:-1],
    "a count beyond all numbers": PATCH.replace(b"-1,2", b"-1," + b"9" * 5000),
    "bytes that are not text": PATCH.replace(b"a + b", b"\xff\xfe\x80"),
    "null bytes": PATCH.replace(b"a + b", b"\0\0"),
    "noise": os.urandom(SIZE),
    "empty lines": b"\n" * SIZE,
    "headers in a header": b"diff --git " * SIZE,
    "one long line": PATCH.replace(b"a + b", b"x" * SIZE),
    "brackets": PATCH.replace(b"a + b", b"(" * SIZE),
    "one line again and again": HEAD + b"@@ -2 +2,5000 @@\n-    return a - b\n" + b"+    return a - b\n" * 5000,
    "a great many files": b"".join(PATCH.replace(b"maths", b"m%d" % number) for number in range(500)),
}

WILD = {
    "hangs": "while True: pass",
    "forks": "import os\nwhile True: os.fork()",
    "prints without end": "import os\nwhile True: os.write(1, bytes(1 << 20))",
    "fills the disk": "with open('fill', 'wb') as f:\n  while True: f.write(bytes(1 << 20))",
    "fills the memory": "x = bytearray(1 << 30)",
    "kills whatever it can": "import os\nos.kill(-1, 9)",
    "fills folders": "import os\nfor n in range(10 ** 6): os.mkdir(f'd{n}')",
}
ENDLESS = ("hangs", "forks", "prints without end", "kills whatever it can")


def make_task(repository: Repository, *argv: str, seconds: float = 60.0) -> Task:
    """The task whose check `argv` runs."""
    checks = Checks((Command((*argv, "check.py"), seconds),), {"check.py": CHECK})
    return repository.task({"maths.py": SOURCE}, {"maths.py": SOURCE.replace(b"-", b"+")}, checks)


@pytest.fixture
def task(repository: Repository) -> Task:
    return make_task(repository, sys.executable, "-S", "-B")


@pytest.fixture(scope="module")
def bwrap(isolating: None) -> Iterator[Bubblewrap]:
    limits = {"memory": 256 << 20, "disk_bytes": 16 << 20, "tmp_bytes": 16 << 20, "processes": 40, "files": 2000}
    with closing(folder.bwrap(**limits)) as backend:
        yield backend


@pytest.mark.parametrize("kind", HOSTILE)
async def test_any_patch_is_scored_and_what_git_does_not_take_fails_the_tests(
    kind: str, task: Task, backend: Local
) -> None:
    rewards = make_rewards(dict.fromkeys((*COMPARE, "tests"), 1.0))
    *scores, tests = await score_episode(rewards, task, make_patched_episode(task, HOSTILE[kind]), backend)
    assert len(scores) == len(COMPARE) and all(0.0 <= found.value <= 1.0 for found in scores)
    if kind != "no end":
        assert scores[0].value < 0.5, scores  # of the default
    assert tests.value == 0.0 and tests.note


async def test_a_patch_of_a_hundred_megabytes_is_no_repair(task: Task, backend: Local) -> None:
    patch = PATCH.replace(b"a + b", b"x" * 100_000_000)
    scores = await score_episode(
        make_rewards(dict.fromkeys(COMPARE, 1.0)), task, make_patched_episode(task, patch), backend
    )
    assert {(found.value, found.note) for found in scores} == {(0.0, "a patch of 95 MiB")}


@pytest.mark.parametrize("kind", [*WILD, "a repair"])
async def test_code_that_runs_wild_fails_its_check_and_nothing_is_left(
    kind: str, repository: Repository, bwrap: Bubblewrap
) -> None:
    """Beside them a repair passes, which is the control."""
    task = make_task(repository, "python3", seconds=2.0 if kind in ENDLESS else 60.0)
    wild = f"{WILD.get(kind)}\n".encode() + SOURCE
    patch = repository.edit({"maths.py": wild}) if kind in WILD else task.reference
    [found] = await score_episode(make_rewards("tests"), task, make_patched_episode(task, patch), bwrap)
    if kind in WILD:
        assert found.value == 0.0 and found.note.startswith("check failed"), found
    else:
        assert found == Score("tests", 1.0, passed=True)
    assert list(bwrap.state.glob("box-*")) == []
