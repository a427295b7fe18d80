"""Reader of mini-swe-agent's ``INSTANCE.traj.json``, both versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import Trajectory, conversation

_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""Its only tool, missing from its files."""


def read(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read an attempt. Raises `ValueError`."""
    info = row.get("info")
    info = info if isinstance(info, Mapping) else {}
    config = info.get("config") if isinstance(info.get("config"), Mapping) else {}
    model = config.get("model") if isinstance(config, Mapping) else {}
    raw = row.get("messages")
    messages = conversation([each for each in raw if not _exit(each)] if isinstance(raw, list) else raw)
    return Trajectory(
        str(row.get("instance_id") or name.rpartition("/")[2].partition(".traj")[0]),
        messages,
        (_BASH,) if any(each.get("tool_calls") for each in messages) else (),
        name,
        "mini-swe-agent",
        str(model.get("model_name") or "") if isinstance(model, Mapping) else "",
        patch=str(info.get("submission") or ""),
    )


def _exit(message: Any) -> bool:
    # its note of how it ended, which the model never saw
    return isinstance(message, Mapping) and message.get("role") == "exit"
