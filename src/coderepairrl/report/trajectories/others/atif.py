"""Reader of Harbor's Agent Trajectory Interchange Format (ATIF), ours (``crrl export --to atif``) and others'."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import (
    Trajectory,
    mapping_or_empty,
    normalise_messages,
    parse_tool_schemas,
)

_SOURCES = {"agent": "assistant", "system": "system", "user": "user"}


def read(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read the main conversation. Raises `ValueError`."""
    steps, agent = row.get("steps"), row.get("agent")
    if not isinstance(steps, list) or not isinstance(agent, Mapping):
        raise ValueError("it has no steps by an agent")
    notes = mapping_or_empty(row.get("extra"))
    passed = [score.get("passed") for score in notes.get("scores") or () if score.get("passed") is not None]
    reward = notes.get("reward")
    return Trajectory(
        str(notes.get("task") or notes.get("instance_id") or name.rpartition("/")[2].partition(".json")[0]),
        normalise_messages([message for step in steps for message in _step_messages(step)]),
        parse_tool_schemas(agent.get("tool_definitions")),
        str(row.get("trajectory_id") or row.get("session_id") or name),
        str(agent.get("name") or ""),
        str(agent.get("model_name") or ""),
        resolved=all(passed) if passed else None,
        reward=float(reward) if isinstance(reward, int | float) else None,
        patch=str(notes.get("patch") or ""),
    )


def _step_messages(step: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(step, Mapping) or step.get("source") not in _SOURCES:
        raise ValueError("a step has no source")
    reply: dict[str, Any] = {"role": _SOURCES[step["source"]], "content": step.get("message")}
    if thoughts := step.get("reasoning_content"):
        reply["reasoning_content"] = thoughts
    reply["tool_calls"] = [
        {
            "id": call.get("tool_call_id"),
            "function": {"name": call.get("function_name"), "arguments": _format_atif_call(call)},
        }
        for call in step.get("tool_calls") or ()
    ]
    yield reply
    for result in (step.get("observation") or {}).get("results") or ():
        role = {"role": "tool"} if step["source"] == "agent" and reply["tool_calls"] else {"role": "user"}
        yield {**role, "content": result.get("content"), "tool_call_id": result.get("source_call_id")}


def _format_atif_call(call: Mapping[str, Any]) -> str:
    # the inverse of `_convert_call_to_atif`: arguments that are no JSON object are exported as ``text``
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping) and list(arguments) == ["text"] and _is_other_json(arguments["text"]):
        return str(arguments["text"])
    return json.dumps(arguments or {})


def _is_other_json(written: Any) -> bool:
    try:
        return not isinstance(json.loads(written), dict)
    except (ValueError, TypeError, RecursionError):
        return False  # a tool's own argument of that name
