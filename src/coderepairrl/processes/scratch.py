"""Temporary folders, which the next process removes if the process that owns them was killed.

The owner locks a file in the folder. The kernel releases the lock when the owner ends, which shows that the folder is
abandoned. A folder whose owner was killed before it made that file is empty, and recognized by its name.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coderepairrl.errors import UsageError

PREFIX = "crrl-"
_OWNER = ".owner"
_EMPTY = re.compile(rf"{PREFIX}(.+-)?[0-9a-f]{{16}}")
"""Names of folders that are removed if they are empty."""


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """Create a temporary folder, and remove it on exit; also removes abandoned ones. Raises `UsageError`."""
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UsageError(str(error), fix="free space in one of them, or set TMPDIR to another folder") from error
    remove_abandoned_in_thread(base)
    path = base / f"{PREFIX}{kind}-{secrets.token_hex(8)}"
    with create_owned_folder(path):
        yield path


@contextmanager
def create_owned_folder(path: Path) -> Iterator[None]:
    """Create the private folder `path`, and remove it on exit. Raises `UsageError`."""
    try:
        owner = create_locked(path)
    except OSError as error:
        fix = f"free space in {path.parent}, or delete {path}"
        raise UsageError(f"cannot make {path}: {error.strerror}", fix=fix) from error
    try:
        yield
    finally:
        with suppress(OSError):
            _remove_owned_folder(path)
        os.close(owner)


def remove_abandoned(base: Path) -> None:
    """Remove folders in `base` that this module made and whose owner has ended."""
    for path in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, already removed, or its owner lives (BlockingIOError)
            if _EMPTY.fullmatch(path.name) and not any(path.iterdir()):
                path.rmdir()
                continue
            owner = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_owned_folder(path)
            finally:
                os.close(owner)


def remove_abandoned_in_thread(base: Path) -> None:
    """Run `remove_abandoned` in a thread."""
    threading.Thread(target=remove_abandoned, args=(base,), name="sweep").start()


def _remove_owned_folder(path: Path) -> None:
    # removes the owner file last
    for file in path.iterdir():
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file, ignore_errors=True)
        elif file.name != _OWNER:
            file.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def create_locked(path: Path, name: str = _OWNER) -> int:
    """Create folder `path`; return the descriptor of its lock file `name`. Retries if another process removes it."""
    while True:
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            lock = os.open(path / name, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.fstat(lock).st_ino == (path / name).stat().st_ino:
                    return lock
            os.close(lock)
