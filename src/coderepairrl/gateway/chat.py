"""The dialect of OpenAI's Chat Completions, plain and streaming.

A reply carries `body.extras` as ``crrl`` beside the standard fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from coderepairrl.gateway.body import Lenient, extras, read, refused, sse, unsupported
from coderepairrl.gateway.call import Call, Outcome
from coderepairrl.gateway.request import ApiError, Message, Request
from coderepairrl.tokens import Delta
from coderepairrl.types import Finish

name = "chat"
path = "/chat/completions"
counter = None

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


class _Function(Lenient):
    name: str
    arguments: str


class _ToolCall(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Part(Lenient):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _Message(Lenient):
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


class _Signature(Lenient):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Lenient):
    type: Literal["function"]
    function: _Signature


class _Tools(Lenient):
    tools: list[_Tool] | None


class _StreamOptions(Lenient):
    include_usage: bool | None = None


class _Body(Lenient):
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
    body = read(_Body, raw)
    try:
        _Tools.model_validate({"tools": body.tools})
    except ValidationError as error:
        raise refused(error) from error
    if body.n not in (None, 1):
        raise unsupported("n", "one choice per request; send the request again")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise unsupported("response_format", "replies are not constrained to a format")
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
        "crrl": extras(outcome),
    }


def tell(request: Request, call: Call) -> Chunks:
    """The response to a streaming request."""
    return Chunks(request, call)


def error(failure: ApiError) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    body = {"message": failure.message, "type": failure.kind, "code": failure.code, "param": failure.param}
    return {"error": body, **({"crrl": {"limit": failure.limit}} if failure.limit else {})}


class Chunks:
    """A reply as it grows (`body.Telling`)."""

    def __init__(self, request: Request, call: Call) -> None:
        self._request = request
        self._call = call
        self._header = _header(request, call, "chat.completion.chunk")
        self._begun = False
        self._calls = 0

    def add(self, delta: Delta) -> bytes:
        """A chunk for each kind of what `delta` holds."""
        told = self._beginning()
        if delta.reasoning:
            told += self._chunk({"reasoning_content": delta.reasoning})
        if delta.content:
            told += self._chunk({"content": delta.content})
        if delta.call:
            function = {"name": delta.call.name, "arguments": delta.call.arguments}
            identity = {"index": self._calls, "id": self._call.tool_call_id(self._calls, delta.call)}
            told += self._chunk({"tool_calls": [{**identity, "type": "function", "function": function}]})
            self._calls += 1
        return told

    def alive(self) -> bytes:
        """A comment."""
        return b": still here\n\n"

    def end(self, outcome: Outcome) -> bytes:
        """The finish reason, the usage if it is wanted, and the terminal event."""
        told = self._beginning() + self._chunk({}, _finish_reason(outcome), crrl=extras(outcome))
        if self._request.stream_usage:
            told += sse({**self._header, "choices": [], "usage": _usage(outcome)})
        return told + b"data: [DONE]\n\n"

    def fail(self, failure: ApiError) -> bytes:
        """An event of its own."""
        return sse(error(failure))

    def _beginning(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._chunk({"role": "assistant", "content": ""})

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        unknown = {"usage": None} if self._request.stream_usage else {}
        return sse({**self._header, "choices": [choice], **unknown, **more})


def _header(request: Request, call: Call, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.name}",
        "object": kind,
        "created": call.created,
        "model": request.model,
    }


def _finish_reason(outcome: Outcome) -> str:
    if outcome.turn.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if "tool_calls" in outcome.message else "stop"


def _usage(outcome: Outcome) -> dict[str, Any]:
    usage = outcome.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
