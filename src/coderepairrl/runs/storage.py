"""Atomic writing of files and folders, and checksums that detect damage."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

SUMS = "SHA256SUMS"
"""Checksums of a folder's files, in the format of ``sha256sum -c``."""
_CHUNK = 1 << 22  # bytes read at a time
_THREADS = 8  # that hash files
_ROWS_PER_WRITE = 128  # of a table, which need not fit into memory


@contextmanager
def replace_file(path: Path, *, synced: bool = True) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success (after an fsync, if `synced`), otherwise deleted."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        if synced:
            _fsync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # keep the first exception
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path`, synced.

    After a crash between the two renames, `restore_old_folder` brings the old folder back.
    """
    temporary, old = path.with_name(f".{path.name}.partial"), _old_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    restore_old_folder(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.unlink(missing_ok=True)  # left by a killed export to a file of this name
    temporary.mkdir()
    try:
        yield temporary
        for entry in [*temporary.iterdir(), temporary]:
            _fsync(entry)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        restore_old_folder(path)


def restore_old_folder(path: Path) -> None:
    """Restore or remove the old folder after a crash in `replace_folder`."""
    old = _old_folder(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def write_table(path: Path, schema: Any, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write `rows` in a pyarrow `schema` to a Parquet file, atomically; return their number. Raises OSError."""
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    count, remaining = 0, iter(rows)
    with replace_file(path) as temporary, parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        while batch := list(islice(remaining, _ROWS_PER_WRITE)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def hash_files(files: Iterable[Path], *, stopped: Callable[[], bool] = lambda: False) -> dict[str, str]:
    """SHA-256 (hexadecimal) by name, in parallel. Raises OSError, or `InterruptedError` once `stopped` is true."""

    def digest(file: Path) -> str:
        sha = hashlib.sha256()
        with file.open("rb") as data:
            while chunk := data.read(_CHUNK):
                if stopped():
                    raise InterruptedError
                sha.update(chunk)
        return sha.hexdigest()

    named = {file.name: file for file in sorted(files)}
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(named, threads.map(digest, named.values()), strict=True))


def hash_concatenated(files: Iterable[Path]) -> str:
    """SHA-256 (hexadecimal) of `files`, concatenated. Raises OSError."""
    sha = hashlib.sha256()
    for file in files:
        with file.open("rb") as data:
            hashlib.file_digest(data, lambda: sha)  # updates `sha`, instead of a new hash
    return sha.hexdigest()


def write_checksums(folder: Path) -> None:
    """Write `SUMS` for all files in `folder`, which has no subfolders."""
    sums = hash_files(file for file in folder.iterdir() if file.name != SUMS)
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))


def find_damage(folder: Path) -> str:
    """Description of a file that does not match `SUMS`, or ""."""
    try:
        lines = (folder / SUMS).read_text("ascii").splitlines()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        return f"{SUMS} cannot be read: {error}"
    known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return find_changed_file(folder, known) if known else f"{SUMS} is empty"


def find_changed_file(folder: Path, known: Mapping[str, str], *, stopped: Callable[[], bool] = lambda: False) -> str:
    """Description of a file in `folder` whose SHA-256 is not the `known` one, or ""."""
    try:
        actual = hash_files((folder / name for name in known), stopped=stopped)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        return f"a file cannot be read: {error}"
    for name, digest in known.items():
        if actual[name] != digest:
            return f"{name} has changed: its SHA-256 is {actual[name]}, and was {digest or 'not noted'}"
    return ""


def _old_folder(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
