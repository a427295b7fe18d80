"""Reader of SWE-agent's ``INSTANCE.traj``, and of nebius/SWE-agent-trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import (
    Trajectory,
    mapping_or_empty,
    normalise_messages,
    parse_verdict,
)


def read(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read an attempt. Raises `ValueError`."""
    if "instance_id" in row and isinstance(row.get("trajectory"), list):
        messages = [_convert_message(each) for each in row["trajectory"]]
        return Trajectory(
            str(row["instance_id"]),
            normalise_messages(messages),
            id=name,
            agent="swe-agent",
            model=str(row.get("model_name") or ""),
            resolved=parse_verdict(row.get("target")),
            patch=str(row.get("generated_patch") or ""),
        )
    history = row.get("history")
    if not isinstance(history, list):
        raise ValueError("it has no history")
    return Trajectory(
        name.rpartition("/")[2].partition(".traj")[0],
        normalise_messages([each for each in history if not mapping_or_empty(each).get("is_demo")]),
        id=name,
        agent="swe-agent",
        patch=str(mapping_or_empty(row.get("info")).get("submission") or ""),
    )


def _convert_message(each: Any) -> Mapping[str, Any]:
    if not isinstance(each, Mapping):
        raise ValueError("a message is not an object")
    role = "assistant" if each.get("role") == "ai" else each.get("role")
    return {"role": role, "content": each.get("text") or each.get("system_prompt") or each.get("content")}
