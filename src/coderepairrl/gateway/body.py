"""Request bodies and streamed replies of all dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coderepairrl.gateway.call import Call, Completion
from coderepairrl.gateway.request import ApiError
from coderepairrl.tokens import Delta

Model = TypeVar("Model", bound=BaseModel)


class Lenient(BaseModel):
    """Rejects wrong types; ignores unknown fields, which vendors add often."""

    model_config = ConfigDict(strict=True, extra="allow")


def read(model: type[Model], raw: bytes) -> Model:
    """Parse a body, half characters as U+FFFD. Raises `ApiError` (400) that names the field."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        if error.errors()[0]["type"] != "json_invalid" or (mended := _mended(raw)) is None:
            raise refused(error) from error
    try:
        return model.model_validate_json(mended)
    except ValidationError as error:
        raise refused(error) from error


def _mended(raw: bytes) -> bytes | None:
    try:
        value = json.loads(raw.decode(errors="replace"))  # clients that truncate text send half a character
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def refused(error: ValidationError) -> ApiError:
    """Convert the most deeply nested error."""
    first = max(error.errors(include_url=False, include_input=False), key=lambda wrong_field: len(wrong_field["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, "invalid_json", f"the body is not valid JSON: {first['ctx']['error']}")
    # a union adds the names of its types to the path of a field
    names = [str(part) for part in first["loc"] if not (part == "str" or str(part).startswith("list["))]
    param = ".".join(names)
    wrong = _WRONG.get(first["type"], "is not valid").format_map(first.get("ctx", {}))
    return ApiError(400, "invalid_value", f"{param or 'the body'} {wrong}", param=param or None)


_WRONG = {
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


def unsupported(param: str, message: str) -> ApiError:
    """Return a 400 for a provider-only feature."""
    return ApiError(400, "unsupported_value", message, param=param)


def json_schema(wish: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a response format to Chat Completions."""
    if wish.get("type") != "json_schema":
        return dict(wish)
    typed_events = {"name": "reply", **{key: value for key, value in wish.items() if key != "type"}}
    return {"type": "json_schema", "json_schema": typed_events}


class EventWriter(Protocol):
    """Writes a reply as server-sent events."""

    def add(self, delta: Delta) -> bytes:
        """Events of `delta`."""
        ...

    def alive(self) -> bytes:
        """Keep-alive."""
        ...

    def end(self, completion: Completion) -> bytes:
        """Closing events."""
        ...

    def fail(self, failure: ApiError) -> bytes:
        """Error event, since the HTTP status is already sent."""
        ...


async def stream(writer: EventWriter, call: Call, heartbeat: float) -> AsyncIterator[bytes]:
    """Yield events, and keep-alives after `heartbeat` silent seconds. Raises `ApiError` only before the first."""
    begun = False
    try:
        async for delta in call.follow(heartbeat):
            begun = True
            yield writer.alive() if delta is None else writer.add(delta)
        completion = await call.result()
    except ApiError as failure:
        if not begun:
            raise
        yield writer.fail(failure)
    else:
        yield writer.end(completion)


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """Encode one server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def typed_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode events whose ``event:`` line is their type."""
    return b"".join(sse(event, event["type"]) for event in events)


def extras(completion: Completion) -> dict[str, Any]:
    """The ``crrl`` fields of every reply; ``malformed`` lists unparsed tool calls."""
    return {
        "turn": completion.turn.index,
        "context_tokens": completion.usage.context,
        "remaining_tokens": completion.remaining_tokens,
        "remaining_calls": completion.remaining_calls,
        "limit": completion.limit,
        "malformed": list(completion.malformed),
    }
