"""Tools of the Responses dialect that a client runs and whose calls have items of their own.

A client names such a tool by its type alone, for the vendor's models know it. The policy is shown a function, and what
it calls is spelled as the client expects it. Arguments that do not fit stay a ``function_call``.
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
    whole = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return list(value) if isinstance(value, list) and whole else None


def _local_shell(said: Mapping[str, Any]) -> dict[str, Any] | None:
    command, env = _strings(said.get("command")), said.get("env")
    if command is None:
        return None
    command = ["bash", "-lc", *command] if isinstance(said["command"], str) else command
    return {"type": "exec", **said, "command": command, "env": env if isinstance(env, dict) else {}}


def _shell(said: Mapping[str, Any]) -> dict[str, Any] | None:
    commands = _strings(said.get("commands"))
    return {"timeout_ms": None, "max_output_length": None, **said, "commands": commands} if commands else None


def _apply_patch(said: Mapping[str, Any]) -> dict[str, Any] | None:
    texts = ("path",) if said.get("type") == "delete_file" else ("path", "diff")
    fits = said.get("type") in _OPERATIONS and all(isinstance(said.get(key), str) for key in texts)
    return dict(said) if fits else None


@dataclass(frozen=True, slots=True)
class VendorTool:
    """One of them, as a function."""

    name: str
    field: str
    """Of the item: it has the arguments."""
    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    fit: Callable[[Mapping[str, Any]], dict[str, Any] | None]

    @property
    def function(self) -> dict[str, Any]:
        """As the policy is shown it."""
        parameters = {"type": "object", "properties": dict(self.properties), "required": list(self.required)}
        return {"name": self.name, "description": self.description, "parameters": parameters}

    def item(self, arguments: str) -> dict[str, Any] | None:
        """What is special about the item of a call; None for arguments that do not fit."""
        try:
            said = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        fitted = self.fit(said) if isinstance(said, dict) else None
        return fitted and {self.field: fitted}

    def arguments(self, item: Mapping[str, Any]) -> str:
        """Those of an item that a client sends back, without what only the item has."""
        said = item.get(self.field)
        found = said.items() if isinstance(said, dict) else ()
        return json.dumps({key: value for key, value in found if key in self.properties and value}, ensure_ascii=False)


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
"""By type, which is also the name of the function. A call is an item ``TYPE_call``, its result ``TYPE_call_output``."""


def printed(part: Mapping[str, Any]) -> str | None:
    """What a command of `shell` printed and how it ended; None for what is no part of its result."""
    if "type" in part or not isinstance(part.get("stdout"), str) or not isinstance(part.get("stderr"), str):
        return None
    outcome = part.get("outcome")
    ended = outcome if isinstance(outcome, dict) else {}
    told = "timed out" if ended.get("type") == "timeout" else f"exit code {ended.get('exit_code')}"
    return "\n".join(text for text in (part["stdout"].rstrip("\n"), part["stderr"].rstrip("\n"), f"[{told}]") if text)
