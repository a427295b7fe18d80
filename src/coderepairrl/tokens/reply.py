"""What a policy said, read from ids: all at once, or as it comes.

`ReplyStream` hands out text as soon as it is certain, and never takes anything back: whatever it streamed is a
prefix of what the whole output parses to, whatever ids a policy emits.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A well-formed tool call: `arguments` is JSON text. `id` is set by formats that have one.

    >>> FunctionCall("shell", '{"cmd": "ls"}').id
    ''
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant message. Tool calls that could not be read are in `malformed` and in `content`, as they were said.

    >>> Reply("done").calls
    ()
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[FunctionCall, ...] = ()
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What a reply gained: some text, or one whole tool call."""

    content: str = ""
    reasoning: str = ""
    call: FunctionCall | None = None


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids that structure a reply. Everything between `call_open` and `call_close` is a tool call.

    A reply that starts with the text `held` may be one as a whole.
    """

    stop: frozenset[int]
    think_open: int
    think_close: int
    call_open: int
    call_close: int
    held: str = ""


_UTF8 = codecs.getincrementaldecoder("utf-8")


class _Mode(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()
    HELD = auto()
    """It depends on what follows: wait for the end."""


@dataclass(slots=True)
class _Text:
    """Text on its way out: leading blanks dropped, trailing ones and possible stop strings held back."""

    stop: tuple[str, ...] = ()
    raw: str = ""
    emitted: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF8(errors="replace"))

    def add(self, data: bytes, *, final: bool = False) -> tuple[int, str] | None:
        """Decode `data`; the position of a stop string in `raw` and the string, if it is now there."""
        text = self.decoder.decode(data, final)
        known = len(self.raw)
        self.raw += text
        if not text or not self.stop:
            return None
        start = max(0, known - max(map(len, self.stop)) + 1)
        found = [(at, stop) for stop in self.stop if (at := self.raw.find(stop, start)) >= 0]
        return min(found, default=None)

    def ready(self) -> str:
        """Text that can go out now."""
        certain = len(self.raw) - max((_overlap(self.raw, stop) for stop in self.stop), default=0)
        return self.release(self.raw[:certain].strip())

    def rest(self) -> str:
        """Text that can go out now that there is no more."""
        return self.release(self.raw.strip())

    def release(self, text: str) -> str:
        """What `text` adds to what is out already."""
        if not text.startswith(self.emitted):
            raise AssertionError(f"streamed {self.emitted[-40:]!r}, which the reply does not start with")
        more, self.emitted = text[len(self.emitted) :], text
        return more


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class ReplyStream:
    """Reads one output as it is sampled.

    `parse` reads a whole output; `stop` are strings that end the message when they appear in its content (tool
    calls and reasoning are not searched, as with the OpenAI API). After the feed that completed one, `cut`
    is the number of ids that belong to the output, and the caller stops.
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
        """The stop string that appeared."""
        self.reasoning = 0
        """Ids of thoughts, the closing tag included."""
        self._parse = parse
        self._to_bytes = to_bytes
        self._markers = markers
        self._structure = {*markers.stop, markers.think_open, markers.think_close, markers.call_open}
        self._mode = _Mode.REASONING if thinking else _Mode.START
        self._reasoning = _Text()
        self._content = _Text(stop)
        self._stopped = ""
        self._calls = 0
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Take sampled `ids`; what they certainly add to the reply."""
        deltas: list[Delta] = []
        for token in ids:
            self.ids.append(token)
            if self.cut is not None:
                continue  # the engine was a little ahead of a stop string
            self.reasoning += self._mode is _Mode.REASONING
            if token in self._structure:
                self._flush()
                deltas += self._turn(token)
            elif self._mode is _Mode.CALLS and token == self._markers.call_close:
                deltas += self._new_calls(self._parse(self.ids))
            else:
                self._pending.append(token)
                if self._content.stop:
                    self._flush()  # which token completes a stop string is told one by one
        self._flush()
        if reasoning := self._reasoning.ready() if self._mode is _Mode.REASONING else "":
            deltas.append(Delta(reasoning=reasoning))
        content = ""
        if self.cut is not None:
            content = self._content.release(self._stopped)
        elif self._mode is _Mode.CONTENT:
            content = self._content.ready()
        return [*deltas, Delta(content=content)] if content else deltas

    def close(self) -> tuple[Reply, list[Delta]]:
        """The whole reply, and what of it was not streamed yet."""
        reply = self._parse(self.ids[: self.cut])
        if self.cut is not None:
            reply = replace(reply, content=self._stopped, calls=(), malformed=())
        deltas = []
        if more := self._reasoning.release(reply.reasoning):
            deltas.append(Delta(reasoning=more))
        if more := self._content.release(reply.content):
            deltas.append(Delta(content=more))
        return reply, deltas + self._new_calls(reply)

    def _turn(self, token: int) -> list[Delta]:
        """A structural token: what precedes it is complete, what follows is something else, or not yet certain."""
        markers = self._markers
        if self._mode is _Mode.START:
            self._content.add(b"", final=True)  # half a character is not blank
            self._mode = _Mode.CONTENT if self._content.raw.strip() else _Mode.START
        mode = self._mode
        if mode is _Mode.START and token == markers.think_open:
            self._mode = _Mode.REASONING
        elif mode is _Mode.REASONING and token == markers.think_close:
            self._reasoning.add(b"", final=True)
            # spelled out in ordinary tokens, the closing tag is ambiguous for a parser of text
            self._mode = _Mode.HELD if "</think>" in self._reasoning.raw else _Mode.CONTENT
            if self._mode is _Mode.CONTENT and (more := self._reasoning.rest()):
                return [Delta(reasoning=more)]
        elif mode in (_Mode.START, _Mode.CONTENT) and token == markers.call_open:
            self._mode = _Mode.CALLS
            self._content.add(b"", final=True)
            if more := self._content.rest():
                return [Delta(content=more)]
        elif mode is not _Mode.CALLS:
            self._mode = _Mode.HELD
        return []

    def _flush(self) -> None:
        """Read the ordinary tokens since the last structural one."""
        data = b"".join(map(self._to_bytes, self._pending))
        self._pending.clear()
        if self._mode is _Mode.REASONING:
            self._reasoning.add(data)
        elif self._mode in (_Mode.START, _Mode.CONTENT):
            found = self._content.add(data)
            if begun := self._content.raw.strip():
                held = self._markers.held and begun.startswith(self._markers.held)
                self._mode = _Mode.HELD if held and self._mode is _Mode.START else _Mode.CONTENT
            if self._mode is _Mode.HELD:
                return
            if found is not None:
                at, self.stopped_by = found
                self._stopped = self._content.raw[:at].strip()
                self.cut = len(self.ids)

    def _new_calls(self, reply: Reply) -> list[Delta]:
        new, self._calls = reply.calls[self._calls :], len(reply.calls)
        return [Delta(call=call) for call in new]
