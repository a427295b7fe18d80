"""A repair anywhere in a git repository is found; ancestors of the commit are no leak."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.checks.audit.history import History, find_unreachable, search_history
from coderepairrl.protocols import Sandbox
from coderepairrl.types import ExecResult
from rewards.folder import git

BUG, REPAIR = b"def add(a, b):\n    return a - b\n", b"def add(a, b):\n    return a + b  # the repaired sum\n"
BEFORE, AFTER = {"m.py": BUG}, {"m.py": REPAIR}


class Folder(Sandbox):
    """A sandbox whose commands run in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def exec(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0, **_: Any) -> ExecResult:
        done = subprocess.run(argv, cwd=self.folder, input=stdin, capture_output=True, timeout=timeout)
        return ExecResult(done.returncode, done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository at its third commit, with tags of the earlier ones."""
    made = tmp_path / "repository"
    made.mkdir()
    git(made, "init", "-q", "-b", "main")
    for text in (b"", b"x = 1\n", BUG):
        (made / "m.py").write_bytes(text)
        git(made, "add", "-A")
        git(made, "commit", "-qm", "more", "--allow-empty")
        git(made, "tag", "-am", "a release", f"v{len(text)}")
    return made


def repair(folder: Path, text: bytes = REPAIR) -> None:
    (folder / "m.py").write_bytes(text)
    git(folder, "commit", "-qam", "repair add")


async def found(folder: Path) -> History:
    box = Folder(folder)
    return await search_history(box, await find_unreachable(box), BEFORE, AFTER)


async def test_ancestors_and_folders_without_a_repository_are_no_leak(folder: Path, tmp_path: Path) -> None:
    assert await find_unreachable(Folder(folder)) == await find_unreachable(Folder(tmp_path)) == {}
    git(folder, "gc", "-q", "--prune=now")
    git(tmp_path, "init", "-q")
    assert await find_unreachable(Folder(folder)) == await find_unreachable(Folder(tmp_path)) == {}
    assert (await found(folder)).commits == 0


def branch(folder: Path) -> None:
    git(folder, "switch", "-qc", "fixes")
    repair(folder)
    git(folder, "switch", "-q", "main")


def tag(folder: Path) -> None:
    branch(folder)
    git(folder, "tag", "-a", "v9", "-m", "x", "fixes")
    git(folder, "branch", "-qD", "fixes")
    git(folder, "reflog", "expire", "--expire=now", "--all")


def reset(folder: Path) -> None:
    """Only the reflog leads to the repair."""
    repair(folder)
    git(folder, "reset", "-q", "--hard", "HEAD~")


def dangling(folder: Path) -> None:
    """Only the pack has the repair."""
    reset(folder)
    git(folder, "repack", "-qad")
    git(folder, "reflog", "expire", "--expire=now", "--all")


def stash(folder: Path) -> None:
    (folder / "m.py").write_bytes(REPAIR)
    git(folder, "stash", "-q")


def borrowed(folder: Path) -> None:
    other = folder.parent / "other"
    git(folder.parent, "clone", "-q", str(folder), str(other))
    repair(other)
    (folder / ".git/objects/info/alternates").write_text(f"{other / '.git/objects'}\n")


def replaced(folder: Path) -> None:
    branch(folder)
    git(folder, "replace", "HEAD", "fixes")
    git(folder, "branch", "-qD", "fixes")


@pytest.mark.parametrize("leave", [branch, tag, reset, dangling, stash, borrowed, replaced])
async def test_the_repair_is_found(folder: Path, leave: Callable[[Path], None]) -> None:
    leave(folder)
    assert (folder / "m.py").read_bytes() == BUG
    leak = await found(folder)
    assert leak.repair == "m.py as the reference leaves it" and leak.commits >= 1, leak


async def test_a_later_version_is_found_by_a_line_of_the_reference(folder: Path) -> None:
    git(folder, "switch", "-qc", "fixes")
    repair(folder, REPAIR + b"\n\ndef more():\n    pass\n")
    git(folder, "switch", "-q", "main")
    leak = await found(folder)
    assert leak.repair == "a line of the reference: return a + b  # the repaired sum"
    assert leak.names[0] == "fixes"


async def test_other_later_commits_are_counted(folder: Path) -> None:
    git(folder, "switch", "-qc", "other")
    (folder / "other.py").write_text("y = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "other")
    git(folder, "switch", "-q", "main")
    other = await found(folder)
    assert (other.repair, other.commits, other.objects) == ("", 1, 3)
