"""Reading request bodies and writing events: what the dialects share."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coderepairrl.gateway.call import Outcome
from coderepairrl.gateway.request import ApiError

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


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


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
