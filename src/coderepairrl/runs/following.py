"""Follower of a growing log, which loads single episodes on request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from coderepairrl.errors import RunError
from coderepairrl.runs import codec
from coderepairrl.runs.log import Record, read_whole_lines
from coderepairrl.types import Episode, Turn

T = TypeVar("T")
_RECENT = 64
_TURN = re.compile(rb'\{"type":"turn","time":[-+.\deE]+,"episode":("(?:[^"\\]|\\.)*"),')
_TURN_BEGINS, _MESSAGES = b'{"type":"turn",', b',"messages":['
_DAMAGE = (ValueError, TypeError, LookupError, RecursionError)
_VERSIONS, _END = b',"versions":[', re.compile(rb'"end":(\d+)\}')


@dataclass(slots=True)
class _Place:
    turns: list[tuple[int, int]] = field(default_factory=list)
    verdict: tuple[int, int] | None = None


class Follower:
    """Reader of the log at `path`, for one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notice = ""
        """Damage that prevents reading on, or ""."""
        self._places: dict[str, _Place] = {}
        self._offset = self._last = 0
        self._recent: dict[tuple[str, tuple[int, int] | None, tuple[tuple[int, int], ...]], Episode] = {}

    def records(self) -> Iterator[Record]:
        """Yield the records appended since the last call.

        Turns are ``{"type": "turn", "episode": ID, "sampled": TOKENS}``. An incomplete last line waits; an invalid line
        ends reading, with a `notice`. Raises OSError.
        """
        if self.notice or not self.path.is_file():
            return
        for line, end in read_whole_lines(self.path, self._offset):
            try:
                record = _record(line)
                self._keep(record, (self._offset, len(line)))
            except _DAMAGE as error:
                self._last = self._offset
                self.refuse(error)
                return
            self._last, self._offset = self._offset, end
            yield record

    def refuse(self, error: Exception) -> None:
        """Stop reading, and drop the last record."""
        for place in self._places.values():
            if place.verdict is not None and place.verdict[0] == self._last:
                place.verdict = None
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        self.notice = f"the log is damaged at byte {self._last:,}; what follows is not shown ({reason})"

    @property
    def torn(self) -> bool:
        """Whether the log ends with an incomplete line."""
        with self.path.open("rb") as log:
            log.seek(max(0, self.path.stat().st_size - 1))
            return log.read(1) not in (b"", b"\n")

    def turns(self, episode: str) -> tuple[Turn, ...]:
        """Turns of an episode so far. Raises KeyError and `RunError`."""
        loaded_turns = self._read(self._places[episode].turns, lambda record: codec.restore(Turn, record["turn"]))
        return tuple(sorted(loaded_turns, key=lambda turn: turn.index))

    def turn_records(self, episode: str) -> Iterator[Record]:
        """Turns of an episode as logged. Raises KeyError and `RunError`."""
        return self._read(self._places[episode].turns, lambda record: record["turn"])

    def episode(self, episode: str) -> Episode | None:
        """Episode with its turns; None without a verdict. Raises KeyError and `RunError`."""
        place = self._places[episode]
        key = (episode, place.verdict, tuple(place.turns))
        if key not in self._recent:
            if (verdict := self.verdict(episode)) is None:
                return None
            self._recent[key] = replace(verdict, turns=self.turns(episode))
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        return self._recent[key]

    def verdict(self, episode: str) -> Episode | None:
        """Episode without its turns."""
        place = self._places[episode].verdict
        if place is None:
            return None
        return next(self._read([place], lambda record: codec.restore(Episode, record["verdict"])))

    def search(self, text: str) -> list[str]:
        """Ids of episodes with `text` in messages or verdict, ignoring ASCII case."""
        needle = json.dumps(text)[1:-1].lower().encode()
        ids: dict[str, None] = {}
        with self.path.open("rb") as log:
            left = self._offset
            for line in log:
                left -= len(line)
                if left < 0:
                    break
                start = max(0, line.find(_MESSAGES)) if line.startswith(_TURN_BEGINS) else 0
                if needle in line[start:].lower():
                    record = _record(line)
                    if record["type"] == "turn":
                        ids[record["episode"]] = None
                    elif record["type"] == "verdict":
                        ids[record["verdict"]["id"]] = None
        return list(ids)

    def _keep(self, record: Record, place: tuple[int, int]) -> None:
        match record["type"]:
            case "episode":
                self._places[record["id"]] = _Place()
            case "turn":
                self._places.setdefault(record["episode"], _Place()).turns.append(place)
            case "verdict":
                self._places.setdefault(record["verdict"]["id"], _Place()).verdict = place

    def _read(self, places: list[tuple[int, int]], loaded: Callable[[Record], T]) -> Iterator[T]:
        for offset, length in places:
            try:
                with self.path.open("rb") as log:
                    log.seek(offset)
                    yield loaded(json.loads(log.read(length)))
            except (OSError, *_DAMAGE) as error:
                raise RunError(
                    f"{self.path} is no longer what it was, or damaged, at byte {offset:,}: {error}",
                    fix="open it again; if it says so then, too, restore the log from a copy",
                ) from error


def _record(line: bytes) -> dict[str, Any]:
    # a turn's tokens and messages, nearly all of a log, are not parsed
    if match := _TURN.match(line):
        start = line.find(_VERSIONS, match.end())  # before it come numbers alone
        ends = _END.findall(line, start, line.find(b"]", start))
        return {"type": "turn", "episode": json.loads(match[1]), "sampled": int(ends[-1]) if ends else 0}
    record = json.loads(line)
    if not isinstance(record, dict) or "type" not in record:
        raise ValueError("it is not a record")
    if record["type"] == "turn":
        sampled = sum(len(record["turn"][span]["ids"]) for span in ("output", "tail"))
        return {"type": "turn", "episode": record["episode"], "sampled": sampled}
    record.pop("sum", None)
    return record
