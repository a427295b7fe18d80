"""What a client of the Responses dialect sends as its ``input``: items, of which several may make one message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coderepairrl.gateway.parts import Parts
from coderepairrl.gateway.request import ApiError, Message
from coderepairrl.gateway.vendor_tools import VENDOR_TOOLS


def read_items(items: Sequence[Mapping[str, Any]], opening: Sequence[Message], parts: Parts) -> list[Message]:
    """Items as messages after `opening`: what one reply said (thoughts, words, calls) is one message.

    Raises `ApiError` for an unknown role.
    """
    messages: list[dict[str, Any]] = [dict(message) for message in opening]
    last = ""
    for number, item in enumerate(items):
        kind = _kind(item)
        if kind in ("words", "thoughts", "call"):
            if not last or kind == "thoughts" or kind == last == "words":
                messages.append({"role": "assistant", "content": ""})
            parts.at = len(messages) - 1
            _say(messages[-1], item, kind, parts)
            last = kind
        else:
            parts.at = len(messages)
            messages.append(_heard(item, kind, number, parts))
            last = ""
    return list(messages)


def _kind(item: Mapping[str, Any]) -> str:
    """``words``, ``thoughts`` or ``call`` of the assistant's, a ``result``, a ``message`` of others, or else."""
    kind = item.get("type") or "message"
    if kind == "message":
        return "words" if item.get("role") == "assistant" else "message"
    if kind == "reasoning":
        return "thoughts"
    if _call(item):
        return "call"
    if not isinstance(kind, str):
        return "else"
    if kind.endswith("_output"):
        return "result"
    return "words" if kind.endswith("_call") else "else"


def _call(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """The call that an item is, if it is one that the policy could make."""
    kind, tool, arguments = item.get("type"), item.get("name"), item.get("arguments")
    vendor = VENDOR_TOOLS.get(str(kind).removesuffix("_call"))
    if vendor is not None and str(kind).endswith("_call"):
        tool, arguments = vendor.name, vendor.arguments(item)
    elif kind == "custom_tool_call" and isinstance(item.get("input"), str):
        arguments = json.dumps({"input": item["input"]})
    elif kind != "function_call":
        return None
    if not isinstance(tool, str) or not isinstance(arguments, str):
        return None
    namespace = item.get("namespace")
    function = {"name": full_name(namespace if isinstance(namespace, str) else "", tool), "arguments": arguments}
    return {"id": str(item.get("call_id", "")), "type": "function", "function": function}


def _heard(item: Mapping[str, Any], kind: str, number: int, parts: Parts) -> dict[str, Any]:
    """What others say to the policy. Raises `ApiError` for an unknown role."""
    if kind == "result":
        said = item.get("output")
        content = parts.text(said, "\n") if said is not None else parts.placeholder(item)
        return {"role": "tool", "tool_call_id": str(item.get("call_id") or item.get("id") or ""), "content": content}
    if kind == "else":
        return {"role": "system" if item.get("role") == "developer" else "user", "content": parts.placeholder(item)}
    role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
    if role not in ("system", "user"):
        where = f"input.{number}.role"
        raise ApiError(400, "invalid_value", f"{where} must be system, developer, user or assistant", param=where)
    return {"role": role, "content": parts.text(item.get("content"), "\n")}


def _say(message: dict[str, Any], item: Mapping[str, Any], kind: str, parts: Parts) -> None:
    """Add an item to the assistant's message."""
    if kind == "call":
        message.setdefault("tool_calls", []).append(_call(item))
    elif kind == "thoughts":
        if thoughts := parts.text(item.get("content")):
            message["reasoning_content"] = thoughts
    elif item.get("type", "message") == "message":
        message["content"] += parts.text(item.get("content"))
    else:
        message["content"] += parts.placeholder(item)


def full_name(namespace: str, tool: str) -> str:
    """The name by which the policy knows a tool of a namespace.

    >>> full_name("files", "read"), full_name("", "read")
    ('files__read', 'read')
    """
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{tool}" if namespace else tool
