"""OpenAI's Responses API.

``input`` is the whole conversation or continues ``previous_response_id``; an episode keeps all responses, even without
``store``. The policy sees custom tools and the vendor's client-run tools (`items`) as functions; tools that the vendor
runs are hidden and recorded in `Turn.overridden`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from coderepairrl.gateway.body import (
    Array,
    ContentReader,
    Dialect,
    LenientModel,
    ReplyWriter,
    TextKind,
    build_crrl_fields,
    convert_response_format,
    parse_body,
)
from coderepairrl.gateway.call import Call, Completion, FindCall
from coderepairrl.gateway.items import VENDOR_TOOLS, format_shell_result, join_namespace, read_items
from coderepairrl.gateway.request import ApiError, Counter, Message, Request
from coderepairrl.tokens import FunctionCall
from coderepairrl.types import Finish

CLIENT_SETTINGS = (
    "temperature",
    "top_p",
    "top_logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "max_tool_calls",
    "reasoning",
    "truncation",
)
"""Client settings that the run overrides (`Turn.overridden`)."""
DEFAULTS = {"tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled"}
"""Settings with these values count as left out."""
STORED = ("conversation", "prompt", "background")
"""Fields that need unsupported server-side storage."""

_ID_PREFIX = "resp_"


class _Tool(LenientModel):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: Array[_Tool] | None = None


class _Text(LenientModel):
    format: dict[str, Any] | None = None


class _Body(LenientModel):
    model: str
    input: str | Array[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    tools: Array[_Tool] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    store: bool | None = None
    text: _Text | None = None
    previous_response_id: str | None = None


def parse(raw: bytes) -> Request:
    """See `Dialect.parse`."""
    body = parse_body(_Body, raw)
    fields: Mapping[str, Any] = body.model_extra or {}
    for field in STORED:
        if fields.get(field):
            raise ApiError(400, "unsupported_value", "only responses are stored here", param=field)
    tools, names, hosted = _read_response_tools(body.tools or ())
    settings = {name: fields[name] for name in CLIENT_SETTINGS if fields.get(name) not in (None, DEFAULTS.get(name))}
    if body.text and (response_format := body.text.format) and response_format.get("type") != "text":
        settings["response_format"] = convert_response_format(response_format)
    if hosted:
        settings["hosted_tools"] = hosted
    opening: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    request = Request(
        dialect="responses",
        model=body.model,
        messages=(),
        tools=tools,
        max_tokens=body.max_output_tokens,
        stream=bool(body.stream),
        client_settings=settings,
        continued_call=(body.previous_response_id or "").removeprefix(_ID_PREFIX),
        opening=len(opening),
        store=body.store is not False,
        notes={
            "tools": names,
            "echo": {  # every response repeats these fields
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
                "tool_choice": fields.get("tool_choice") or "auto",
                "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
                "previous_response_id": body.previous_response_id,
                "metadata": fields.get("metadata") or {},
                "store": body.store is not False,
            },
        },
    )
    if any(item.get("type") == "item_reference" for item in items):
        # `resolve_references` parses them, as soon as the session is known
        unread = tuple({"role": "user", "content": json.dumps(item)} for item in items)
        return replace(request, messages=(*opening, *unread), unread=True)
    return _read_request_items(request, opening, items)


def resolve_references(request: Request, find: FindCall) -> Request:
    """Look up ``item_reference`` items. Raises `ApiError` (404) for unknown and repeated ones."""
    opening, unread = request.messages[: request.opening], request.messages[request.opening :]
    outputs: dict[str, dict[str, Any]] = {}  # items not referred to yet, by response and id
    items = [_resolve_item(json.loads(item["content"]), find, outputs) for item in unread]
    return _read_request_items(replace(request, unread=False), opening, items)


def _read_request_items(request: Request, opening: Sequence[Message], items: Sequence[Mapping[str, Any]]) -> Request:
    reader = ContentReader(format_shell_result)
    messages = read_items(items, opening, reader)
    return replace(request, messages=tuple(messages), hidden=tuple(reader.hidden))


def find_response(response: str, find: FindCall) -> dict[str, Any]:
    """Look up a response by id. Raises `ApiError` (404)."""
    entry = find(read_call_name(response))
    if entry is None:
        raise ApiError(404, "response_not_found", f"this episode stores no response {response}", param="response_id")
    request, call, completion = entry
    return ResponseWriter(request, call).build_response(completion)


def read_call_name(response: str) -> str:
    """`Call.name` for a response id."""
    return response.removeprefix(_ID_PREFIX)


def _resolve_item(item: Mapping[str, Any], find: FindCall, outputs: dict[str, dict[str, Any]]) -> Mapping[str, Any]:
    if item.get("type") != "item_reference":
        return item
    item_id = str(item.get("id"))
    response = item_id.partition("_")[2].rpartition("-")[0]  # see `ResponseWriter._start`
    if response not in outputs and (earlier := find(response)):
        request, call, completion = earlier
        output = ResponseWriter(request, call).build_response(completion)["output"]
        outputs[response] = {each["id"]: each for each in output}
    try:
        # each item only once: a small request that repeats a long item 30,000 times would take minutes to write
        return dict(outputs[response].pop(item_id))
    except KeyError:
        message = f"this episode stores no item {item_id}, or input refers to it twice"
        raise ApiError(404, "item_not_found", message, param="input") from None


class ResponseWriter(ReplyWriter):
    """Writes a response's events, one output item at a time."""

    def __init__(self, request: Request, call: Call) -> None:
        super().__init__(request, call)
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}
        self._number = 0

    def keep_alive(self) -> bytes:
        """Repeat ``response.in_progress``: some clients count events, not bytes."""
        if self._begun:
            self._event("in_progress", response=self._build_body("in_progress"))
        self._begin_once()
        return self._flush()

    def fail(self, failure: ApiError) -> bytes:
        """Write ``response.failed``."""
        self._begin_once()
        reason = {"code": "server_error" if failure.status >= 500 else failure.code, "message": failure.message}
        self._event("failed", response=self._build_body("failed", error=reason))
        return self._flush()

    def _begin(self) -> None:
        self._event("created", response=self._build_body("in_progress"))
        self._event("in_progress", response=self._build_body("in_progress"))

    def _finish(self, completion: Completion) -> dict[str, Any]:
        if not self._items and not self._open:
            self._write_text("message", "")
        status = "incomplete" if completion.turn.finish is Finish.LENGTH else "completed"
        self._close(status)
        usage = completion.usage
        reported_usage = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.sampled,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.sampled,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        crrl = build_crrl_fields(completion)
        response = self._build_body(status, usage=reported_usage, crrl=crrl, incomplete_details=details)
        self._event(status, response=response)
        return response

    def _write_text(self, kind: TextKind, text: str) -> None:
        if self._open.get("type") != kind:
            self._close()
            prefix, fields, empty = _TEXT_ITEMS[kind]
            self._start(prefix, {"type": kind, "status": "in_progress", **fields, "content": []})
            self._item_event("content_part.added", content_index=0, part={**empty})
            self._open["content"] = [{**empty}]
        self._open["content"][0]["text"] += text
        if text:
            self._text_event("delta", delta=text)

    def _write_call(self, function: FunctionCall) -> None:
        self._close()
        names: Mapping[str, tuple[str, str, str]] = self._request.notes["tools"]
        namespace, tool, kind = names.get(function.name, ("", function.name, "function"))
        item: dict[str, Any] = {
            "status": "in_progress",
            "call_id": self._call.tool_call_id(self._tool_calls_written, function),
        }
        if kind in VENDOR_TOOLS and (vendor_field := VENDOR_TOOLS[kind].build_field(function.arguments)):
            self._start("vc", {"type": f"{kind}_call", **item, **vendor_field})
        else:
            item |= {"name": tool, **({"namespace": namespace} if namespace else {})}
            if kind == "custom":
                prefix, type, key, text = "ctc", "custom_tool_call", "input", _read_free_text(function.arguments)
            else:
                prefix, type, key, text = "fc", "function_call", "arguments", function.arguments
            self._start(prefix, {"type": type, **item, key: ""})
            self._item_event(f"{type}_{key}.delta", delta=text)
            self._item_event(f"{type}_{key}.done", **{key: text}, **({} if kind == "custom" else {"name": tool}))
            self._open[key] = text
        self._close()

    def _start(self, prefix: str, item: dict[str, Any]) -> None:
        self._open = {"id": f"{prefix}_{self._call.name}-{len(self._items)}", **item}
        self._event("output_item.added", output_index=len(self._items), item={**self._open})

    def _close(self, status: str = "completed") -> None:
        if not self._open:
            return
        for part in self._open.get("content", ()):
            self._text_event("done", text=part["text"])
            self._item_event("content_part.done", content_index=0, part=part)
        self._open["status"] = status
        self._event("output_item.done", output_index=len(self._items), item=self._open)
        self._items.append(self._open)
        self._open = {}

    def _build_body(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": f"{_ID_PREFIX}{self._call.name}",
            "object": "response",
            "created_at": self._call.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._request.model,
            "output": list(self._items),
            "text": {"format": {"type": "text"}},
            "temperature": None,
            "top_p": None,
            "usage": None,
            **self._request.notes["echo"],
            **more,
        }

    def _text_event(self, change: str, **fields: Any) -> None:
        part = self._open["content"][0]
        more: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        self._item_event(f"{part['type']}.{change}", content_index=0, **fields, **more)

    def _item_event(self, kind: str, **fields: Any) -> None:
        self._event(kind, item_id=self._open["id"], output_index=len(self._items), **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": f"response.{kind}", "sequence_number": self._number, **fields})
        self._number += 1


_TEXT_ITEMS: dict[TextKind, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
    "message": ("msg", {"role": "assistant"}, {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
}
"""Id prefix, fields, and empty content part of an item, by kind of text."""


def _read_response_tools(
    tools: Sequence[_Tool],
) -> tuple[tuple[Mapping[str, Any], ...], dict[str, tuple[str, str, str]], list[str]]:
    """Return visible tools, (namespace, name, type) by function name, and types left out."""
    visible: list[Mapping[str, Any]] = []
    names_by_function: dict[str, tuple[str, str, str]] = {}
    hosted: list[str] = []
    for namespace, tool in _flatten_namespaces(tools):
        if (vendor := VENDOR_TOOLS.get(tool.type)) is not None:
            visible.append({"type": "function", "function": vendor.function})
            names_by_function[vendor.name] = ("", vendor.name, tool.type)
        elif tool.type not in ("function", "custom"):
            hosted.append(tool.type)
        elif not tool.name:
            raise ApiError(400, "invalid_value", "a tool needs a name", param="tools")
        else:
            parameters = _FREE_TEXT if tool.type == "custom" else tool.parameters
            name = join_namespace(namespace, tool.name)
            fields = {"name": name, "description": tool.description, "parameters": parameters}
            function = {key: value for key, value in fields.items() if value is not None}
            visible.append({"type": "function", "function": function})
            names_by_function[name] = (namespace, tool.name, tool.type)
    return tuple(visible), names_by_function, hosted


def _flatten_namespaces(tools: Sequence[_Tool], namespace: str = "") -> Iterator[tuple[str, _Tool]]:
    for tool in tools:
        if tool.type == "namespace":
            yield from _flatten_namespaces(tool.tools or (), tool.name)
        else:
            yield namespace, tool


# A custom tool takes free text; the policy sees a function with one argument.
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _read_free_text(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments


COUNTER = Counter("/responses/input_tokens", parse, lambda n: {"object": "response.input_tokens", "input_tokens": n})
DIALECT = Dialect("responses", "/responses", parse, ResponseWriter, COUNTER)
