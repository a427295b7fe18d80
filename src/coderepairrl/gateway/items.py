"""The ``input`` items of the Responses dialect, and its client-run tools with special item types.

The policy sees such a tool as a function, and its calls become items of the tool's type; a call with invalid arguments
stays a ``function_call``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coderepairrl.gateway.body import ContentReader
from coderepairrl.gateway.request import ApiError, Message

_STRINGS = {"type": "array", "items": {"type": "string"}}
_OPERATIONS = ("create_file", "update_file", "delete_file")


def _as_string_list(value: object) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return list(value)
    return None


# Each `_fit_...` checks a call's arguments and completes them for the item; None if they are invalid.


def _fit_local_shell(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    command, env = _as_string_list(arguments.get("command")), arguments.get("env")
    if command is None:
        return None
    command = ["bash", "-lc", *command] if isinstance(arguments["command"], str) else command
    return {"type": "exec", **arguments, "command": command, "env": env if isinstance(env, dict) else {}}


def _fit_shell(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    commands = _as_string_list(arguments.get("commands"))
    return {"timeout_ms": None, "max_output_length": None, **arguments, "commands": commands} if commands else None


def _fit_apply_patch(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    required = ("path",) if arguments.get("type") == "delete_file" else ("path", "diff")
    is_valid = arguments.get("type") in _OPERATIONS and all(isinstance(arguments.get(key), str) for key in required)
    return dict(arguments) if is_valid else None


@dataclass(frozen=True, slots=True)
class VendorTool:
    """Translates between the policy's function calls and a tool's items."""

    name: str
    field: str
    """Item field that holds the arguments."""
    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    fit: Callable[[Mapping[str, Any]], dict[str, Any] | None]

    @property
    def function(self) -> dict[str, Any]:
        """Definition that the policy sees."""
        parameters = {"type": "object", "properties": dict(self.properties), "required": list(self.required)}
        return {"name": self.name, "description": self.description, "parameters": parameters}

    def build_field(self, arguments: str) -> dict[str, Any] | None:
        """Build the tool-specific field of an item; None for invalid arguments."""
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        fitted = self.fit(value) if isinstance(value, dict) else None
        return fitted and {self.field: fitted}

    def read_arguments(self, item: Mapping[str, Any]) -> str:
        """Read a returned item's arguments as JSON."""
        action = item.get(self.field)
        fields = action.items() if isinstance(action, dict) else ()
        return json.dumps({key: value for key, value in fields if key in self.properties and value}, ensure_ascii=False)


VENDOR_TOOLS = {
    tool.name: tool
    for tool in (
        VendorTool(
            "local_shell",
            "action",
            "Runs a command in the shell of this machine.",
            {
                "command": {**_STRINGS, "description": "The program and its arguments."},
                "working_directory": {"type": "string"},
                "timeout_ms": {"type": "integer"},
                "env": {"type": "object"},
            },
            ("command",),
            _fit_local_shell,
        ),
        VendorTool(
            "shell",
            "action",
            "Runs commands in the shell of this machine, one after the other.",
            {"commands": _STRINGS, "timeout_ms": {"type": "integer"}, "max_output_length": {"type": "integer"}},
            ("commands",),
            _fit_shell,
        ),
        VendorTool(
            "apply_patch",
            "operation",
            "Creates, changes or deletes a file.",
            {
                "type": {"type": "string", "enum": list(_OPERATIONS)},
                "path": {"type": "string"},
                "diff": {
                    "type": "string",
                    "description": "Lines that begin with @@, a blank, - or +; those of a new file all begin with +.",
                },
            },
            ("type", "path"),
            _fit_apply_patch,
        ),
    )
}
"""Tools by type, which is also the function name; items are ``TYPE_call`` and ``TYPE_call_output``."""


def format_shell_result(part: Mapping[str, Any]) -> str | None:
    """Format a ``shell`` result part (stdout, stderr, exit code); None for others."""
    if "type" in part or not isinstance(part.get("stdout"), str) or not isinstance(part.get("stderr"), str):
        return None
    outcome = part.get("outcome")
    ended = outcome if isinstance(outcome, dict) else {}
    status = "timed out" if ended.get("type") == "timeout" else f"exit code {ended.get('exit_code')}"
    return "\n".join(text for text in (part["stdout"].rstrip("\n"), part["stderr"].rstrip("\n"), f"[{status}]") if text)


def read_items(items: Sequence[Mapping[str, Any]], opening: Sequence[Message], reader: ContentReader) -> list[Message]:
    """Append items to `opening`; one reply's consecutive items form one message.

    Raises `ApiError` for an unknown role.
    """
    messages: list[dict[str, Any]] = [dict(message) for message in opening]
    last = ""  # `part` of the previous item
    for number, item in enumerate(items):
        kind, call = str(item.get("type") or "message"), _read_call(item)
        part = ""  # kind of the item as part of a reply; empty if it is none
        if kind == "reasoning":
            part = "thoughts"
        elif call is not None:
            part = "call"
        elif kind.endswith("_call") or (kind == "message" and item.get("role") == "assistant"):
            part = "text"
        begins_reply = not last or part == "thoughts" or part == last == "text"
        if part and begins_reply:
            messages.append({"role": "assistant", "content": ""})
        reader.message_index = len(messages) - 1 if part else len(messages)
        if not part:
            messages.append(_read_input_message(item, kind, number, reader))
        elif call is not None:
            messages[-1].setdefault("tool_calls", []).append(call)
        elif part == "thoughts":
            if thoughts := reader.read_text(item.get("content")):
                messages[-1]["reasoning_content"] = thoughts
        elif kind == "message":
            messages[-1]["content"] += reader.read_text(item.get("content"))
        else:
            messages[-1]["content"] += reader.add_placeholder(item)
        last = part
    return list(messages)


def _read_call(item: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, tool, arguments = item.get("type"), item.get("name"), item.get("arguments")
    vendor = VENDOR_TOOLS.get(str(kind).removesuffix("_call"))
    if vendor is not None and str(kind).endswith("_call"):
        tool, arguments = vendor.name, vendor.read_arguments(item)
    elif kind == "custom_tool_call" and isinstance(item.get("input"), str):
        arguments = json.dumps({"input": item["input"]})
    elif kind != "function_call":
        return None
    if not isinstance(tool, str) or not isinstance(arguments, str):
        return None
    namespace = item.get("namespace")
    function = {"name": join_namespace(namespace if isinstance(namespace, str) else "", tool), "arguments": arguments}
    return {"id": str(item.get("call_id", "")), "type": "function", "function": function}


def _read_input_message(item: Mapping[str, Any], kind: str, number: int, reader: ContentReader) -> dict[str, Any]:
    if kind.endswith("_output"):
        output = item.get("output")
        content = reader.read_text(output, "\n") if output is not None else reader.add_placeholder(item)
        return {"role": "tool", "tool_call_id": str(item.get("call_id") or item.get("id") or ""), "content": content}
    if kind != "message":
        is_developer = item.get("role") == "developer"
        return {"role": "system" if is_developer else "user", "content": reader.add_placeholder(item)}
    role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
    if role not in ("system", "user"):
        where = f"input.{number}.role"
        raise ApiError(400, "invalid_value", f"{where} must be system, developer, user or assistant", param=where)
    return {"role": role, "content": reader.read_text(item.get("content"), "\n")}


def join_namespace(namespace: str, tool: str) -> str:
    """Function name of a namespaced tool.

    >>> join_namespace("files", "read"), join_namespace("", "read")
    ('files__read', 'read')
    """
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{tool}" if namespace else tool
