"""The dialect of OpenAI's Chat Completions, plain and streaming.

Beside the standard fields, a reply carries ``crrl``: ``turn``, ``context_tokens``, ``remaining_tokens``,
``remaining_calls``, ``limit`` and ``malformed`` (tool calls that could not be read, which are in the content, too).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coderepairrl.gateway.call import Call, Outcome
from coderepairrl.gateway.request import ApiError, Message, Request
from coderepairrl.types import Finish

name = "chat"
path = "/chat/completions"

WISHES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
)
"""What a client may ask for and the run decides; recorded in `Turn.overridden` where the two differ."""


class _Lenient(BaseModel):
    """Wrong types are errors, unknown fields are not: clients send what their vendor invented last week."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Function(_Lenient):
    name: str
    arguments: str


class _ToolCall(_Lenient):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Part(_Lenient):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def normal(self) -> Message:
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text or part.refusal for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "assistant" and self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class _Signature(_Lenient):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Lenient):
    type: Literal["function"]
    function: _Signature


class _Tools(_Lenient):
    tools: list[_Tool] | None


class _StreamOptions(_Lenient):
    include_usage: bool | None = None


class _Body(_Lenient):
    model: str
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    response_format: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None


def parse(raw: bytes) -> Request:
    """The request in a body. Raises `ApiError` (400) that names the field."""
    try:
        body = _Body.model_validate_json(raw)
        _Tools.model_validate({"tools": body.tools})
    except ValidationError as error:
        first = max(error.errors(include_url=False, include_input=False), key=lambda found: len(found["loc"]))
        # a union adds the names of its types to the path of a field
        param = ".".join(str(part) for part in first["loc"] if part != "str" and not str(part).startswith("list["))
        code = "invalid_json" if first["type"] == "json_invalid" else "invalid_value"
        raise ApiError(400, code, f"{param}: {first['msg']}" if param else first["msg"], param=param or None) from error
    if body.n not in (None, 1):
        raise ApiError(400, "unsupported_value", "one choice per request; send the request again", param="n")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise ApiError(400, "unsupported_value", "replies are not constrained to a format", param="response_format")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if "" in stop:
        raise ApiError(400, "invalid_value", "a stop string has at least one character", param="stop")
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    fields: Mapping[str, Any] = {**(body.model_extra or {}), "temperature": body.temperature, "top_p": body.top_p}
    wishes = {wish: fields[wish] for wish in WISHES if fields.get(wish) is not None}
    if wishes.get("tool_choice") == "auto" or not body.tools:
        wishes.pop("tool_choice", None)
    if wishes.get("parallel_tool_calls") is True or not body.tools:
        wishes.pop("parallel_tool_calls", None)
    return Request(
        dialect=name,
        model=body.model,
        messages=tuple(message.normal() for message in body.messages),
        tools=tuple(body.tools or ()),  # as the client wrote them, field by field: they are part of the prompt
        max_tokens=min(limits, default=None),
        stop=tuple(stop),
        stream=bool(body.stream),
        stream_usage=bool(body.stream_options and body.stream_options.include_usage),
        wishes=wishes,
    )


def reply(request: Request, call: Call, outcome: Outcome) -> dict[str, Any]:
    """The response to a plain request."""
    message = {**outcome.message, "refusal": None}
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(outcome)}
    return {
        **_header(request, call, "chat.completion"),
        "choices": [choice],
        "usage": _usage(outcome),
        "crrl": _extras(outcome),
    }


async def stream(request: Request, call: Call, heartbeat: float) -> AsyncIterator[bytes]:
    """Server-sent events: the reply as it is sampled; the terminal ones only once the turn is committed.

    The first event comes with the first token or with the end, so that a call that fails before either can still
    be answered with a status; comments keep the connection alive after `heartbeat` seconds of silence.
    """
    header = _header(request, call, "chat.completion.chunk")
    unknown = {"usage": None} if request.stream_usage else {}

    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**header, "choices": [choice], **unknown, **more})

    opening: bytes | None = chunk({"role": "assistant", "content": ""})
    calls = 0
    async for delta in call.follow(heartbeat):
        if delta is None:
            yield b": still here\n\n"
            continue
        if opening:
            yield opening
            opening = None
        if delta.reasoning:
            yield chunk({"reasoning_content": delta.reasoning})
        if delta.content:
            yield chunk({"content": delta.content})
        if delta.call:
            function = {"name": delta.call.name, "arguments": delta.call.arguments}
            identity = {"index": calls, "id": call.tool_call_id(calls, delta.call), "type": "function"}
            yield chunk({"tool_calls": [{**identity, "function": function}]})
            calls += 1
    outcome = await call.result()
    if opening:
        yield opening
    yield chunk({}, _finish_reason(outcome), crrl=_extras(outcome))
    if request.stream_usage:
        yield event({**header, "choices": [], "usage": _usage(outcome)})
    yield b"data: [DONE]\n\n"


def error(failure: ApiError) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    body = {"message": failure.message, "type": failure.kind, "code": failure.code, "param": failure.param}
    return {"error": body, **({"crrl": {"limit": failure.limit}} if failure.limit else {})}


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _header(request: Request, call: Call, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.digest[:16]}-{call.ordinal}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _finish_reason(outcome: Outcome) -> str:
    if outcome.turn.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if "tool_calls" in outcome.message else "stop"


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "prompt_tokens": outcome.prompt,
        "completion_tokens": outcome.turn.sampled,
        "total_tokens": outcome.prompt + outcome.turn.sampled,
        "prompt_tokens_details": {"cached_tokens": outcome.cached},
    }


def _extras(outcome: Outcome) -> dict[str, Any]:
    return {
        "turn": outcome.turn.index,
        "context_tokens": outcome.prompt + len(outcome.turn.output),
        "remaining_tokens": outcome.remaining_tokens,
        "remaining_calls": outcome.remaining_calls,
        "limit": outcome.limit,
        "malformed": list(outcome.malformed),
    }
