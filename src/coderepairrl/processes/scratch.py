"""Folders that live as long as their owner: temporary ones, and those for weights on their way to an engine.

The owner holds a lock on a file in the folder, which the kernel lets go when the process ends, however it ends. So the
next one to start here knows which folders nobody will ever clear away.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coderepairrl.errors import UsageError

PREFIX = "crrl-"
_OWNER = ".owner"


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A new folder for temporary files, gone on leaving; those of processes that were killed are cleared away, too.

    Raises `UsageError` when it cannot be made.
    """
    base = Path(tempfile.gettempdir())
    sweep(base)
    path = base / f"{PREFIX}{kind}-{secrets.token_hex(8)}"
    with owned(path):
        yield path


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Make the folder `path`, ours alone, and remove it on leaving. Raises `UsageError` when it cannot be made."""
    try:
        owner = _claim(path)
    except OSError as error:
        fix = f"make room in {path.parent}, or delete it"
        raise UsageError(f"cannot make {path}: {error.strerror}", fix=fix) from error
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(owner)


def sweep(base: Path) -> None:
    """Remove the folders in `base` whose owners are dead. Those that say nothing of an owner, or are not ours, stay."""
    for path in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, gone meanwhile, or its owner lives (BlockingIOError)
            owner = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(owner)


def _claim(path: Path) -> int:
    """Make the folder and lock its file; the descriptor that holds the lock.

    Another process may `sweep` the folder away before it is locked: then it is made again.
    """
    while True:
        path.mkdir(mode=0o700)
        owner = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.fstat(owner).st_ino == (path / _OWNER).stat().st_ino:
                return owner
        os.close(owner)
