"""Anthropic's Messages API.

Tools that the vendor runs, or that only its models know (``web_search_...``, ``bash_...``), are hidden from the policy
and recorded in `Turn.overridden`; ``defer_loading`` tools appear where the client refers to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json

from coderepairrl.gateway.body import (
    Array,
    ContentReader,
    Dialect,
    LenientModel,
    ReplyWriter,
    TextKind,
    build_crrl_fields,
    convert_response_format,
    encode_event,
    parse_body,
    read_stop_strings,
)
from coderepairrl.gateway.call import Call, Completion
from coderepairrl.gateway.request import ApiError, Counter, Message, Request
from coderepairrl.tokens import FunctionCall
from coderepairrl.types import Finish

CLIENT_SETTINGS = ("temperature", "top_p", "top_k", "thinking", "tool_choice")
"""Client settings that the run overrides (`Turn.overridden`)."""
DEFAULTS = {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}
"""Values equivalent to leaving the setting out."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Anthropic's error types by status; others are ``invalid_request_error``, or ``api_error`` from 500."""
SIGNATURE = "unsigned"
"""Makes clients send thoughts back; it is not verified, since recorded replies are looked up."""

_NESTING = 50  # more JSON levels than a body has around a call's arguments


class _Message(LenientModel):
    role: Literal["user", "assistant", "system"]
    content: Any


class _Tool(LenientModel):
    type: str | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None

    @property
    def is_client_run(self) -> bool:
        return self.type in (None, "custom")


class _OutputConfig(LenientModel):
    format: dict[str, Any] | None = None


class _CountBody(LenientModel):
    model: str
    messages: Array[_Message] = Field(min_length=1)
    system: Any = None
    tools: Array[_Tool] | None = None
    output_config: _OutputConfig | None = None
    output_format: dict[str, Any] | None = None


class _Body(_CountBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: Array[str] | None = None
    stream: bool | None = None


def parse(raw: bytes) -> Request:
    """See `Dialect.parse`."""
    body = parse_body(_Body, raw)
    stop = read_stop_strings(body.stop_sequences, "stop_sequences")
    return _build_request(body, max_tokens=body.max_tokens, stop=stop, stream=bool(body.stream))


def _build_request(body: _CountBody, **more: Any) -> Request:
    fields = body.model_extra or {}
    settings = {name: fields[name] for name in CLIENT_SETTINGS if fields.get(name) not in (None, DEFAULTS.get(name))}
    if response_format := (body.output_config and body.output_config.format) or body.output_format:
        settings["response_format"] = convert_response_format(response_format)
    if hosted := [tool.type for tool in body.tools or () if not tool.is_client_run]:
        settings["hosted_tools"] = hosted
    client_run = [tool for tool in body.tools or () if tool.is_client_run]
    deferred = {tool.name: _as_function_tool(tool) for tool in client_run if tool.defer_loading}
    reader = ContentReader(lambda part: _read_tool_reference(part, deferred))
    system = reader.read_text(body.system, "\n")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        _append_messages(messages, message, reader)
    return Request(
        dialect="messages",
        model=body.model,
        messages=tuple(messages),
        tools=tuple(_as_function_tool(tool) for tool in client_run if not tool.defer_loading),
        client_settings=settings,
        hidden=tuple(reader.hidden),
        **more,
    )


class MessageWriter(ReplyWriter):
    """Writes a message's events, one content block at a time."""

    def __init__(self, request: Request, call: Call) -> None:
        super().__init__(request, call)
        self._content: list[dict[str, Any]] = []
        self._is_block_open = False

    @staticmethod
    def error(failure: ApiError) -> dict[str, Any]:
        """Format an error for Anthropic's clients."""
        kind = ERROR_TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
        more = {"code": failure.code, "param": failure.param, "limit": failure.limit}
        return {"type": "error", "error": {"type": kind, "message": failure.message}, "request_id": None, "crrl": more}

    def keep_alive(self) -> bytes:
        """Write a ``ping``."""
        return encode_event({"type": "ping"})

    def _begin(self) -> None:
        self._event("message_start", message={**self._message(), "content": []})

    def _write_text(self, kind: TextKind, text: str) -> None:
        block = _TEXT_BLOCKS[kind]
        type = block["type"]
        if not self._is_block_open or self._content[-1]["type"] != type:
            self._close()
            self._start({**block})
        self._content[-1][type] += text
        self._delta(f"{type}_delta", **{type: text})

    def _write_call(self, function: FunctionCall) -> None:
        identity = {"id": self._call.tool_call_id(self._tool_calls_written, function), "name": function.name}
        value = _parse_object(function.arguments)
        self._close()
        self._start({"type": "tool_use", **identity, "input": {}})
        self._content[-1]["input"] = value
        self._delta("input_json_delta", partial_json=json.dumps(value, ensure_ascii=False))
        self._close()

    def _finish(self, completion: Completion) -> dict[str, Any]:
        self._close()
        counts = completion.usage
        usage: dict[str, Any] = {**_input_usage(counts.prompt, counts.cached), "output_tokens": counts.sampled}
        if counts.reasoning:
            usage["output_tokens_details"] = {"thinking_tokens": counts.reasoning}
        stop = completion.stop if completion.stop in self._request.stop else None
        delta = {"stop_reason": _stop_reason(completion, self._request), "stop_sequence": stop}
        more = {"usage": usage, "crrl": build_crrl_fields(completion)}
        self._event("message_delta", delta=delta, **more)
        self._event("message_stop")
        return {**self._message(), **delta, **more}

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._call.name}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_input_usage(self._call.prompt, self._call.cached), "output_tokens": 0},
        }

    def _start(self, block: dict[str, Any]) -> None:
        self._content.append(block)
        self._is_block_open = True
        self._event("content_block_start", index=len(self._content) - 1, content_block={**block})

    def _delta(self, type: str, **fields: str) -> None:
        self._event("content_block_delta", index=len(self._content) - 1, delta={"type": type, **fields})

    def _close(self) -> None:
        if not self._is_block_open:
            return
        self._is_block_open = False
        if self._content[-1]["type"] == "thinking":
            self._content[-1]["signature"] = SIGNATURE
            self._delta("signature_delta", signature=SIGNATURE)
        self._event("content_block_stop", index=len(self._content) - 1)

    def _event(self, type: str, **fields: Any) -> None:
        self._events.append({"type": type, **fields})


_TEXT_BLOCKS: dict[TextKind, dict[str, str]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "message": {"type": "text", "text": ""},
}


def _input_usage(prompt: int, cached: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _stop_reason(completion: Completion, request: Request) -> str:
    if completion.turn.finish is Finish.LENGTH:
        return "model_context_window_exceeded" if completion.limit in ("tokens", "context") else "max_tokens"
    if completion.stop in request.stop:
        return "stop_sequence"
    return "tool_use" if "tool_calls" in completion.message else "end_turn"


def _parse_object(arguments: str) -> dict[str, Any]:
    # parse arguments that clients can send back; others become the text of ``{"value": ...}``
    try:
        value = json.loads(arguments, parse_constant=str)  # NaN is not JSON
        # refuses infinity (1e999) and lone surrogates, which are not JSON either
        text = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        from_json(b"[" * _NESTING + text + b"]" * _NESTING)  # refuses nesting too deep for `parse_body`
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"value": value}


def _as_function_tool(tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _read_tool_reference(part: Mapping[str, Any], deferred: Mapping[str, Any]) -> str | None:
    tool = part.get("tool_name")
    if part.get("type") != "tool_reference" or not isinstance(tool, str) or tool not in deferred:
        return None
    return json.dumps(deferred[tool], ensure_ascii=False)


def _append_messages(messages: list[Message], message: _Message, reader: ContentReader) -> None:
    # append `message`; each tool result among its blocks becomes a message of its own
    blocks = message.content if isinstance(message.content, list) else [message.content]
    if message.role == "assistant":
        reader.message_index = len(messages)
        messages.append(_read_assistant_blocks(blocks, reader))
        return
    other_blocks: list[Any] = []  # since the last tool result

    def flush() -> None:
        reader.message_index = len(messages)
        messages.append({"role": message.role, "content": reader.read_text(other_blocks, "\n")})
        other_blocks.clear()

    count_before = len(messages)
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            other_blocks.append(block)
            continue
        if other_blocks:
            flush()
        reader.message_index = len(messages)
        content = reader.read_text(block.get("content"), "\n")
        messages.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": content})
    if other_blocks or len(messages) == count_before:
        flush()


def _read_assistant_blocks(blocks: Sequence[Any], reader: ContentReader) -> Message:
    other_blocks, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(block.get("thinking"))
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            text = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block["name"], "arguments": text}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            other_blocks.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": reader.read_text(other_blocks)}
    if thought := reader.read_text(thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


COUNTER = Counter(
    "/messages/count_tokens", lambda raw: _build_request(parse_body(_CountBody, raw)), lambda n: {"input_tokens": n}
)
DIALECT = Dialect("messages", "/messages", parse, MessageWriter, COUNTER)
