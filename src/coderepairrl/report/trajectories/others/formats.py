"""Readers of trajectories, one function per format; each raises `ValueError` for damaged contents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import (
    Trajectory,
    find_issue,
    mapping_or_empty,
    normalise_messages,
    parse_tool_schemas,
    parse_verdict,
)

_MINI_SWE_AGENT_BASH = {
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
"""Only tool of mini-swe-agent, missing from its files."""
_ATIF_ROLES = {"agent": "assistant", "system": "system", "user": "user"}
NANO_MESSAGES = "messages.jsonl"


def read_openhands(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read a row of nebius/SWE-rebench-openhands-trajectories or SWE-Gym, or of an evaluation's ``output.jsonl``.

    Evaluations keep replies in ``tool_call_metadata``.
    """
    task = row.get("instance_id")
    if not isinstance(task, str):
        raise ValueError("it has no instance_id")
    if "history" in row:
        return _read_openhands_evaluation(task, row, name)
    verdict = row.get("resolved", mapping_or_empty(row.get("test_result")).get("resolved"))
    return Trajectory(
        task,
        normalise_messages(row.get("trajectory", row.get("messages"))),
        parse_tool_schemas(row.get("tools")),
        id=str(row.get("trajectory_id") or row.get("run_id") or name),
        agent="openhands",
        model=str(row.get("model") or ""),
        stated_repository=str(row.get("repo") or ""),
        resolved=parse_verdict(verdict),
        patch=str(row.get("model_patch") or ""),
    )


def _read_openhands_evaluation(task: str, row: Mapping[str, Any], name: str) -> Trajectory:
    instance, result = mapping_or_empty(row.get("instance")), mapping_or_empty(row.get("test_result"))
    events = list(_flatten_history(row["history"]))
    prompt = next((event for event in events if event.get("action") == "system"), {})
    report = mapping_or_empty(result.get("report") or row.get("report"))
    return Trajectory(
        task,
        normalise_messages(list(_event_messages(events))),
        parse_tool_schemas(mapping_or_empty(prompt.get("args")).get("tools")),
        id=name,
        agent="openhands",
        model=str(mapping_or_empty(mapping_or_empty(row.get("metadata")).get("llm_config")).get("model") or ""),
        stated_repository=str(instance.get("repo") or ""),
        commit=str(instance.get("base_commit") or ""),
        issue=str(instance.get("problem_statement") or ""),
        resolved=parse_verdict(report.get("resolved")),
        patch=str(result.get("git_patch") or ""),
    )


def _event_messages(events: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    # a reply with several calls is several events
    replies = set()
    for event in events:
        if "kind" in event:
            raise ValueError("its events are those of OpenHands' SDK, which are not read")
        metadata, arguments = mapping_or_empty(event.get("tool_call_metadata")), mapping_or_empty(event.get("args"))
        if "observation" in event:
            if metadata:
                yield {"role": "tool", "content": event.get("content"), "tool_call_id": metadata.get("tool_call_id")}
        elif event.get("action") in ("system", "message") and not metadata:
            role = {"user": "user", "agent": "assistant"}.get(str(event.get("source")), "system")
            yield {"role": "system" if event["action"] == "system" else role, "content": arguments.get("content")}
        elif metadata:
            response = mapping_or_empty(metadata.get("model_response"))
            choices = response.get("choices")
            if not isinstance(choices, list) or not choices:
                raise ValueError("a reply is incomplete")
            if response.get("id") not in replies:
                replies.add(response.get("id"))
                yield {**mapping_or_empty(mapping_or_empty(choices[0]).get("message")), "role": "assistant"}


def _flatten_history(history: Any) -> Iterator[Mapping[str, Any]]:
    # older versions wrote pairs of an action and its observation
    if not isinstance(history, list):
        raise ValueError("history is not a list")
    for each in history:
        yield from _flatten_history(each) if isinstance(each, list) else [mapping_or_empty(each)]


def read_swe_agent(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read an ``INSTANCE.traj``, or a row of nebius/SWE-agent-trajectories."""
    if "instance_id" in row and isinstance(row.get("trajectory"), list):
        messages = [_convert_swe_agent_message(each) for each in row["trajectory"]]
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


def _convert_swe_agent_message(each: Any) -> Mapping[str, Any]:
    if not isinstance(each, Mapping):
        raise ValueError("a message is not an object")
    role = "assistant" if each.get("role") == "ai" else each.get("role")
    return {"role": role, "content": each.get("text") or each.get("system_prompt") or each.get("content")}


def read_mini_swe_agent(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read an ``INSTANCE.traj.json`` of version 1 or 2."""
    info, raw = mapping_or_empty(row.get("info")), row.get("messages")
    if isinstance(raw, list):  # messages of the role exit say how it ended; the model never saw them
        raw = [each for each in raw if mapping_or_empty(each).get("role") != "exit"]
    messages = normalise_messages(raw)
    return Trajectory(
        str(row.get("instance_id") or name.rpartition("/")[2].partition(".traj")[0]),
        messages,
        (_MINI_SWE_AGENT_BASH,) if any(each.get("tool_calls") for each in messages) else (),
        id=name,
        agent="mini-swe-agent",
        model=str(mapping_or_empty(mapping_or_empty(info.get("config")).get("model")).get("model_name") or ""),
        patch=str(info.get("submission") or ""),
    )


def read_atif(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read the main conversation of a file in Harbor's Agent Trajectory Interchange Format, ours or others'."""
    steps, agent = row.get("steps"), row.get("agent")
    if not isinstance(steps, list) or not isinstance(agent, Mapping):
        raise ValueError("it has no steps by an agent")
    notes = mapping_or_empty(row.get("extra"))
    passed = [score.get("passed") for score in notes.get("scores") or () if score.get("passed") is not None]
    reward = notes.get("reward")
    return Trajectory(
        str(notes.get("task") or notes.get("instance_id") or name.rpartition("/")[2].partition(".json")[0]),
        normalise_messages([message for step in steps for message in _atif_step_messages(step)]),
        parse_tool_schemas(agent.get("tool_definitions")),
        id=str(row.get("trajectory_id") or row.get("session_id") or name),
        agent=str(agent.get("name") or ""),
        model=str(agent.get("model_name") or ""),
        resolved=all(passed) if passed else None,
        reward=float(reward) if isinstance(reward, int | float) else None,
        patch=str(notes.get("patch") or ""),
    )


def _atif_step_messages(step: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(step, Mapping) or step.get("source") not in _ATIF_ROLES:
        raise ValueError("a step has no source")
    reply: dict[str, Any] = {"role": _ATIF_ROLES[step["source"]], "content": step.get("message")}
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
    if isinstance(arguments, Mapping) and list(arguments) == ["text"] and _is_non_object_json(arguments["text"]):
        return str(arguments["text"])
    return json.dumps(arguments or {})


def _is_non_object_json(written: Any) -> bool:
    try:
        return not isinstance(json.loads(written), dict)
    except (ValueError, TypeError, RecursionError):
        return False  # a tool's own argument of that name


def read_nano(folder: Path) -> Trajectory:
    """Read a log of the agent Nano, ``~/.nano/TIME-ID/``. Raises `ValueError` also if it is unfinished."""
    logged = [json.loads(line) for line in _read_nano_text(folder / NANO_MESSAGES).split("\n") if line.strip()]
    metadata = mapping_or_empty(_read_nano_json(folder / "metadata.json"))
    patch = _read_nano_text(folder / "diff.txt")
    last = mapping_or_empty(logged[-1]) if logged else {}
    if not patch.strip() and (last.get("role") != "assistant" or last.get("tool_calls")):
        raise ValueError("it was not finished")
    messages = normalise_messages(logged)
    return Trajectory(
        task="",
        messages=messages,
        tools=parse_tool_schemas(_read_nano_json(folder / "tools.json")),
        id=folder.name,
        agent="nano",
        model=str(metadata.get("model") or ""),
        issue=find_issue(messages),
        patch=patch,
    )


def _read_nano_json(path: Path) -> Any:
    return json.loads(_read_nano_text(path) or "null")


def _read_nano_text(path: Path) -> str:
    """Text of a file; empty if it does not exist."""
    return path.read_text("utf-8") if path.is_file() else ""
