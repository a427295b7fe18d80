"""Client-run tools of the Responses dialect with special item types.

Clients give only the type, so the policy sees a function, whose calls become items. Invalid arguments stay a
``function_call``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_STRINGS = {"type": "array", "items": {"type": "string"}}
_OPERATIONS = ("create_file", "update_file", "delete_file")


def _strings(value: object) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    only_strings = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return list(value) if isinstance(value, list) and only_strings else None


def _local_shell(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    command, env = _strings(arguments.get("command")), arguments.get("env")
    if command is None:
        return None
    command = ["bash", "-lc", *command] if isinstance(arguments["command"], str) else command
    return {"type": "exec", **arguments, "command": command, "env": env if isinstance(env, dict) else {}}


def _shell(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    commands = _strings(arguments.get("commands"))
    return {"timeout_ms": None, "max_output_length": None, **arguments, "commands": commands} if commands else None


def _apply_patch(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    texts = ("path",) if arguments.get("type") == "delete_file" else ("path", "diff")
    fits = arguments.get("type") in _OPERATIONS and all(isinstance(arguments.get(key), str) for key in texts)
    return dict(arguments) if fits else None


@dataclass(frozen=True, slots=True)
class VendorTool:
    """Translates between function arguments and a tool's items."""

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

    def item(self, arguments: str) -> dict[str, Any] | None:
        """Tool-specific field of an item; None for invalid arguments."""
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        fitted = self.fit(value) if isinstance(value, dict) else None
        return fitted and {self.field: fitted}

    def arguments(self, item: Mapping[str, Any]) -> str:
        """JSON arguments of a returned item."""
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
            _local_shell,
        ),
        VendorTool(
            "shell",
            "action",
            "Runs commands in the shell of this machine, one after the other.",
            {"commands": _STRINGS, "timeout_ms": {"type": "integer"}, "max_output_length": {"type": "integer"}},
            ("commands",),
            _shell,
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
            _apply_patch,
        ),
    )
}
"""Tools by type, which is also the function name; items are ``TYPE_call`` and ``TYPE_call_output``."""


def printed(part: Mapping[str, Any]) -> str | None:
    """Format a ``shell`` result part (stdout, stderr, exit code); None for others."""
    if "type" in part or not isinstance(part.get("stdout"), str) or not isinstance(part.get("stderr"), str):
        return None
    outcome = part.get("outcome")
    ended = outcome if isinstance(outcome, dict) else {}
    status = "timed out" if ended.get("type") == "timeout" else f"exit code {ended.get('exit_code')}"
    return "\n".join(text for text in (part["stdout"].rstrip("\n"), part["stderr"].rstrip("\n"), f"[{status}]") if text)
