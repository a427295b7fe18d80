"""Reply of a policy, parsed from token ids at once or while sampled."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Well-formed tool call with `arguments` as JSON text. `id` is a remote API's, else empty."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """Assistant message. Unparsed tool calls are in `malformed`, and verbatim in `content`."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[FunctionCall, ...] = ()
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Increment of a reply: some text, or one tool call."""

    content: str = ""
    reasoning: str = ""
    call: FunctionCall | None = None


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids that structure a reply; tool calls lie between `call_open` and `call_close`.

    A reply that starts with `held`, its rest from `unopened` on, or any with `at_end` is streamed at the end.
    """

    stop: frozenset[int]
    think_open: int
    think_close: int
    call_open: int
    call_close: int
    held: str = ""
    unopened: str = ""
    at_end: bool = False


EAGER = 64
"""Limit of tool calls streamed while sampling: each parses the whole output again."""
_UTF8 = codecs.getincrementaldecoder("utf-8")


class _Mode(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()
    HELD = auto()
    """Known only at the reply's end: streaming waits."""


@dataclass(slots=True)
class _TextStream:
    """Streamed text; holds back whitespace and possible starts of `stop` or `held`."""

    stop: tuple[str, ...] = ()
    held: str = ""
    raw: str = ""
    emitted: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF8(errors="replace"))

    def add(self, data: bytes, *, final: bool = False) -> tuple[int, str] | None:
        """Decode `data`; returns position and text of the first stop string."""
        text = self.decoder.decode(data, final)
        length = len(self.raw)
        self.raw += text
        if not text or not self.stop:
            return None
        start = max(0, length - max(map(len, self.stop)) + 1)
        matches = [(at, stop) for stop in self.stop if (at := self.raw.find(stop, start)) >= 0]
        return min(matches, default=None)

    def emit_certain(self) -> str:
        """New text that cannot change."""
        certain = len(self.raw) - max(_find_overlap(self.raw, text) for text in (*self.stop, self.held))
        return self.emit_text(self.raw[:certain].strip())

    def emit_text(self, text: str) -> str:
        """Part of `text` not yet emitted."""
        if not text.startswith(self.emitted):
            raise AssertionError(f"streamed {self.emitted[-40:]!r}, which the reply does not start with")
        more, self.emitted = text[len(self.emitted) :], text
        return more


def _find_overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class ReplyStream:
    """Parser of one output while it is sampled, which emits only certain text.

    `stop` strings in the content (as in the OpenAI API) end the message: then `cut` is the number of ids up to there,
    and the caller must stop sampling.
    """

    def __init__(
        self,
        parse: Callable[[Sequence[int]], Reply],
        to_bytes: Callable[[int], bytes],
        markers: Markers,
        *,
        thinking: bool,
        stop: tuple[str, ...] = (),
    ) -> None:
        self.ids: list[int] = []
        self.cut: int | None = None
        self.stopped_by = ""
        self.reasoning = 0
        """Number of ids in thoughts, closing tag included."""
        self._parse = parse
        self._to_bytes = to_bytes
        self._markers = markers
        self._structure = {*markers.stop, markers.think_open, markers.think_close, markers.call_open}
        self._mode = _Mode.HELD if markers.at_end else _Mode.REASONING if thinking else _Mode.START
        self._reasoning = _TextStream()
        self._content = _TextStream(stop, markers.unopened)
        self._content_until_stop = ""
        self._sent_calls = 0
        self._closed_calls = 0
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Add sampled `ids`; returns the certain increments."""
        deltas: list[Delta] = []
        for token in ids:
            self.ids.append(token)
            if self.cut is not None:
                continue  # sampled beyond the stop string
            self.reasoning += self._mode is _Mode.REASONING
            if token in self._structure:
                self._flush()
                deltas += self._switch_mode(token)
            elif self._mode is _Mode.CALLS and token == self._markers.call_close:
                self._closed_calls += 1
                if self._closed_calls <= EAGER:
                    deltas += self._take_new_calls(self._parse(self.ids))
            else:
                self._pending.append(token)
                if self._content.stop:
                    self._flush()  # token by token, to know which one completes a stop string
        self._flush()
        if reasoning := self._reasoning.emit_certain() if self._mode is _Mode.REASONING else "":
            deltas.append(Delta(reasoning=reasoning))
        content = ""
        if self.cut is not None:
            content = self._content.emit_text(self._content_until_stop)
        elif self._mode is _Mode.CONTENT:
            content = self._content.emit_certain()
        return [*deltas, Delta(content=content)] if content else deltas

    def close(self) -> tuple[Reply, list[Delta]]:
        """Finish: returns the reply and the remaining deltas."""
        reply = self._parse(self.ids[: self.cut])
        if self.cut is not None:
            reply = replace(reply, content=self._content_until_stop, calls=(), malformed=())
        deltas = []
        if more := self._reasoning.emit_text(reply.reasoning):
            deltas.append(Delta(reasoning=more))
        if more := self._content.emit_text(reply.content):
            deltas.append(Delta(content=more))
        return reply, deltas + self._take_new_calls(reply)

    def _switch_mode(self, token: int) -> list[Delta]:
        markers = self._markers
        if self._mode is _Mode.START:
            self._content.add(b"", final=True)  # an incomplete character counts as content
            self._mode = _Mode.CONTENT if self._content.raw.strip() else _Mode.START
        mode = self._mode
        if mode is _Mode.START and token == markers.think_open:
            self._mode = _Mode.REASONING
        elif mode is _Mode.REASONING and token == markers.think_close:
            self._reasoning.add(b"", final=True)
            self._mode = _Mode.CONTENT
            if more := self._reasoning.emit_text(self._reasoning.raw.strip()):
                return [Delta(reasoning=more)]
        elif mode in (_Mode.START, _Mode.CONTENT) and token == markers.call_open:
            self._mode = _Mode.CALLS
            self._content.add(b"", final=True)
            if more := self._content.emit_text(self._content.raw.strip()):
                return [Delta(content=more)]
        elif mode is not _Mode.CALLS:
            self._mode = _Mode.HELD
        return []

    def _flush(self) -> None:
        data = b"".join(map(self._to_bytes, self._pending))
        self._pending.clear()
        if self._mode is _Mode.REASONING:
            self._reasoning.add(data)
        elif self._mode in (_Mode.START, _Mode.CONTENT):
            length = len(self._content.raw)
            stop = self._content.add(data)
            if content := self._content.raw.strip():
                is_held = self._markers.held and content.startswith(self._markers.held)
                self._mode = _Mode.HELD if is_held and self._mode is _Mode.START else _Mode.CONTENT
            if self._mode is _Mode.HELD:
                return
            if stop is not None:
                at, self.stopped_by = stop
                self._content_until_stop = self._content.raw[:at].strip()
                self.cut = len(self.ids)
            elif (text := self._markers.unopened) and self._content.raw.find(text, max(0, length - len(text) + 1)) >= 0:
                self._mode = _Mode.HELD

    def _take_new_calls(self, reply: Reply) -> list[Delta]:
        new, self._sent_calls = reply.calls[self._sent_calls :], len(reply.calls)
        return [Delta(call=call) for call in new]
