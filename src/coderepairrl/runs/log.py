"""Append-only log of a run: one JSON object a line, one writer.

`append` survives a killed process, `sync` a crash of the machine. Only the last line can be torn (written in part);
`repair` removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coderepairrl.errors import RunError, UsageError
from coderepairrl.processes.meter import unix_time
from coderepairrl.runs.codec import dump
from coderepairrl.types import Turn

Record = dict[str, Any]

_SUM = b',"sum":"'
_DAMAGED = "the log was edited or damaged: restore it from a copy"


def seal(line: bytes) -> bytes:
    """Add a checksum to a JSON object, as its last field ``sum``.

    >>> seal(b'{"type":"a"}')
    b'{"type":"a","sum":"e1f50c3b"}'
    """
    return b'%s%s%08x"}' % (line[:-1], _SUM, zlib.crc32(line[:-1]))


def unseal(line: bytes) -> bytes:
    """Remove the checksum that `seal` added, if it has one. Raises ValueError for a changed line."""
    written, mark, rest = line.rpartition(_SUM)
    if not mark or len(rest) != 10:
        return line
    if rest != b'%08x"}' % zlib.crc32(written):
        raise ValueError("its checksum does not match")
    return written + b"}"


class Log:
    """Log opened for writing. Raises `UsageError` if another process writes it, or it is not writable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sampled = 0
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"cannot write to {path}: {error.strerror}", fix="check its permissions") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(
                f"another process is writing to {path}", fix="wait for it, or stop it, before resuming this run"
            ) from None

    def append(self, type: str, **fields: Any) -> None:
        """Write one record. Raises `RunError` when the disk is full."""
        record = {"type": type, "time": round(unix_time(), 4), **{key: dump(value) for key, value in fields.items()}}
        self.write(seal(json.dumps(record, separators=(",", ":")).encode()) + b"\n")

    def write(self, line: bytes) -> None:
        """Write a whole line, or nothing. Raises `RunError` when the disk is full."""
        start = os.fstat(self._file.fileno()).st_size
        cause: OSError | None = None
        written = 0
        try:
            written = self._file.write(line)
        except OSError as error:
            cause = error
        if written != len(line):
            self._file.truncate(start)
            raise RunError(
                f"cannot write to {self.path}: {cause or 'the disk is full'}",
                fix="free some space, then continue with --resume; nothing that was logged is lost",
            ) from cause

    def turn(self, episode: str, turn: Turn) -> None:
        """Write one committed turn of an episode."""
        self.append("turn", episode=episode, turn=turn)
        self.sampled += turn.sampled

    def sync(self) -> None:
        """Flush to the disk (fsync)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and release the lock."""
        self.sync()
        self._file.close()


class Lines:
    """File of results, one JSON object a line; opening it removes a torn last line. Raises `UsageError`."""

    def __init__(self, path: Path) -> None:
        self._log = Log(path)
        repair(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one object. Raises `RunError` when the disk is full."""
        self._log.write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        """Sync and close the file."""
        self._log.close()

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """Objects in `path`, if it exists. Raises `UsageError` for an invalid line."""
        rows = []
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("no object")
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: {error}", fix="name another file") from None
            rows.append(row)
        return rows


def read_records(path: Path) -> Iterator[Record]:
    """Records of a log, oldest first. Raises `UsageError` (no log) or `RunError` (an invalid line)."""
    if not path.is_file():
        raise UsageError(f"{path} does not exist", fix="name the folder of a run: it holds config.toml and log.jsonl")
    for number, (line, _) in enumerate(read_whole_lines(path), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise RunError(f"{path}:{number} is not JSON", fix=_DAMAGED) from None
        if not isinstance(record, dict) or "type" not in record:
            raise RunError(f"{path}:{number} is not a record: it has no type", fix=_DAMAGED)
        record.pop("sum", None)
        yield record


def read_whole_lines(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Complete lines from byte `start` on, each with the offset of its end. Raises OSError."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield line, start


class Tail:
    """Reader of a growing log, from byte `start` on."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path, self._at = path, start

    def records(self, *types: str) -> Iterator[tuple[Record, int]]:
        """New records of these `types`, each with the offset of its end. Raises OSError, ValueError (invalid JSON)."""
        # a log consists mostly of turns: records of other types are not parsed
        prefixes = tuple(f'{{"type":"{type}"'.encode() for type in types)
        for line, end in read_whole_lines(self._path, self._at):
            self._at = end
            if line.startswith(prefixes):
                yield json.loads(line), end


def repair(path: Path) -> int:
    """Remove a torn last line; returns the bytes removed. Raises `RunError` for a changed line."""
    end = 0
    for number, (line, end) in enumerate(read_whole_lines(path), 1):  # noqa: B007 - where the last whole line ends
        try:
            unseal(line.rstrip(b"\n"))
        except ValueError as error:
            raise RunError(f"{path}:{number} has changed since it was written: {error}", fix=_DAMAGED) from None
    if torn := path.stat().st_size - end:
        os.truncate(path, end)
    return torn
