"""Whether an environment is still what was built: a digest over all of its files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder
from coderepairrl.types import Task

_SHARED = 512
"""Bytes from which a file is worth a link."""


def digest_of(folder: Path, known: dict[tuple[int, int], str] | None = None) -> str:
    """SHA-256 in hex over path, kind, permission to execute and content of every file of `folder`, but its record.

    `known` keeps the hashes of files by device and inode, so that one that several environments share is read once.
    """
    whole, known = hashlib.sha256(), {} if known is None else known
    for parent, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted((*files, *links)):
            path = Path(parent, name)
            if path == folder / ENVIRONMENT_RECORD:
                continue
            status = path.lstat()
            linked, inode = stat.S_ISLNK(status.st_mode), (status.st_dev, status.st_ino)
            if inode not in known:
                content = os.fsencode(path.readlink()) if linked else path.read_bytes()
                known[inode] = hashlib.sha256(content).hexdigest()
            kind = "link" if linked else "program" if status.st_mode & stat.S_IXUSR else "file"
            about = f"{path.relative_to(folder)}\0{kind}\0{known[inode]}\n"
            whole.update(about.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def share(folder: Path) -> None:
    """Let the files of `folder` be one with equal ones of other environments: hard links to a pool beside them.

    Environments of one project for many commits are almost the same.
    """
    pool = folder.parent / "files"
    pool.mkdir(mode=0o755, exist_ok=True)
    for parent, _, files in os.walk(folder):
        for path in (Path(parent, name) for name in files):
            about = path.lstat()
            if not stat.S_ISREG(about.st_mode) or about.st_size < _SHARED:
                continue
            kind = "x" if about.st_mode & stat.S_IXUSR else ""
            content = path.read_bytes()
            kept = pool / f"{hashlib.sha256(content).hexdigest()}{kind}"
            own = pool / f"{folder.name}.link"
            own.unlink(missing_ok=True)  # of a build that was killed
            try:
                own.hardlink_to(kept)
            except FileNotFoundError:
                own.hardlink_to(path)
            if own.read_bytes() != content:  # damaged since, and so are those that share it, as their digests show
                own.unlink()
                own.hardlink_to(path)
            if own.samefile(path):
                own.replace(kept)
            else:
                own.replace(path)


def check_unchanged(*folders: Path) -> None:
    """Raise `TaskError` if a file of the environments `folders` is not as it was built."""
    known: dict[tuple[int, int], str] = {}
    for folder in folders:
        try:
            recorded = json.loads((folder / ENVIRONMENT_RECORD).read_text(encoding="utf-8"))["digest"]
        except (OSError, ValueError, KeyError) as error:
            raise TaskError(
                f"{folder} is no environment that was built to its end",
                fix="prepare its tasks again (crrl data prepare)",
            ) from error
        if digest_of(folder, known) != recorded:
            raise TaskError(
                f"the environment {folder} has changed since it was built",
                fix="delete that folder, and prepare its tasks again (crrl data prepare)",
            )


def check_environments(tasks: Iterable[Task]) -> None:
    """`check_unchanged` of the environments of `tasks` that are on this machine."""
    needed = {environment_folder(task.environment) for task in tasks if task.environment.startswith("python:")}
    check_unchanged(*sorted(folder for folder in needed if folder.is_dir()))


class State(NamedTuple):
    """An environment of tasks: its name in the cache, whether it is ``as built``, ``changed`` or ``missing``, and how
    many tasks need it."""

    name: str
    state: str
    tasks: int


def states(tasks: Iterable[Task]) -> list[State]:
    """The environments that `tasks` specify. Reads every file of them."""
    found = []
    needed = Counter(task.environment for task in tasks if task.environment.startswith("python:"))
    for text, count in needed.items():
        folder = environment_folder(text)
        state = "as built"
        if not (folder / ENVIRONMENT_RECORD).is_file():
            state = "missing"
        else:
            try:
                check_unchanged(folder)
            except TaskError:
                state = "changed"
        found.append(State(folder.name, state, count))
    return found
