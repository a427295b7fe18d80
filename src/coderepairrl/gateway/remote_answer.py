"""Chat Completions as remotes answer it: parsing responses and chunks, and assembling them into one reply."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from coderepairrl.gateway.body import Lenient
from coderepairrl.tokens import Delta


class _Function(Lenient):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Lenient):
    index: int | None = None
    id: str | None = None
    function: _Function


class _Content(Lenient):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(Lenient):
    message: _Content | None = None
    delta: _Content | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: list[int] | None = None


class _PromptDetails(Lenient):
    cached_tokens: int | None = None


class _CompletionDetails(Lenient):
    reasoning_tokens: int | None = None


class _Usage(Lenient):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class RemoteAnswer(Lenient):
    """A response of a remote, or one chunk of a stream. Servers differ: only the usage has required fields."""

    id: str | None = None
    model: str | None = None
    choices: list[_Choice] = Field(default_factory=list)
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


@dataclass
class Received:
    """The reply as far as one attempt has received it."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    """Positions in `calls` by the index that the server gave; of several with one index, the newest."""
    finish: str = ""
    whole: bool = False
    """Whether it came as a plain response, to be passed on only at the end."""
    stopped_by: str = ""
    usage: _Usage | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields for `Turn.remote`: ``id``, ``model``, ``prompt_token_ids``, ``token_ids``."""

    def take(self, answer: RemoteAnswer) -> list[Delta]:
        """Add `answer`; returns the deltas of a stream, nothing for a plain response."""
        self.usage = answer.usage or self.usage
        for name in ("id", "model", "prompt_token_ids"):
            if value := getattr(answer, name):
                self.extra[name] = value
        deltas = []
        for choice in answer.choices[:1]:
            self.whole = choice.message is not None
            piece = choice.message or choice.delta or _Content()
            if thoughts := piece.reasoning_content or piece.reasoning or "":
                self.reasoning += thoughts
                deltas.append(Delta(reasoning=thoughts))
            if text := (piece.content or "") + (piece.refusal or ""):
                self.content += text
                deltas.append(Delta(content=text))
            for call in piece.tool_calls or ():
                self._call(call)
            if choice.token_ids:
                self.extra["token_ids"] = [*self.extra.get("token_ids", ()), *choice.token_ids]
            if self.whole or choice.finish_reason:
                self.finish = choice.finish_reason or "stop"
            if isinstance(choice.stop_reason, str):
                self.stopped_by = choice.stop_reason
        return [] if self.whole else deltas

    def _call(self, piece: _ToolCall) -> None:
        """Add a tool call or a piece of one: some servers number calls, others give only the first piece an id."""
        newest = len(self.calls) - 1
        at = newest if piece.index is None else self.places.get(piece.index, -1)
        if at < 0 or (piece.id and self.calls[at]["id"] not in ("", piece.id)):
            self.calls.append({"id": "", "name": "", "arguments": ""})
            at = newest + 1
        if piece.index is not None:
            self.places[piece.index] = at
        call = self.calls[at]
        call["id"] = call["id"] or piece.id or ""
        call["name"] += piece.function.name or ""
        call["arguments"] += piece.function.arguments or ""


def event_data(line: bytes) -> bytes:
    """The data of a line of server-sent events; empty for comments and other fields."""
    return line[len(b"data:") :].strip() if line.startswith(b"data:") else b""


def is_json(data: bytes) -> bool:
    """Whether `data` parses as JSON."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
