"""Reader of mini-swe-agent's ``INSTANCE.traj.json``, both versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import Trajectory, mapping_or_empty, normalise_messages

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
    info, raw = mapping_or_empty(row.get("info")), row.get("messages")
    if isinstance(raw, list):  # messages of the role exit say how it ended; the model never saw them
        raw = [each for each in raw if mapping_or_empty(each).get("role") != "exit"]
    messages = normalise_messages(raw)
    return Trajectory(
        str(row.get("instance_id") or name.rpartition("/")[2].partition(".traj")[0]),
        messages,
        (_BASH,) if any(each.get("tool_calls") for each in messages) else (),
        name,
        "mini-swe-agent",
        str(mapping_or_empty(mapping_or_empty(info.get("config")).get("model")).get("model_name") or ""),
        patch=str(info.get("submission") or ""),
    )
