"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coderepairrl.errors import PrerequisiteError


def user_cache() -> Path:
    """Where what can be made again is kept between runs: ``$CRRL_CACHE``, else the user's own cache folder.

    No sandbox shows it (`sandbox.answers`). Raises `PrerequisiteError` where it would lie in a home that there is not.
    """
    chosen = os.environ.get("CRRL_CACHE") or "~/.cache/coderepairrl"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise PrerequisiteError(f"no folder {chosen}: {error}", fix="set CRRL_CACHE, or HOME") from error


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A temporary path that, once on disk, becomes `path` when the block ends well, and is deleted when it does not."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what is told
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that, once everything in it is on disk, becomes `path` and replaces what was there.

    A crash leaves the old folder or the new one under `path`, or, in the instant between two renames, the old one
    beside it: `recover` puts that back.
    """
    temporary, old = path.with_name(f".{path.name}.partial"), _old(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for entry in [*temporary.iterdir(), temporary]:
            _sync(entry)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        recover(path)


def recover(path: Path) -> None:
    """Undo what a crash inside `replace_folder` left: the old folder returns if the new one did not make it."""
    old = _old(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
