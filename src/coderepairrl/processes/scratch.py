"""Folders removed with their owner.

The owner locks a file in the folder; the kernel releases the lock, so the next process recognizes abandoned folders.
Empty folders, without that file, are recognized by name.
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
"""Names of folders that are removed when empty, without an owner file."""


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """Create a temporary folder for the duration; removes abandoned ones. Raises `UsageError`."""
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UsageError(str(error), fix="make room in one of them, or name another folder by TMPDIR") from error
    sweep_aside(base)
    path = base / f"{PREFIX}{kind}-{secrets.token_hex(8)}"
    with owned(path):
        yield path


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Create the private folder `path` for the duration. Raises `UsageError`."""
    try:
        owner = _claim(path)
    except OSError as error:
        fix = f"make room in {path.parent}, or delete it"
        raise UsageError(f"cannot make {path}: {error.strerror}", fix=fix) from error
    try:
        yield
    finally:
        with suppress(OSError):
            _remove(path)
        os.close(owner)


def sweep(base: Path) -> None:
    """Remove our folders in `base` whose owner is dead."""
    for path in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, already gone, or its owner lives (BlockingIOError)
            if _EMPTY.fullmatch(path.name) and not any(path.iterdir()):
                path.rmdir()
                continue
            owner = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(owner)


def sweep_aside(base: Path) -> None:
    """`sweep` in a thread."""
    threading.Thread(target=sweep, args=(base,), name="sweep").start()


def _remove(path: Path) -> None:
    # the owner file last
    for file in path.iterdir():
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file, ignore_errors=True)
        elif file.name != _OWNER:
            file.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _claim(path: Path) -> int:
    # returns the lock's descriptor; another process may `sweep` the folder before it is locked: then it is made again
    while True:
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            owner = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(owner, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.fstat(owner).st_ino == (path / _OWNER).stat().st_ino:
                    return owner
            os.close(owner)
