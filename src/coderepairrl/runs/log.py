"""The append-only log of a run: one JSON object a line, one writer.

A record is written to the operating system before `append` returns, so that killing a process loses nothing, and to the
disk by `sync`, which the loop calls once a step. Only the last line can be torn by a crash; `repair` removes it.
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
from coderepairrl.processes import clock
from coderepairrl.runs.codec import dump
from coderepairrl.types import Turn

Record = dict[str, Any]

_SUM = b',"sum":"'
_DAMAGED = "the log was edited or damaged: restore it from a copy"


def sealed(line: bytes) -> bytes:
    """A JSON object with the checksum of its line as its last field, ``sum``.

    >>> sealed(b'{"type":"a"}')
    b'{"type":"a","sum":"e1f50c3b"}'
    """
    return b'%s%s%08x"}' % (line[:-1], _SUM, zlib.crc32(line[:-1]))


def unsealed(line: bytes) -> bytes:
    """The object that was `sealed`; a line of an older version, without a checksum, is returned as it is.

    Raises ValueError where the line is another than was written.
    """
    written, mark, rest = line.rpartition(_SUM)
    if not mark or len(rest) != 10:
        return line
    if rest != b'%08x"}' % zlib.crc32(written):
        raise ValueError("its checksum is that of another line")
    return written + b"}"


class Log:
    """The log opened for writing. Raises `UsageError` if another process does so, or it is not writable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sampled = 0
        """Tokens of the turns that were written since it was opened."""
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
        """Write one record. Raises `RunError` when the disk is full; earlier records stay intact."""
        record = {"type": type, "time": round(clock.now(), 4), **{key: dump(value) for key, value in fields.items()}}
        self.write(sealed(json.dumps(record, separators=(",", ":")).encode()) + b"\n")

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
        """Write one committed turn of an episode: what a gateway calls with each."""
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
    """Results of a long command, one JSON object a line, each in the file before the next is begun. Of the last line a
    crash may leave a part, which opening the file again cuts off. Raises `UsageError` where it cannot be written."""

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
        """The objects in `path`, none where there is no file. Raises `UsageError` for a line that is none."""
        found = []
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        for number, line in enumerate(whole, 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("no object")
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: {error}", fix="name another file") from None
            found.append(row)
        return found


def read(path: Path) -> Iterator[Record]:
    """The records of a log, oldest first. Raises `UsageError` (no log) or `RunError` (a broken line inside)."""
    if not path.is_file():
        raise UsageError(f"{path} does not exist", fix="name the folder of a run: it holds config.toml and log.jsonl")
    for number, (line, _) in enumerate(whole_lines(path), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise RunError(f"{path}:{number} is not JSON", fix=_DAMAGED) from None
        if not isinstance(record, dict) or "type" not in record:
            raise RunError(f"{path}:{number} is no record", fix=_DAMAGED)
        record.pop("sum", None)
        yield record


def whole_lines(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """The lines from byte `start` on, each with the byte after it, but for a last one without its end: it is being
    written, or was torn by a crash (`repair` removes it before anything is appended). Raises OSError."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield line, start


class Tail:
    """Reads a log while it is written, from byte `start` on."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path, self._at = path, start

    def records(self, *types: str) -> Iterator[tuple[Record, int]]:
        """The records of these `types` that were written since the last call, each with the byte after it. Others are
        not parsed: most of a log are turns. Raises OSError, and `ValueError` for a line that is no JSON."""
        wanted = tuple(f'{{"type":"{type}"'.encode() for type in types)
        for line, end in whole_lines(self._path, self._at):
            self._at = end
            if line.startswith(wanted):
                yield json.loads(line), end


def repair(path: Path) -> int:
    """Remove a torn last line; returns the number of bytes removed.

    Raises `RunError` for a line that has changed since it was written.
    """
    end = 0
    for number, (line, end) in enumerate(whole_lines(path), 1):  # noqa: B007 - where the last whole line ends
        try:
            unsealed(line.rstrip(b"\n"))
        except ValueError as error:
            raise RunError(f"{path}:{number} is not what was written: {error}", fix=_DAMAGED) from None
    if torn := path.stat().st_size - end:
        os.truncate(path, end)
    return torn
