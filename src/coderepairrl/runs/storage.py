"""Files and folders that are there whole or not at all, and checksums that tell whether they still are."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

SUMS = "SHA256SUMS"
"""Of the files beside it, in the form that ``sha256sum -c`` reads."""
_CHUNK = 1 << 22
_THREADS = 8


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


def digests(files: Iterable[Path], *, stopped: Callable[[], bool] = lambda: False) -> dict[str, str]:
    """SHA-256 in hexadecimal of `files`, by name, several at a time: those of a large model take half a minute.

    Raises OSError, and `InterruptedError` once `stopped` says so.
    """

    def digest(file: Path) -> str:
        found = hashlib.sha256()
        with file.open("rb") as data:
            while chunk := data.read(_CHUNK):
                if stopped():
                    raise InterruptedError
                found.update(chunk)
        return found.hexdigest()

    named = {file.name: file for file in sorted(files)}
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(named, threads.map(digest, named.values()), strict=True))


def checksum(files: Iterable[Path]) -> str:
    """SHA-256 in hexadecimal over the bytes of `files`, one after the other: of one file, simply its own.

    Raises OSError.
    """
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as data:
            hashlib.file_digest(data, lambda: found)
    return found.hexdigest()


def write_sums(folder: Path) -> None:
    """Write `SUMS` for all files that are in `folder`, which has no folders in it."""
    found = digests(file for file in folder.iterdir() if file.name != SUMS)
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in found.items()))


def damage(folder: Path) -> str:
    """What is wrong with a file of `folder`, by its `SUMS`; empty if it is whole, or has none."""
    try:
        lines = (folder / SUMS).read_text("ascii").splitlines()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        return f"{SUMS} cannot be read: {error}"
    known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return difference(folder, known) if known else f"{SUMS} is empty"


def difference(folder: Path, known: Mapping[str, str], *, stopped: Callable[[], bool] = lambda: False) -> str:
    """Which file of `folder` is not there, or has another SHA-256 than is `known`; empty if all are as they were."""
    try:
        found = digests((folder / name for name in known), stopped=stopped)
    except (OSError, ValueError) as error:  # a name with a NUL
        return f"a file cannot be read: {error}"
    for name, digest in known.items():
        if found[name] != digest:
            return f"{name} has changed: its SHA-256 is {found[name]}, and was {digest or 'not noted'}"
    return ""


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
