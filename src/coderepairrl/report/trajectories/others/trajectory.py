"""Result of this package's readers: a conversation in the Chat Completions schema, and its task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_INSTANCE = re.compile(r"([^/\s]+)__([^/\s]+)-\d+")  # OWNER__NAME-NUMBER
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Attempt of an external agent.

    >>> Trajectory("django__django-10914", ()).repository
    'django/django'
    """

    task: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    id: str = ""
    """Distinguishes attempts at a task."""
    agent: str = ""
    model: str = ""
    stated_repository: str = ""
    commit: str = ""
    issue: str = ""
    resolved: bool | None = None
    reward: float | None = None
    patch: str = ""

    @property
    def repository(self) -> str:
        """Stated repository, else from a SWE-bench id ``OWNER__NAME-NUMBER``."""
        match = _INSTANCE.fullmatch(self.task)
        return self.stated_repository or (f"{match[1]}/{match[2]}" if match else "")


def normalise_messages(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """Convert messages to Chat Completions, up to the last reply. Raises ValueError."""
    if not isinstance(raw, list | tuple):
        raise ValueError("messages are not a list")
    messages: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number, each in enumerate(raw):
        if not isinstance(each, Mapping) or each.get("role") not in _ROLES:
            raise ValueError(f"message {number} has no role of a conversation")
        message: dict[str, Any] = {"role": each["role"], "content": join_message_text(each.get("content"))}
        if each["role"] == "assistant":
            if thoughts := each.get("reasoning_content") or each.get("reasoning"):
                message["reasoning_content"] = join_message_text(thoughts)
            if calls := [
                _normalise_call(call, f"call_{number}_{at}") for at, call in enumerate(each.get("tool_calls") or ())
            ]:
                message["tool_calls"] = calls
                open_calls = [call["id"] for call in calls]
        elif each["role"] == "tool":
            message["tool_call_id"] = _match_open_call(each, open_calls)
        messages.append(message)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise ValueError("it has no reply")
    return tuple(messages)


def join_message_text(content: Any) -> str:
    """Text of a message, perhaps in parts. Raises ValueError."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple):
        parts = []
        for part in content:
            written = part if isinstance(part, str) else mapping_or_empty(part).get("text")
            if not isinstance(written, str):
                raise ValueError("a part of a message is not text")
            parts.append(written)
        return "".join(parts)
    raise ValueError("a message's content is not text")


def parse_tool_schemas(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """Tool schemas, from data or JSON text. Raises ValueError."""
    tools = _parse_json_text(raw) or ()
    plain = []
    for each in tools if isinstance(tools, list | tuple) else [None]:
        schema = _drop_none(_parse_json_text(each))
        if not isinstance(schema, dict) or not isinstance(schema.get("function"), dict):
            raise ValueError("tools are not schemas of functions")
        plain.append(schema)
    return tuple(plain)


def parse_verdict(value: Any) -> bool | None:
    """Verdict from true, false, 0 or 1; else None."""
    return bool(value) if isinstance(value, bool) or value in (0, 1) else None


def _normalise_call(raw: Any, default_id: str) -> dict[str, Any]:
    function = mapping_or_empty(mapping_or_empty(raw).get("function"))
    if not isinstance(function.get("name"), str):
        raise ValueError("a tool call names no function")
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(_drop_none(arguments) or {})
    named_call = {"name": function["name"], "arguments": written or "{}"}
    return {"id": str(raw.get("id") or default_id), "type": "function", "function": named_call}


def _match_open_call(message: Mapping[str, Any], open_calls: list[str]) -> str:
    # the id that the message states, else that of the first unanswered call
    stated = message.get("tool_call_id") or next(iter(message.get("tool_call_ids") or ()), None)
    call_id = str(stated or next(iter(open_calls), ""))
    if not call_id:
        raise ValueError("a tool answers without a call")
    if call_id in open_calls:
        open_calls.remove(call_id)
    return call_id


def mapping_or_empty(value: Any) -> Mapping[str, Any]:
    """Return `value`, or an empty mapping if it is not a mapping."""
    return value if isinstance(value, Mapping) else {}


def _parse_json_text(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value else value


def _drop_none(value: Any) -> Any:
    # tables with typed columns turn absent keys into None
    if isinstance(value, Mapping):
        return {key: _drop_none(each) for key, each in value.items() if each is not None}
    return [_drop_none(each) for each in value] if isinstance(value, list | tuple) else value


def find_issue(messages: Iterable[Mapping[str, Any]]) -> str:
    """Find the first request, which contains the issue."""
    return next((str(each["content"]) for each in messages if each["role"] == "user"), "")
