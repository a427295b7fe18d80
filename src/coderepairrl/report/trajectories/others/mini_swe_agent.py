"""Reader of mini-swe-agent's ``INSTANCE.traj.json``, both versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import Trajectory, as_mapping, conversation

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
    info, raw = as_mapping(row.get("info")), row.get("messages")
    if isinstance(raw, list):  # how it ended, which the model never saw
        raw = [each for each in raw if as_mapping(each).get("role") != "exit"]
    messages = conversation(raw)
    return Trajectory(
        str(row.get("instance_id") or name.rpartition("/")[2].partition(".traj")[0]),
        messages,
        (_BASH,) if any(each.get("tool_calls") for each in messages) else (),
        name,
        "mini-swe-agent",
        str(as_mapping(as_mapping(info.get("config")).get("model")).get("model_name") or ""),
        patch=str(info.get("submission") or ""),
    )
