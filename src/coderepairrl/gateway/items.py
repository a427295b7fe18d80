"""The ``input`` items of the Responses dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coderepairrl.gateway.parts import ContentReader
from coderepairrl.gateway.request import ApiError, Message
from coderepairrl.gateway.vendor_tools import VENDOR_TOOLS


def read_items(items: Sequence[Mapping[str, Any]], opening: Sequence[Message], parts: ContentReader) -> list[Message]:
    """Append items to `opening`; one reply's consecutive items form one message.

    Raises `ApiError` for an unknown role.
    """
    messages: list[dict[str, Any]] = [dict(message) for message in opening]
    last = ""
    for number, item in enumerate(items):
        kind = _kind(item)
        if kind in ("text", "thoughts", "call"):
            if not last or kind == "thoughts" or kind == last == "text":
                messages.append({"role": "assistant", "content": ""})
            parts.at = len(messages) - 1
            _add_to_reply(messages[-1], item, kind, parts)
            last = kind
        else:
            parts.at = len(messages)
            messages.append(_input_message(item, kind, number, parts))
            last = ""
    return list(messages)


def _kind(item: Mapping[str, Any]) -> str:
    kind = item.get("type") or "message"
    if kind == "message":
        return "text" if item.get("role") == "assistant" else "message"
    if kind == "reasoning":
        return "thoughts"
    if _call(item):
        return "call"
    if not isinstance(kind, str):
        return "else"
    if kind.endswith("_output"):
        return "result"
    return "text" if kind.endswith("_call") else "else"


def _call(item: Mapping[str, Any]) -> dict[str, Any] | None:
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


def _input_message(item: Mapping[str, Any], kind: str, number: int, parts: ContentReader) -> dict[str, Any]:
    if kind == "result":
        output = item.get("output")
        content = parts.text(output, "\n") if output is not None else parts.placeholder(item)
        return {"role": "tool", "tool_call_id": str(item.get("call_id") or item.get("id") or ""), "content": content}
    if kind == "else":
        return {"role": "system" if item.get("role") == "developer" else "user", "content": parts.placeholder(item)}
    role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
    if role not in ("system", "user"):
        where = f"input.{number}.role"
        raise ApiError(400, "invalid_value", f"{where} must be system, developer, user or assistant", param=where)
    return {"role": role, "content": parts.text(item.get("content"), "\n")}


def _add_to_reply(message: dict[str, Any], item: Mapping[str, Any], kind: str, parts: ContentReader) -> None:
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
    """Function name of a namespaced tool.

    >>> full_name("files", "read"), full_name("", "read")
    ('files__read', 'read')
    """
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{tool}" if namespace else tool
