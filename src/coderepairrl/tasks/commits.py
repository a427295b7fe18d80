"""Commits of a local repository, read without a checkout and without its git configuration."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from coderepairrl.errors import TaskError
from coderepairrl.processes import hostgit
from coderepairrl.processes.hostgit import DIFF, explain_git_error, git

_LINK_MODE, _SUBMODULE_MODE = "120000", "160000"
_LOG = (
    "log", "-z", "--min-parents=1", "--max-parents=1", "--no-notes", "--no-mailmap", "--encoding=UTF-8",
    "--format=%H%n%P%n%ct%n%B",
)  # fmt: skip
_CHANGES = (
    "diff-tree", "--stdin", "-r", "-z", "--raw", "--numstat", "--no-abbrev", "--no-renames", "--no-ext-diff",
    "--no-textconv",
)  # fmt: skip
_LATEST = 253_402_300_799
"""Last second that `datetime` holds; broken commits exceed it."""
_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit with one parent; `when` is the committer's date in Unix seconds."""

    sha: str
    parent: str
    when: int
    message: str

    @property
    def day(self) -> str:
        """Date of `when` in UTC, ``YYYY-MM-DD``."""
        return datetime.fromtimestamp(self.when, UTC).date().isoformat()


class Change(NamedTuple):
    """A changed file; `blob` is the id of its new content, empty if deleted."""

    path: str
    blob: str
    lines: int
    """Lines added and removed."""
    is_binary: bool
    is_special: bool
    """Whether it is or was a symbolic link or submodule."""


class RepositoryHistory:
    """History of HEAD of the repository `name`, read through the git directory `folder`."""

    def __init__(self, name: Path, folder: Path) -> None:
        self.name, self.folder = name, folder

    def list_commits(self) -> list[Commit]:
        """List commits with exactly one parent, newest first."""
        entries = self._git(*_LOG, "HEAD").decode("utf-8", "replace").split("\0")
        commits = []
        for entry in filter(None, entries):
            sha, parent, when, message = entry.split("\n", 3)
            commits.append(Commit(sha, parent, min(int(when or 0), _LATEST), message))
        return sorted(commits, key=lambda commit: (commit.when, commit.sha), reverse=True)

    def list_changes(self, commits: Sequence[Commit]) -> dict[str, list[Change]]:
        """List changes by commit id; leaves out commits without changes."""
        pairs = "".join(f"{commit.sha} {commit.parent}\n" for commit in commits).encode()
        tokens = iter(self._git(*_CHANGES, stdin=pairs).split(b"\0")[:-1])
        by_commit: dict[str, list[Change]] = {}
        blobs: dict[bytes, tuple[str, bool]] = {}
        ids = {commit.sha.encode() for commit in commits}
        commit_changes: list[Change] = []
        for token in tokens:  # per commit: its id, then modes and blobs of all paths (--raw), then line counts
            if token in ids:
                commit_changes = by_commit.setdefault(token.decode(), [])
                blobs = {}
            elif token.startswith(b":"):
                old_mode, new_mode, _, blob, _ = token[1:].decode().split()
                is_special = bool({old_mode, new_mode} & {_LINK_MODE, _SUBMODULE_MODE})
                blobs[next(tokens)] = ("" if new_mode == "000000" else blob, is_special)  # zeros: deleted
            else:
                added, removed, path = token.split(b"\t", 2)
                is_binary = added == b"-"
                lines = 0 if is_binary else int(added) + int(removed)
                blob, is_special = blobs[path]
                commit_changes.append(Change(os.fsdecode(path), blob, lines, is_binary, is_special))
        return by_commit

    def diff_commit(self, commit: Commit, paths: Sequence[str]) -> bytes:
        """Diff of `paths` in `commit`, in the form that sandboxes write."""
        return self._git("--literal-pathspecs", *DIFF, commit.parent, commit.sha, "--", *paths)

    def list_blobs(self, commit: str) -> dict[str, str]:
        """List blob ids of a commit's regular files, by path."""
        rows = self._git("ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")
        split = (row.partition(b"\t") for row in rows if row)
        entries = ((os.fsdecode(path), *meta.decode().split()) for meta, _, path in split)
        return {path: blob for path, mode, kind, blob in entries if kind == "blob" and mode != _LINK_MODE}

    def read_blobs(self, blobs: Mapping[str, str]) -> dict[str, bytes]:
        """Read the contents of `blobs`, by path."""
        answer = self._git("cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in blobs.values()).encode())
        contents, at = dict[str, bytes](), 0
        for path, blob in blobs.items():
            end = answer.index(b"\n", at)
            if answer.endswith(b" missing", at, end):
                raise self._make_read_error(f"the object {blob} is missing")
            start, size = end + 1, int(answer[at:end].split()[2])  # after BLOB TYPE SIZE
            contents[path] = answer[start : start + size]
            at = start + size + 1
        return contents

    def find_version(self, commit: str) -> str:
        """Read the version number in the last tag before `commit`, else ``0``."""
        try:
            tag = git("describe", "--tags", "--abbrev=0", "--match=*[0-9].[0-9]*", commit, folder=self.folder)
        except subprocess.CalledProcessError:  # no tag
            return "0"
        number = re.search(r"\d+(\.\d+)+", tag.decode("utf-8", "replace"))
        return number[0] if number else "0"

    def _git(self, *args: str, stdin: bytes = b"") -> bytes:
        try:
            return git(*args, folder=self.folder, stdin=stdin, timeout=_TIMEOUT_SECONDS)
        except subprocess.CalledProcessError as error:
            raise self._make_read_error(explain_git_error(error)) from error
        except subprocess.TimeoutExpired as error:
            raise self._make_read_error(f"git took more than {error.timeout:.0f} s") from error

    def _make_read_error(self, why: str) -> TaskError:
        return TaskError(f"the history of {self.name} cannot be read: {why}", fix="clone it again without --filter")


@contextmanager
def open_history(path: Path) -> Iterator[RepositoryHistory]:
    """Open the repository at `path`, bare or not.

    Raises `TaskError` unless it is a full clone without links that lead out of it (`hostgit.find_local_repository`).
    """
    repository = hostgit.find_local_repository(str(path))
    if repository is None or not path.exists():
        raise TaskError(f"{path} is not a git repository", fix="name a clone")
    if (repository.common / "shallow").exists():
        raise TaskError(f"{path} is a shallow clone, which lacks most of the history", fix="git fetch --unshallow")
    with hostgit.open_view(repository) as view:
        view.head()  # raises without a commit
        yield RepositoryHistory(repository.name, view.folder)
