"""User's repository: only `apply` changes it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coderepairrl.errors import TaskError, UsageError
from coderepairrl.processes import hostgit
from coderepairrl.processes.signals import STOPPING
from coderepairrl.types import Task


@dataclass(frozen=True, slots=True)
class Repository:
    """A clean git repository: root of its working tree, and commit."""

    root: Path
    commit: str

    def task(self, issue: str) -> Task:
        """Task that `issue` describes, without a reference."""
        return Task(f"{self.root.name}@{self.commit[:12]}", issue, "", f"dir:{self.root}", b"")


def open_repository(path: Path) -> Repository:
    """Open the repository around `path`. Raises `TaskError` for none, no commit, or uncommitted changes."""
    if not path.is_dir():
        raise TaskError(f"{path} is no folder", fix="name the folder of a git repository")
    repository = hostgit.find(path, around=True)
    root = repository.name
    with hostgit.view(repository) as view:
        commit = view.head()
        if changes := view.changes():
            raise TaskError(
                f"{root} has uncommitted changes: {', '.join(changes[:3])}", fix="commit or stash them first"
            )
    return Repository(root, commit)


def read_issue(path: Path) -> str:
    """Read the text of an issue. Raises `UsageError` if it is empty or unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="--issue names a text file in UTF-8") from error
    if not text.strip():
        raise UsageError(f"{path} is empty", fix="write what is wrong, as you would tell a colleague")
    return text


def apply(repository: Repository, patch: bytes) -> bool:
    """Apply `patch` to the working tree, all or nothing, without staging; returns whether there was a patch.

    Raises `TaskError` if the repository has changed since it was opened, or git refuses the patch.
    """
    if not patch:
        return False
    if open_repository(repository.root) != repository:
        raise TaskError(f"{repository.root} has another commit than the patch was made for", fix="run crrl fix again")
    with hostgit.view(hostgit.find(repository.root)) as view, _undisturbed():
        try:
            view.apply(patch)
        except subprocess.CalledProcessError as error:
            raise TaskError(
                f"the patch does not apply to {repository.root}: {hostgit.reason(error)}",
                fix="save the diff and apply it by hand; nothing was changed",
            ) from error
    return True


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore signals, in git too, which must not stop between two files."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
