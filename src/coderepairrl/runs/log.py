"""Append-only log of a run: one JSON object a line, one writer.

`append` survives a killed process, `sync` a crash of the machine. Only the last line can be torn (written in part);
`remove_torn_line` removes it. A `Follower` reads a growing log and loads single episodes on request.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from coderepairrl.errors import RunError, UsageError
from coderepairrl.processes.meter import unix_time
from coderepairrl.runs import codec
from coderepairrl.runs.codec import dump
from coderepairrl.types import Episode, Turn

Record = dict[str, Any]

_CHECKSUM_FIELD = b',"sum":"'
_DAMAGE_FIX = "the log was edited or damaged: restore it from a copy"
_DAMAGE_ERRORS = (ValueError, TypeError, LookupError, RecursionError)
T = TypeVar("T")
_CACHED_EPISODES = 64
# parts of a turn's line as `Log.append` writes it, to read it without parsing its tokens and messages
_TURN_START = re.compile(rb'\{"type":"turn","time":[-+.\deE]+,"episode":("(?:[^"\\]|\\.)*"),')
_TURN_PREFIX, _MESSAGES = b'{"type":"turn",', b',"messages":['
_VERSIONS, _RANGE_END = b',"versions":[', re.compile(rb'"end":(\d+)\}')


def add_checksum(line: bytes) -> bytes:
    """Add a checksum to a JSON object, as its last field ``sum``.

    >>> add_checksum(b'{"type":"a"}')
    b'{"type":"a","sum":"e1f50c3b"}'
    """
    return b'%s%s%08x"}' % (line[:-1], _CHECKSUM_FIELD, zlib.crc32(line[:-1]))


def strip_checksum(line: bytes) -> bytes:
    """Remove the checksum that `add_checksum` added, if it has one. Raises ValueError for a changed line."""
    written, mark, rest = line.rpartition(_CHECKSUM_FIELD)
    if not mark or len(rest) != 10:
        return line
    if rest != b'%08x"}' % zlib.crc32(written):
        raise ValueError("its checksum does not match")
    return written + b"}"


class Log:
    """Log opened for writing. Raises `UsageError` if another process writes it, or it is not writable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sampled = 0  # tokens of the turns written so far
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
        self.write(add_checksum(json.dumps(record, separators=(",", ":")).encode()) + b"\n")

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


class JsonLines:
    """File of results, one JSON object a line; opening it removes a torn last line. Raises `UsageError`."""

    def __init__(self, path: Path) -> None:
        self._log = Log(path)
        remove_torn_line(path)

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


def parse_record(line: bytes) -> Record:
    """Record in a whole line of a log. Raises ValueError or RecursionError for a damaged or changed one."""
    record = json.loads(strip_checksum(line.rstrip(b"\n")))
    if not isinstance(record, dict) or "type" not in record:
        raise ValueError("it is not a record: it has no type")
    if "sum" in record:  # rewritten by a program that spaces JSON differently
        raise ValueError("its checksum does not match")
    return record


def read_records(path: Path) -> Iterator[Record]:
    """Records of a log, oldest first. Raises `UsageError` (no log) or `RunError` (a damaged or changed line)."""
    if not path.is_file():
        raise UsageError(f"{path} does not exist", fix="name the folder of a run: it holds config.toml and log.jsonl")
    for record, _ in Tail(path).records():
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


def find_line_number(path: Path, start: int) -> int:
    """Number of the line that begins at byte `start`, counted from 1. Raises OSError."""
    return 1 + sum(end <= start for _, end in read_whole_lines(path))


class Tail:
    """Reader of a growing log, from byte `start` on."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path, self._at = path, start

    def records(self, *types: str) -> Iterator[tuple[Record, int]]:
        """New records (of `types`, if any), each with the offset of its end. Raises OSError, `RunError` (damage)."""
        # a log consists mostly of turns: records of other types are not parsed
        prefixes = tuple(f'{{"type":"{type}"'.encode() for type in types)
        for line, end in read_whole_lines(self._path, self._at):
            start, self._at = self._at, end
            if not types or line.startswith(prefixes):
                try:
                    record = parse_record(line)
                except (ValueError, RecursionError) as error:
                    number = find_line_number(self._path, start)
                    raise RunError(f"{self._path}:{number} is damaged: {error}", fix=_DAMAGE_FIX) from None
                yield record, end


def remove_torn_line(path: Path) -> None:
    """Remove a torn last line. Raises `RunError` for a changed line."""
    end = 0
    for number, (line, end) in enumerate(read_whole_lines(path), 1):  # noqa: B007 - the last `end` is used below
        try:
            strip_checksum(line.rstrip(b"\n"))
        except ValueError as error:
            raise RunError(f"{path}:{number} is damaged: {error}", fix=_DAMAGE_FIX) from None
    if path.stat().st_size > end:
        os.truncate(path, end)


@dataclass(slots=True)
class _EpisodeOffsets:
    """Offsets and lengths, in bytes, of an episode's lines."""

    turns: list[tuple[int, int]] = field(default_factory=list)
    verdict: tuple[int, int] | None = None


class Follower:
    """Reader of the log at `path`, for one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notice = ""
        """Damage that prevents further reading, or ""."""
        self._places: dict[str, _EpisodeOffsets] = {}
        self._offset = self._last_offset = 0
        self._cache: dict[tuple[str, tuple[int, int] | None, tuple[tuple[int, int], ...]], Episode] = {}

    def records(self) -> Iterator[Record]:
        """Yield the records appended since the last call.

        Turns are ``{"type": "turn", "episode": ID, "sampled": TOKENS}``. An incomplete last line stays unread; an
        invalid line ends reading, with a `notice`. Raises OSError.
        """
        if self.notice or not self.path.is_file():
            return
        for line, end in read_whole_lines(self.path, self._offset):
            try:
                record = _summarise_line(line)
                self._index_record(record, (self._offset, len(line)))
            except _DAMAGE_ERRORS as error:
                self._last_offset = self._offset
                self.mark_damaged(error)
                return
            self._last_offset, self._offset = self._offset, end
            yield record

    def mark_damaged(self, error: Exception) -> None:
        """Stop reading, and drop the last record."""
        for place in self._places.values():
            if place.verdict is not None and place.verdict[0] == self._last_offset:
                place.verdict = None
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        number = find_line_number(self.path, self._last_offset)
        self.notice = f"the log is damaged at line {number:,}; what follows is not shown ({reason})"

    @property
    def has_torn_line(self) -> bool:
        """Whether the log ends with an incomplete line."""
        with self.path.open("rb") as log:
            log.seek(max(0, self.path.stat().st_size - 1))
            return log.read(1) not in (b"", b"\n")

    def turns(self, episode: str) -> tuple[Turn, ...]:
        """Turns of an episode so far. Raises KeyError and `RunError`."""
        loaded_turns = self._load_records(
            self._places[episode].turns, lambda record: codec.restore(Turn, record["turn"])
        )
        return tuple(sorted(loaded_turns, key=lambda turn: turn.index))

    def turn_records(self, episode: str) -> Iterator[Record]:
        """Turns of an episode as logged. Raises KeyError and `RunError`."""
        return self._load_records(self._places[episode].turns, lambda record: record["turn"])

    def episode(self, episode: str) -> Episode | None:
        """Episode with its turns; None without a verdict. Raises KeyError and `RunError`."""
        place = self._places[episode]
        key = (episode, place.verdict, tuple(place.turns))
        if key not in self._cache:
            if (verdict := self.verdict(episode)) is None:
                return None
            self._cache[key] = replace(verdict, turns=self.turns(episode))
            if len(self._cache) > _CACHED_EPISODES:
                del self._cache[next(iter(self._cache))]
        return self._cache[key]

    def verdict(self, episode: str) -> Episode | None:
        """Episode without its turns."""
        place = self._places[episode].verdict
        if place is None:
            return None
        return next(self._load_records([place], lambda record: codec.restore(Episode, record["verdict"])))

    def search(self, text: str) -> list[str]:
        """Ids of episodes with `text` in messages or verdict, ignoring ASCII case."""
        needle = json.dumps(text)[1:-1].lower().encode()  # escaped as in the log
        ids: dict[str, None] = {}
        with self.path.open("rb") as log:
            unsearched = self._offset
            for line in log:
                unsearched -= len(line)
                if unsearched < 0:
                    break
                start = max(0, line.find(_MESSAGES)) if line.startswith(_TURN_PREFIX) else 0
                if needle in line[start:].lower():
                    record = _summarise_line(line)
                    if record["type"] == "turn":
                        ids[record["episode"]] = None
                    elif record["type"] == "verdict":
                        ids[record["verdict"]["id"]] = None
        return list(ids)

    def _index_record(self, record: Record, place: tuple[int, int]) -> None:
        match record["type"]:
            case "episode":
                self._places[record["id"]] = _EpisodeOffsets()
            case "turn":
                self._places.setdefault(record["episode"], _EpisodeOffsets()).turns.append(place)
            case "verdict":
                self._places.setdefault(record["verdict"]["id"], _EpisodeOffsets()).verdict = place

    def _load_records(self, places: list[tuple[int, int]], convert: Callable[[Record], T]) -> Iterator[T]:
        for offset, length in places:
            try:
                with self.path.open("rb") as log:
                    log.seek(offset)
                    yield convert(parse_record(log.read(length)))
            except (OSError, *_DAMAGE_ERRORS) as error:
                raise RunError(
                    f"{self.path} has changed, or is damaged, at byte {offset:,}: {error}",
                    fix="open it again; if the error repeats, restore the log from a copy",
                ) from error


def _summarise_line(line: bytes) -> Record:
    """Record in a line; of a turn, only its episode and number of sampled tokens (`Follower.records`)."""
    if match := _TURN_START.match(line):
        strip_checksum(line.rstrip(b"\n"))
        start = line.find(_VERSIONS, match.end())  # no free text before it could hold the same
        ends = _RANGE_END.findall(line, start, line.find(b"]", start))  # the last range ends with the last token
        return {"type": "turn", "episode": json.loads(match[1]), "sampled": int(ends[-1]) if ends else 0}
    record = parse_record(line)
    if record["type"] == "turn":
        sampled = sum(len(record["turn"][span]["ids"]) for span in ("output", "tail"))
        return {"type": "turn", "episode": record["episode"], "sampled": sampled}
    return record
