"""The dialect of OpenAI's Responses, plain and streaming.

A request brings its whole conversation as ``input``, or names the response after which it comes
(``previous_response_id``): an episode remembers its responses whether or not a client asks to ``store`` them. Custom
tools, whose input is free text, are shown to the policy as functions of one string. Tools that the vendor would run
(web search, ...) are not shown, and `Turn.overridden` says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from coderepairrl.gateway.body import Lenient, extras, named, read, unsupported
from coderepairrl.gateway.call import Call, Outcome
from coderepairrl.gateway.request import ApiError, Counter, Message, Request
from coderepairrl.tokens import Delta, FunctionCall
from coderepairrl.types import Finish

name = "responses"
path = "/responses"

WISHES = (
    "temperature",
    "top_p",
    "top_logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "max_tool_calls",
    "reasoning",
    "truncation",
)
"""What a client may ask for and the run decides; recorded in `Turn.overridden` where the two differ."""
DEFAULTS = {"tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled"}
"""Wishes that say nothing."""
STORED = ("conversation", "prompt", "background")
"""Fields that need a server with a memory of its own."""

_ID = "resp_"


class _Part(Lenient):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str = ""
    refusal: str = ""


class _Message(Lenient):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]


class _Reasoning(Lenient):
    type: Literal["reasoning"]
    content: list[_Part] | None = None


class _FunctionCall(Lenient):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class _CustomCall(Lenient):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class _CallOutput(Lenient):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[_Part]


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return "output" if kind in ("function_call_output", "custom_tool_call_output") else str(kind)


TAGS = ("message", "reasoning", "function_call", "custom_tool_call", "output")
_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Reasoning, Tag("reasoning")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_CustomCall, Tag("custom_tool_call")]
    | Annotated[_CallOutput, Tag("output")],
    Discriminator(_kind),
]


class _Tool(Lenient):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[_Tool] | None = None


class _Format(Lenient):
    type: str = "text"


class _Text(Lenient):
    format: _Format | None = None


class _Body(Lenient):
    model: str
    input: str | list[_Item] = Field(min_length=1)
    instructions: str | None = None
    tools: list[_Tool] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    text: _Text | None = None
    previous_response_id: str | None = Field(None, pattern=f"^{_ID}.")


def parse(raw: bytes) -> Request:
    """The request in a body. Raises `ApiError` (400) that names the field."""
    body = read(_Body, raw, TAGS)
    fields: Mapping[str, Any] = body.model_extra or {}
    for field in STORED:
        if fields.get(field):
            raise unsupported(field, "nothing but responses is stored here")
    if body.text and body.text.format and body.text.format.type != "text":
        raise unsupported("text.format", "replies are not constrained to a format")
    tools, known, hosted = _tools(body.tools or ())
    wishes = {wish: fields[wish] for wish in WISHES if fields.get(wish) not in (None, DEFAULTS.get(wish))}
    if hosted:
        wishes["hosted_tools"] = hosted
    opening: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [_Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    return Request(
        dialect=name,
        model=body.model,
        messages=(*opening, *_messages(items)),
        tools=tools,
        max_tokens=body.max_output_tokens,
        stream=bool(body.stream),
        wishes=wishes,
        after=(body.previous_response_id or "").removeprefix(_ID),
        opening=len(opening),
        notes={
            "tools": known,
            "echo": {
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
                "tool_choice": fields.get("tool_choice") or "auto",
                "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
                "previous_response_id": body.previous_response_id,
                "metadata": fields.get("metadata") or {},
            },
        },
    )


counter = Counter("/responses/input_tokens", parse, lambda n: {"object": "response.input_tokens", "input_tokens": n})


def reply(request: Request, call: Call, outcome: Outcome) -> dict[str, Any]:
    """The response to a plain request."""
    return Response(request, call).whole(outcome)


def tell(request: Request, call: Call) -> Response:
    """The response to a streaming request."""
    return Response(request, call)


def error(failure: ApiError) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    body = {"message": failure.message, "type": failure.kind, "code": failure.code, "param": failure.param}
    return {"error": body, **({"crrl": {"limit": failure.limit}} if failure.limit else {})}


class Response:
    """A response as it grows (`body.Telling`). One item is open at a time."""

    def __init__(self, request: Request, call: Call) -> None:
        self._request = request
        self._call = call
        self._known: Mapping[str, tuple[str, str, bool]] = request.notes["tools"]
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}
        """The item that is being said, if one is."""
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._calls = 0

    def add(self, delta: Delta) -> bytes:
        """Of items and what is in them."""
        self._add(delta)
        return self._told()

    def alive(self) -> bytes:
        """``response.in_progress``, again: some clients count events, not bytes."""
        if self._number:
            self._event("response.in_progress", response=self._state("in_progress"))
        self._begin()
        return self._told()

    def end(self, outcome: Outcome) -> bytes:
        """The end of the open item, and the terminal ``response.completed`` or ``response.incomplete``."""
        self._end(outcome)
        return self._told()

    def fail(self, failure: ApiError) -> bytes:
        """``response.failed``."""
        self._begin()
        code = "server_error" if failure.status >= 500 else failure.code
        failed = {"error": {"code": code, "message": failure.message}}
        self._event("response.failed", response=self._state("failed", **failed))
        return self._told()

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """The response all at once."""
        for delta in self._call.deltas:
            self._add(delta)
        self._end(outcome)
        found: dict[str, Any] = self._events[-1]["response"]
        return found

    def _add(self, delta: Delta) -> None:
        self._begin()
        if delta.reasoning:
            self._text("reasoning", delta.reasoning)
        if delta.content:
            self._text("message", delta.content)
        if delta.call:
            self._function(delta.call)

    def _end(self, outcome: Outcome) -> None:
        self._begin()
        if not self._items and not self._open:
            self._text("message", "")
        status = "incomplete" if outcome.turn.finish is Finish.LENGTH else "completed"
        self._close(status)
        self._event(f"response.{status}", response=self._ended(status, outcome))

    def _begin(self) -> None:
        if not self._number:
            self._event("response.created", response=self._state("in_progress"))
            self._event("response.in_progress", response=self._state("in_progress"))

    def _text(self, kind: str, text: str) -> None:
        """More of a message or of thoughts."""
        part = _PARTS[kind]
        if self._open.get("type") != kind:
            self._close()
            if kind == "reasoning":
                self._start("rs", {"type": kind, "status": "in_progress", "summary": [], "content": []})
            else:
                self._start("msg", {"type": kind, "status": "in_progress", "role": "assistant", "content": []})
            self._event("response.content_part.added", **self._at, content_index=0, part={**part})
            self._open["content"] = [{**part}]
        self._open["content"][0]["text"] += text
        if text:
            self._event(f"response.{part['type']}.delta", **self._at, content_index=0, delta=text, **_logprobs(part))

    def _function(self, function: FunctionCall) -> None:
        """A whole tool call."""
        self._close()
        namespace, tool, custom = self._known.get(function.name, ("", function.name, False))
        kind, key = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
        identity = {"call_id": self._call.tool_call_id(self._calls, function), "name": tool}
        if namespace:
            identity["namespace"] = namespace
        self._calls += 1
        text = _free_text(function.arguments) if custom else function.arguments
        self._start("ctc" if custom else "fc", {"type": kind, "status": "in_progress", **identity, key: ""})
        event = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        self._event(f"{event}.delta", **self._at, delta=text)
        self._event(f"{event}.done", **self._at, **{key: text}, **({} if custom else {"name": tool}))
        self._open[key] = text
        self._close()

    def _start(self, prefix: str, item: dict[str, Any]) -> None:
        self._open = {"id": f"{prefix}_{self._call.name}-{len(self._items)}", **item}
        self._event("response.output_item.added", output_index=len(self._items), item={**self._open})

    def _close(self, status: str = "completed") -> None:
        """End the open item, if there is one."""
        if not self._open:
            return
        for part in self._open.get("content", ()):
            text = part["text"]
            self._event(f"response.{part['type']}.done", **self._at, content_index=0, text=text, **_logprobs(part))
            self._event("response.content_part.done", **self._at, content_index=0, part=part)
        self._open["status"] = status
        self._event("response.output_item.done", output_index=len(self._items), item=self._open)
        self._items.append(self._open)
        self._open = {}

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self._open["id"], "output_index": len(self._items)}

    def _ended(self, status: str, outcome: Outcome) -> dict[str, Any]:
        usage = outcome.usage
        spent = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.sampled,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.sampled,
        }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._state(status, usage=spent, crrl=extras(outcome), incomplete_details=why)

    def _state(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": f"{_ID}{self._call.name}",
            "object": "response",
            "created_at": self._call.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._request.model,
            "output": list(self._items),
            "store": True,
            "text": {"format": {"type": "text"}},
            "temperature": None,
            "top_p": None,
            "usage": None,
            **self._request.notes["echo"],
            **more,
        }

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def _told(self) -> bytes:
        events, self._events = self._events, []
        return named(events)


_PARTS: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "reasoning_text", "text": ""},
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}
"""The only part of an item, before it says anything."""


def _logprobs(part: Mapping[str, Any]) -> dict[str, Any]:
    """The events of words have them, those of thoughts do not."""
    return {"logprobs": []} if part["type"] == "output_text" else {}


def _tools(
    tools: Sequence[_Tool], namespace: str = ""
) -> tuple[tuple[Mapping[str, Any], ...], dict[str, tuple[str, str, bool]], list[str]]:
    """Tools as the policy is shown them; what its names mean (namespace, name, custom); and kinds that are left out."""
    shown: list[Mapping[str, Any]] = []
    known: dict[str, tuple[str, str, bool]] = {}
    hosted: list[str] = []
    for tool in tools:
        if tool.type == "namespace":
            more, names, others = _tools(tool.tools or (), tool.name)
            shown, known, hosted = [*shown, *more], known | names, [*hosted, *others]
        elif tool.type not in ("function", "custom"):
            hosted.append(tool.type)
        elif not tool.name:
            raise ApiError(400, "invalid_value", "a tool has a name", param="tools")
        else:
            custom = tool.type == "custom"
            function: dict[str, Any] = {"name": _full(namespace, tool.name)}
            if tool.description is not None:
                function["description"] = tool.description
            parameters = _FREE_TEXT if custom else tool.parameters
            if parameters is not None:
                function["parameters"] = parameters
            shown.append({"type": "function", "function": function})
            known[function["name"]] = (namespace, tool.name, custom)
    return tuple(shown), known, hosted


_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _full(namespace: str | None, tool: str) -> str:
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{tool}" if namespace else tool


def _free_text(arguments: str) -> str:
    """The input of a custom tool in a call as `_FREE_TEXT` has it; all of the arguments of any other."""
    try:
        said = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return said["input"] if isinstance(said, dict) and isinstance(said.get("input"), str) else arguments


def _messages(items: Sequence[Any]) -> list[Message]:
    """Items as messages: what one reply said (thoughts, words, calls) is one message."""
    messages: list[dict[str, Any]] = []
    last = ""
    for item in items:
        said = isinstance(item, _Reasoning | _FunctionCall | _CustomCall) or getattr(item, "role", "") == "assistant"
        if not said:
            messages.append(_heard(item))
        elif not last or item.type == "reasoning" or item.type == last == "message":
            messages.append({"role": "assistant", "content": ""})
        if said:
            _say(messages[-1], item)
        last = item.type if said else ""
    return list(messages)


def _heard(item: _Message | _CallOutput) -> dict[str, Any]:
    """What others say to the policy."""
    if isinstance(item, _CallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _words(item.output, "\n")}
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _words(item.content, "\n")}


def _say(message: dict[str, Any], item: _Message | _Reasoning | _FunctionCall | _CustomCall) -> None:
    """Add an item to the assistant's message."""
    if isinstance(item, _Message):
        message["content"] += _words(item.content, "")
    elif isinstance(item, _Reasoning):
        if thoughts := _words(item.content or [], ""):
            message["reasoning_content"] = thoughts
    else:
        text = item.arguments if isinstance(item, _FunctionCall) else json.dumps({"input": item.input})
        function = {"name": _full(item.namespace, item.name), "arguments": text}
        calls = message.setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})


def _words(content: str | Sequence[_Part], between: str) -> str:
    return content if isinstance(content, str) else between.join(part.text or part.refusal for part in content)
