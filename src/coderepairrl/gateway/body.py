"""Common parts of the dialects: request bodies, errors, events, and message content as text.

Content other than text becomes a deterministic placeholder, such as ``[image, not shown]``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coderepairrl.gateway.call import Call, Completion
from coderepairrl.gateway.request import ApiError, Counter, Request
from coderepairrl.tokens import Delta, FunctionCall

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")
Array = Annotated[list[T], Field(fail_fast=True)]
"""Array, validated up to its first invalid item: pydantic takes seconds to list 100,000 errors."""


class LenientModel(BaseModel):
    """Rejects wrong types; ignores unknown fields, which vendors add often."""

    model_config = ConfigDict(strict=True, extra="allow")


def parse_body(model: type[Model], raw: bytes) -> Model:
    """Parse a body; lone surrogates become U+FFFD. Raises `ApiError` (400) that names the field."""
    try:
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid" or (repaired := _repair_json(raw)) is None:
                raise
        return model.model_validate_json(repaired)
    except ValidationError as error:
        raise explain_invalid_body(error) from error


def _repair_json(raw: bytes) -> bytes | None:
    # replace lone surrogates, which clients that truncate text send; None if it is not JSON
    try:
        text = json.dumps(json.loads(raw.decode(errors="replace")), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    # through UTF-16, since UTF-8 with errors="replace" would write "?" for U+FFFD
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def explain_invalid_body(error: ValidationError) -> ApiError:
    """Convert pydantic's most deeply nested error to an `ApiError` (400)."""
    # among a union's errors, the deepest belongs to the best-fitting type
    deepest = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
    if deepest["type"] == "json_invalid":
        return ApiError(400, "invalid_json", f"the body is not valid JSON: {deepest['ctx']['error']}")
    # a union adds the names of its types to the path of a field
    names = [str(part) for part in deepest["loc"] if not (part == "str" or str(part).startswith("list["))]
    param = ".".join(names)
    problem = _PROBLEMS.get(deepest["type"], "is not valid").format_map(deepest.get("ctx", {}))
    return ApiError(400, "invalid_value", f"{param or 'the body'} {problem}", param=param or None)


_PROBLEMS = {  # by pydantic's error type
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "too_short": "must have at least {min_length} items",
    "string_too_short": "must have at least {min_length} characters",
}


MAX_STOPS, MAX_STOP_CHARS = 16, 256
"""Most stop strings of a request, and characters of each: all are searched for after each token."""


def read_stop_strings(stop: Sequence[str] | None, param: str) -> tuple[str, ...]:
    """Return the stop strings. Raises `ApiError` (400) for too many, empty and too long ones."""
    if stop and (len(stop) > MAX_STOPS or not all(1 <= len(each) <= MAX_STOP_CHARS for each in stop)):
        message = f"{param} must have at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
        raise ApiError(400, "invalid_value", message, param=param)
    return tuple(stop or ())


def convert_response_format(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a response format to that of Chat Completions."""
    if requested.get("type") != "json_schema":
        return dict(requested)
    schema = {key: value for key, value in requested.items() if key != "type"}
    return {"type": "json_schema", "json_schema": {"name": "reply", **schema}}


def encode_event(data: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event; its ``event:`` line is its type, if it has one."""
    head = f"event: {data['type']}\n" if "type" in data else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


TextKind = Literal["reasoning", "message"]


class ReplyWriter(ABC):
    """Writes a reply, as events (`add`, then `end` or `fail`) or at once (`build_response`)."""

    def __init__(self, request: Request, call: Call) -> None:
        self._request = request
        self._call = call
        self._tool_calls_written = 0
        self._begun = False
        self._events: list[Mapping[str, Any]] = []

    @staticmethod
    def error(failure: ApiError) -> dict[str, Any]:
        """Format an error for OpenAI's clients."""
        body = {"message": failure.message, "type": failure.kind, "code": failure.code, "param": failure.param}
        return {"error": body, **({"crrl": {"limit": failure.limit}} if failure.limit else {})}

    def add(self, delta: Delta) -> bytes:
        """Write the events of an increment."""
        self._add(delta)
        return self._flush()

    def keep_alive(self) -> bytes:
        """Write a comment, to keep the connection."""
        return b": still here\n\n"

    def end(self, completion: Completion) -> bytes:
        """Write the last events."""
        self._begin_once()
        self._finish(completion)
        return self._flush()

    def fail(self, failure: ApiError) -> bytes:
        """Write an error event."""
        return encode_event(self.error(failure))

    def build_response(self, completion: Completion) -> dict[str, Any]:
        """Build a plain response, not streamed."""
        for delta in self._call.deltas:
            self._add(delta)
        self._begin_once()
        return self._finish(completion)

    def _add(self, delta: Delta) -> None:
        self._begin_once()
        if delta.reasoning:
            self._write_text("reasoning", delta.reasoning)
        if delta.content:
            self._write_text("message", delta.content)
        if delta.call:
            self._write_call(delta.call)
            self._tool_calls_written += 1

    def _begin_once(self) -> None:
        if not self._begun:
            self._begun = True
            self._begin()

    def _flush(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(map(encode_event, events))

    @abstractmethod
    def _begin(self) -> None:
        """Write the first events."""

    @abstractmethod
    def _write_text(self, kind: TextKind, text: str) -> None:
        """Write a piece of text."""

    @abstractmethod
    def _write_call(self, function: FunctionCall) -> None:
        """Write tool call number `_tool_calls_written`."""

    @abstractmethod
    def _finish(self, completion: Completion) -> dict[str, Any]:
        """Write the last events; return the plain response."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API that clients speak."""

    name: str
    """Recorded as `Turn.dialect`."""
    path: str
    """Path below ``/v1``."""
    parse: Callable[[bytes], Request]
    """Parses a request body. Raises `ApiError` (400) that names the field."""
    writer: type[ReplyWriter]
    counter: Counter | None = None
    """Token-counting endpoint, if any."""


def build_crrl_fields(completion: Completion) -> dict[str, Any]:
    """The ``crrl`` fields of every reply; ``malformed`` lists unparsed tool calls."""
    return {
        "turn": completion.turn.index,
        "context_tokens": completion.usage.context,
        "remaining_tokens": completion.remaining_tokens,
        "remaining_calls": completion.remaining_calls,
        "limit": completion.limit,
        "malformed": list(completion.malformed),
    }


TEXT_TYPES = frozenset(("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"))
PLACEHOLDER_NAMES = {  # other types keep their names in placeholders
    **dict.fromkeys(("image_url", "input_image", "output_image"), "image"),
    **dict.fromkeys(("input_audio", "output_audio"), "audio"),
    **dict.fromkeys(("video_url", "input_video"), "video"),
    "input_file": "file",
}
MAX_TYPE_CHARS = 100
"""Longest type that a placeholder shows."""


class ContentReader:
    r"""Reads a request's content; `hidden` lists replaced parts as (`message_index`, name).

    Callers set `message_index`. `read_special` reads a dialect's own parts, or returns None.

    >>> reader = ContentReader()
    >>> reader.read_text([{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "https://a.b/c"}}])
    'Look:\n[image, not shown]'
    >>> reader.hidden
    [(0, 'image')]
    """

    def __init__(self, read_special: Callable[[Mapping[str, Any]], str | None] = lambda part: None) -> None:
        self.message_index = 0
        self.hidden: list[tuple[int, str]] = []
        self._read_special = read_special

    def read_text(self, content: object, between: str = "") -> str:
        """Join `content` (a string, parts, or other JSON) with `between`, or put placeholders on their own lines."""
        if isinstance(content, str):
            return content
        written, after_placeholder = "", False
        for part in content if isinstance(content, list) else [content]:
            hidden_before = len(self.hidden)
            text = self._read_part(part)
            is_placeholder = len(self.hidden) > hidden_before
            if written:
                written += between or ("\n" if is_placeholder or after_placeholder else "")
            written, after_placeholder = written + text, is_placeholder
        return written

    def add_placeholder(self, part: Mapping[str, Any]) -> str:
        """Build the placeholder of a non-text part."""
        kind = part.get("type")
        if not (isinstance(kind, str) and kind.isidentifier() and len(kind) <= MAX_TYPE_CHARS):
            kind = "part"
        kind = PLACEHOLDER_NAMES.get(kind, kind)
        self.hidden.append((self.message_index, kind))
        return f"[{kind}, not shown]"

    def _read_part(self, part: Any) -> str:
        if isinstance(part, str) or part is None:
            return part or ""
        if not isinstance(part, dict):
            return json.dumps(part)
        kind = str(part.get("type"))
        if (dialect_text := self._read_special(part)) is not None:
            return dialect_text
        if isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
            return text
        if kind in TEXT_TYPES:
            return ""  # its text is missing or null
        if kind == "document" and isinstance(source := part.get("source"), dict):
            if source.get("type") == "text" and isinstance(source.get("data"), str):
                return str(source["data"])
            if source.get("type") == "content":
                return self.read_text(source.get("content"), "\n")
        if kind == "search_result":
            heading = [each for each in (part.get("title"), part.get("source")) if isinstance(each, str)]
            return "\n".join([*heading, self.read_text(part.get("content"), "\n")])
        return self.add_placeholder(part)
