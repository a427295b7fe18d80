"""Reading request bodies and telling replies: what the dialects share."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coderepairrl.gateway.call import Call, Outcome
from coderepairrl.gateway.request import ApiError
from coderepairrl.tokens import Delta

Model = TypeVar("Model", bound=BaseModel)


class Lenient(BaseModel):
    """Wrong types are errors, unknown fields are not: clients send what their vendor invented last week."""

    model_config = ConfigDict(strict=True, extra="allow")


def read(model: type[Model], raw: bytes, tags: Collection[str] = ()) -> Model:
    """The body as `model`. Raises `ApiError` (400) that names the field.

    `tags` are the names of a union's members, which are no fields.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise refused(error, tags) from error


def refused(error: ValidationError, tags: Collection[str] = ()) -> ApiError:
    """The deepest of what is wrong with a body, in a client's words."""
    first = max(error.errors(include_url=False, include_input=False), key=lambda found: len(found["loc"]))
    path = first["loc"]
    param = ".".join(
        str(part)
        for before, part in zip((None, *path), path, strict=False)
        # a union adds the names of its types to the path of a field
        if not (isinstance(part, str) and (part == "str" or part.startswith("list[")))
        and not (isinstance(before, int) and part in tags)
    )
    code = "invalid_json" if first["type"] == "json_invalid" else "invalid_value"
    return ApiError(400, code, f"{param}: {first['msg']}" if param else first["msg"], param=param or None)


def unsupported(param: str, message: str) -> ApiError:
    """The refusal of something that clients may ask for elsewhere."""
    return ApiError(400, "unsupported_value", message, param=param)


class Telling(Protocol):
    """One reply as its dialect tells it in server-sent events, from its first delta on."""

    def add(self, delta: Delta) -> bytes:
        """What tells of `delta`."""
        ...

    def alive(self) -> bytes:
        """What tells of nothing."""
        ...

    def end(self, outcome: Outcome) -> bytes:
        """What tells of the end."""
        ...

    def fail(self, failure: ApiError) -> bytes:
        """What tells of a failure: once a stream has begun, there is no status to answer with."""
        ...


async def stream(telling: Telling, call: Call, heartbeat: float) -> AsyncIterator[bytes]:
    """The reply as it is sampled, `Telling.alive` after `heartbeat` seconds of silence, its end once it is committed.

    Raises the call's `ApiError` only before anything is told.
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
