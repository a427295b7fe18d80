"""Parsing of remotes' responses and chunks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator

from coderepairrl.gateway.body import ContentReader, LenientModel
from coderepairrl.tokens import Delta

RETURNED = (
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "reasoning_opaque",
    "encrypted_content",
    "extra_content",
    "thought_signature",
    "provider_specific_fields",
)
"""Fields that providers expect back as they sent them.

Other unknown fields are dropped, since some servers refuse fields that they send.
"""
STREAMED = ("reasoning", "reasoning_content", "text", "summary")
"""Text fields that streams send in pieces."""
Count = Annotated[int, BeforeValidator(lambda count: int(count) if str(count).endswith(".0") else count)]
"""A number of tokens: some servers write 3.0."""


class _Function(LenientModel):
    name: str | None = None
    arguments: Any = None


class _ToolCall(LenientModel):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Content(LenientModel):
    content: Any = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(LenientModel):
    message: _Content | None = None
    delta: _Content | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    error: Any = None
    token_ids: list[int] | None = None


class _PromptDetails(LenientModel):
    cached_tokens: Count | None = None


class _CompletionDetails(LenientModel):
    reasoning_tokens: Count | None = None


class _Usage(LenientModel):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    def counts(self) -> dict[str, int]:
        prompt, sampled = self.prompt_tokens or 0, self.completion_tokens
        if sampled is None:
            sampled = (self.total_tokens or prompt) - prompt
        return {"prompt_tokens": prompt, "completion_tokens": sampled}


class RemoteAnswer(LenientModel):
    """A remote's response or chunk; servers differ, so all fields are optional."""

    id: str | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


@dataclass
class ReceivedReply:
    """One attempt's reply so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """``id``, ``name``, ``arguments`` (JSON text), and ``returned`` (fields in `RETURNED`)."""
    places: dict[int, int] = field(default_factory=dict)
    """Position in `calls` of the newest call with each server index."""
    finish: str = ""  # the server's ``finish_reason``
    error: Any = None
    is_whole: bool = False
    """Whether it is a complete response, not streamed."""
    stopped_by: str = ""
    usage: _Usage | None = None
    """None until the server reports it."""
    _fields: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields for `Turn.remote`: ``id``, ``model``, ``prompt_token_ids``, ``token_ids``."""

    def take(self, answer: RemoteAnswer) -> list[Delta]:
        """Add `answer`; return a stream's deltas."""
        if answer.usage and answer.usage.prompt_tokens is not None:
            self.usage = answer.usage
        for name in ("id", "model", "prompt_token_ids"):
            if value := getattr(answer, name):
                self.extra[name] = value
        deltas = []
        for choice in (answer.choices or ())[:1]:
            self.is_whole = choice.message is not None
            piece = choice.message or choice.delta or _Content()
            thoughts, text = _split_thoughts(piece.content)
            if thoughts := piece.reasoning_content or piece.reasoning or thoughts:
                self.reasoning += thoughts
                deltas.append(Delta(reasoning=thoughts))
            if text := text + (piece.refusal or ""):
                self.content += text
                deltas.append(Delta(content=text))
            self._fields = _merge_fields(self._fields, _returned_fields(piece))
            for call in piece.tool_calls or ():
                self._add_call_piece(call)
            if choice.token_ids:
                self.extra["token_ids"] = [*self.extra.get("token_ids", ()), *choice.token_ids]
            if self.is_whole or choice.finish_reason:
                self.finish = choice.finish_reason or "stop"
            self.error = choice.error or self.error
            if isinstance(choice.stop_reason, str):
                self.stopped_by = choice.stop_reason
        return [] if self.is_whole else deltas

    @property
    def returned(self) -> dict[str, Any]:
        """`RETURNED` fields of the message and, under ``tool_calls``, of each call."""
        calls = [call["returned"] for call in self.calls]
        return {**self._fields, **({"tool_calls": calls} if any(calls) else {})}

    def _add_call_piece(self, piece: _ToolCall) -> None:
        newest = len(self.calls) - 1
        # some servers number calls, others give only the first piece an id
        at = newest if piece.index is None else self.places.get(piece.index, -1)
        if at < 0 or (piece.id and self.calls[at]["id"] not in ("", piece.id)):
            self.calls.append({"id": "", "name": "", "arguments": "", "returned": {}})
            at = newest + 1
        if piece.index is not None:
            self.places[piece.index] = at
        call, function = self.calls[at], piece.function or _Function()
        call["id"] = call["id"] or piece.id or ""
        if function.name != call["name"]:  # some servers repeat the name in each piece
            call["name"] += function.name or ""
        arguments = function.arguments or ""
        call["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call["returned"] = _merge_fields(call["returned"], _returned_fields(piece))


def _split_thoughts(content: Any) -> tuple[str, str]:
    # split content, a string or parts, into thoughts and words
    parts = content if isinstance(content, list) else [content]
    thoughts = [part["thinking"] for part in parts if isinstance(part, dict) and "thinking" in part]
    words = [part for part in parts if not (isinstance(part, dict) and "thinking" in part)]
    return "".join(map(ContentReader().read_text, thoughts)), ContentReader().read_text(words)


def _returned_fields(piece: LenientModel) -> dict[str, Any]:
    return {name: value for name in RETURNED if (value := getattr(piece, name, None)) is not None}


def _merge_fields(old: Any, new: Any, name: str = "") -> Any:
    # merge a stream's pieces of field `name`; lists by their items' type and index
    if old is None or new is None:
        return old if new is None else new
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merge_fields(old.get(key), value, key) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list):
        joined = list(old)
        for item in new:
            if joined and isinstance(item, dict) and "index" in item and _stream_key(item) == _stream_key(joined[-1]):
                joined[-1] = _merge_fields(joined[-1], item)
            else:
                joined.append(item)
        return joined
    return old + new if name in STREAMED and isinstance(old, str) and isinstance(new, str) else new


def _stream_key(item: Any) -> Any:
    return (item.get("type"), item.get("index")) if isinstance(item, dict) else None


def parse_event_line(line: bytes) -> bytes:
    """Data of a server-sent event line, else empty."""
    return line[len(b"data:") :].strip() if line.startswith(b"data:") else b""


def is_json(data: bytes) -> bool:
    """Whether `data` parses as JSON."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
