"""Reading request bodies and telling replies: what the dialects share."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coderepairrl.gateway.call import Call, Outcome
from coderepairrl.gateway.request import ApiError
from coderepairrl.tokens import Delta

Model = TypeVar("Model", bound=BaseModel)


class Lenient(BaseModel):
    """Wrong types are errors, unknown fields are not: clients send what their vendor invented last week."""

    model_config = ConfigDict(strict=True, extra="allow")


def read(model: type[Model], raw: bytes) -> Model:
    """The body as `model`. Raises `ApiError` (400) that names the field.

    Clients that cut text send half a character: it is read as U+FFFD.
    """
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
    """`raw` with U+FFFD for each byte or escape that is no character; None if it is no JSON even so."""
    try:
        value = json.loads(raw.decode(errors="replace"))
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def refused(error: ValidationError) -> ApiError:
    """The deepest of what is wrong with a body, in words that any client's author understands."""
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
"""What is wrong, by pydantic's names of mistakes."""


def unsupported(param: str, message: str) -> ApiError:
    """The refusal of something that clients may ask for elsewhere."""
    return ApiError(400, "unsupported_value", message, param=param)


def json_schema(wish: Mapping[str, Any]) -> dict[str, Any]:
    """A format for replies, as Responses and Messages have it, in the words of Chat Completions."""
    if wish.get("type") != "json_schema":
        return dict(wish)
    named = {"name": "reply", **{key: value for key, value in wish.items() if key != "type"}}
    return {"type": "json_schema", "json_schema": named}


class Telling(Protocol):
    """One reply as its dialect tells it in server-sent events, from its first delta on."""

    def add(self, delta: Delta) -> bytes:
        """The events of `delta`."""
        ...

    def alive(self) -> bytes:
        """A keep-alive that is legal in the dialect."""
        ...

    def end(self, outcome: Outcome) -> bytes:
        """The events of the end."""
        ...

    def fail(self, failure: ApiError) -> bytes:
        """The event of a failure: once a stream has begun, there is no status to answer with."""
        ...


async def stream(telling: Telling, call: Call, heartbeat: float) -> AsyncIterator[bytes]:
    """The reply as it is sampled, `Telling.alive` after `heartbeat` seconds of silence, its end once it is committed.

    Raises the call's `ApiError` only before the first event.
    """
    begun = False
    try:
        async for delta in call.follow(heartbeat):
            begun = True
            yield telling.alive() if delta is None else telling.add(delta)
        outcome = await call.result()
    except ApiError as failure:
        if not begun:
            raise
        yield telling.fail(failure)
    else:
        yield telling.end(outcome)


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def named(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Server-sent events, each named by its type."""
    return b"".join(sse(event, event["type"]) for event in events)


def extras(outcome: Outcome) -> dict[str, Any]:
    """What every reply says beside its dialect's fields, under ``crrl``.

    ``turn``, ``context_tokens``, ``remaining_tokens``, ``remaining_calls``, ``limit`` and ``malformed`` (tool calls
    that could not be read, which are in the content, too).
    """
    return {
        "turn": outcome.turn.index,
        "context_tokens": outcome.usage.context,
        "remaining_tokens": outcome.remaining_tokens,
        "remaining_calls": outcome.remaining_calls,
        "limit": outcome.limit,
        "malformed": list(outcome.malformed),
    }
