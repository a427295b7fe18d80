"""Patches that are no diffs, or far too long, and code under test that runs wild: scored by rule, nothing is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from coderepairrl.errors import PrerequisiteError
from coderepairrl.rewards import make_rewards, score, with_patch
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.types import Checks, Command, Score, Task
from rewards.folder import Local, Repository

SOURCE = b"def add(a, b):\n    return a - b\n"
CHECK = "from maths import add\nassert add(2, 3) == 5\n"
HEAD = b"diff --git a/maths.py b/maths.py\n--- a/maths.py\n+++ b/maths.py\n"
PATCH = HEAD + b"@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
SIZE = 100_000

COMPARE = ("patch_edits", "patch_lines", "patch_similarity", "nano_similarity", "draft_similarity", "file_match")
HOSTILE = {
    "no diff": b"I fixed it!\n",
    "half a header": PATCH[:20],
    "half a hunk": PATCH[:-20],
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


@pytest.fixture
def task(repository: Repository) -> Task:
    repository.commit({"maths.py": SOURCE})
    checks = Checks((Command((sys.executable, "-S", "-B", "check.py"), 60.0),), {"check.py": CHECK})
    return Task("t/add", "", "python", f"dir:{repository.folder}", PATCH, checks)


@pytest.fixture(scope="module")
def bwrap() -> Iterator[Bubblewrap]:
    limits = {"memory": 256 << 20, "disk_bytes": 16 << 20, "tmp_bytes": 16 << 20, "processes": 40, "files": 2000}
    backend = Bubblewrap(**limits)
    assert isinstance(backend, Bubblewrap)
    try:
        backend.require()
    except PrerequisiteError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield backend
    backend.close()


@pytest.mark.parametrize("kind", HOSTILE)
async def test_any_patch_is_scored(kind: str, task: Task, backend: Local) -> None:
    scores = await score(make_rewards(dict.fromkeys(COMPARE, 1.0)), task, with_patch(task, HOSTILE[kind]), backend)
    assert len(scores) == len(COMPARE) and all(0.0 <= found.value <= 1.0 for found in scores)
    if kind != "no end":
        assert scores[0].value < 0.5, scores  # of the default


async def test_a_patch_of_a_hundred_megabytes_is_no_repair(task: Task, backend: Local) -> None:
    patch = PATCH.replace(b"a + b", b"x" * 100_000_000)
    scores = await score(make_rewards(dict.fromkeys(COMPARE, 1.0)), task, with_patch(task, patch), backend)
    assert {(found.value, found.note) for found in scores} == {(0.0, "a patch of 95 MiB")}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_what_git_does_not_take_fails_the_tests(kind: str, task: Task, backend: Local) -> None:
    [found] = await score(make_rewards("tests"), task, with_patch(task, HOSTILE[kind]), backend)
    assert found.value == 0.0 and found.note


@pytest.mark.parametrize("kind", WILD)
async def test_code_that_runs_wild_fails_its_check_and_nothing_is_left(
    kind: str, repository: Repository, bwrap: Bubblewrap
) -> None:
    repository.commit({"maths.py": SOURCE})
    seconds = 60.0 if kind in ("fills the disk", "fills the memory", "fills folders") else 2.0
    checks = Checks((Command(("python3", "check.py"), seconds),), {"check.py": CHECK})
    task = Task("t/wild", "", "python", f"dir:{repository.folder}", PATCH, checks)
    patch = repository.edit({"maths.py": f"{WILD[kind]}\n".encode() + SOURCE})
    [found] = await score(make_rewards("tests"), task, with_patch(task, patch), bwrap)
    assert found.value == 0.0 and found.note.startswith("check failed"), found
    assert list(bwrap.state.glob("box-*")) == []


async def test_a_repair_passes_beside_them(task: Task, repository: Repository, bwrap: Bubblewrap) -> None:
    checks = Checks((Command(("python3", "check.py"), 60.0),), {"check.py": CHECK})
    honest = Task("t/tame", "", "python", task.workspace, PATCH, checks)
    assert await score(make_rewards("tests"), honest, with_patch(honest, PATCH), bwrap) == (
        Score("tests", 1.0, passed=True),
    )
