"""OpenAI's Chat Completions, with the older ``functions`` too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from coderepairrl.gateway.body import (
    Array,
    ContentReader,
    Dialect,
    LenientModel,
    ReplyWriter,
    TextKind,
    build_crrl_fields,
    explain_invalid_body,
    parse_body,
    read_stop_strings,
)
from coderepairrl.gateway.call import Completion
from coderepairrl.gateway.request import ApiError, Request
from coderepairrl.tokens import FunctionCall
from coderepairrl.types import Finish

CLIENT_SETTINGS = (
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
"""Client settings that the run overrides (`Turn.overridden`)."""


class _Function(LenientModel):
    name: str
    arguments: Any = None


class _ToolCall(LenientModel):
    id: str = ""
    function: _Function


class _Message(LenientModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None
    name: Any = None
    tool_calls: Array[_ToolCall] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None

    def normalise(self, reader: ContentReader) -> dict[str, Any]:
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": reader.read_text(self.content)}
        if self.role == "assistant" and (thoughts := reader.read_text(self.reasoning_content)):
            message["reasoning_content"] = thoughts
        calls = [(call.id, call.function) for call in self.tool_calls or ()]
        if self.function_call is not None:  # it has no id: its result names the function
            calls.append((self.function_call.name, self.function_call))
        if self.role == "assistant" and calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": each.name, "arguments": _arguments_as_json(each)}}
                for id, each in calls
            ]
        if role == "tool" and (id := self.tool_call_id or self.name):
            message["tool_call_id"] = str(id)
        return message


def _arguments_as_json(function: _Function) -> str:
    value = function.arguments  # some clients send an object
    return value if isinstance(value, str) else json.dumps({} if value is None else value, ensure_ascii=False)


class _Signature(LenientModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(LenientModel):
    function: _Signature


class _Tools(LenientModel):
    tools: Array[_Tool]
    functions: Array[_Signature]


class _StreamOptions(LenientModel):
    include_usage: bool | None = None


class _Body(LenientModel):
    model: str
    messages: Array[_Message] = Field(min_length=1)
    tools: Array[dict[str, Any]] | None = None
    functions: Array[dict[str, Any]] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | Array[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    response_format: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None


def parse(raw: bytes) -> Request:
    """See `Dialect.parse`."""
    body = parse_body(_Body, raw)
    if body.n not in (None, 1):
        problem = "only one choice per request is supported; send the request again"
        raise ApiError(400, "unsupported_value", problem, param="n")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    tools, hosted = _read_chat_tools(body)
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    fields: Mapping[str, Any] = {**(body.model_extra or {}), "temperature": body.temperature, "top_p": body.top_p}
    settings = {name: fields[name] for name in CLIENT_SETTINGS if fields.get(name) is not None}
    if (choice := fields.get("function_call")) is not None:
        settings["tool_choice"] = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    if settings.get("tool_choice") == "auto" or not tools:
        settings.pop("tool_choice", None)
    if settings.get("parallel_tool_calls") is True or not tools:
        settings.pop("parallel_tool_calls", None)
    if body.response_format is not None and body.response_format.get("type") != "text":
        settings["response_format"] = body.response_format
    if hosted:
        settings["hosted_tools"] = hosted
    reader = ContentReader()
    messages = []
    for index, message in enumerate(body.messages):
        reader.message_index = index
        messages.append(message.normalise(reader))
    return Request(
        dialect="chat",
        model=body.model,
        messages=tuple(messages),
        tools=tools,
        max_tokens=min(limits, default=None),
        stop=read_stop_strings(stop, "stop"),
        stream=bool(body.stream),
        stream_usage=bool(body.stream_options and body.stream_options.include_usage),
        client_settings=settings,
        hidden=tuple(reader.hidden),
        notes={"legacy": body.functions is not None and not body.tools},
    )


def _read_chat_tools(body: _Body) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    # return the function tools, and the types of the others, which the vendor would run
    function_tools = [tool for tool in body.tools or () if tool.get("type") == "function"]
    try:
        _Tools.model_validate({"tools": function_tools, "functions": body.functions or []})
    except ValidationError as error:
        raise explain_invalid_body(error) from error
    function_tools += [{"type": "function", "function": function} for function in body.functions or ()]
    return tuple(function_tools), [str(tool.get("type")) for tool in body.tools or () if tool.get("type") != "function"]


class ChunkWriter(ReplyWriter):
    """Writes ``chat.completion.chunk`` events, one per kind of content, and at the end ``[DONE]``."""

    def end(self, completion: Completion) -> bytes:
        """Write finish reason, requested usage, and ``[DONE]``."""
        return super().end(completion) + b"data: [DONE]\n\n"

    def _begin(self) -> None:
        self._chunk({"role": "assistant", "content": ""})

    def _write_text(self, kind: TextKind, text: str) -> None:
        self._chunk({"reasoning_content" if kind == "reasoning" else "content": text})

    def _write_call(self, function: FunctionCall) -> None:
        fields = {"name": function.name, "arguments": function.arguments}
        index = self._tool_calls_written
        if not self._request.notes["legacy"]:
            identity = {"index": index, "id": self._call.tool_call_id(index, function)}
            self._chunk({"tool_calls": [{**identity, "type": "function", "function": fields}]})
        elif index == 0:  # the older API has one call per message
            self._chunk({"function_call": fields})

    def _finish(self, completion: Completion) -> dict[str, Any]:
        reason, crrl = _finish_reason(self._request, completion), build_crrl_fields(completion)
        self._chunk({}, reason, crrl=crrl)
        counts = completion.usage
        usage = {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.sampled,
            "total_tokens": counts.prompt + counts.sampled,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
            "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        }
        if self._request.stream_usage:
            self._events.append({**self._header("chat.completion.chunk"), "choices": [], "usage": usage})
        message = {**completion.message, "refusal": None}
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
        if self._request.notes["legacy"] and (calls := message.pop("tool_calls", ())):
            message["function_call"] = calls[0]["function"]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**self._header("chat.completion"), "choices": [choice], "usage": usage, "crrl": crrl}

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        no_usage = {"usage": None} if self._request.stream_usage else {}
        self._events.append({**self._header("chat.completion.chunk"), "choices": [choice], **no_usage, **more})

    def _header(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._call.name}",
            "object": kind,
            "created": self._call.created,
            "model": self._request.model,
        }


def _finish_reason(request: Request, completion: Completion) -> str:
    if completion.turn.finish is Finish.LENGTH:
        return "length"
    if "tool_calls" not in completion.message:
        return "stop"
    return "function_call" if request.notes["legacy"] else "tool_calls"


DIALECT = Dialect("chat", "/chat/completions", parse, ChunkWriter)
