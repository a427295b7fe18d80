"""Reader of OpenHands: published rows of chats, and ``output.jsonl`` of evaluations.

Rows: nebius/SWE-rebench-openhands-trajectories (``trajectory``), SWE-Gym (``messages``). Evaluations keep replies in
``tool_call_metadata``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import (
    Trajectory,
    mapping_or_empty,
    normalise_messages,
    parse_tool_schemas,
    parse_verdict,
)


def read(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read an attempt. Raises `ValueError`."""
    task = row.get("instance_id")
    if not isinstance(task, str):
        raise ValueError("it has no instance_id")
    if "history" in row:
        return _read_evaluated(task, row, name)
    verdict = row.get("resolved", mapping_or_empty(row.get("test_result")).get("resolved"))
    return Trajectory(
        task,
        normalise_messages(row.get("trajectory", row.get("messages"))),
        parse_tool_schemas(row.get("tools")),
        str(row.get("trajectory_id") or row.get("run_id") or name),
        "openhands",
        str(row.get("model") or ""),
        str(row.get("repo") or ""),
        resolved=parse_verdict(verdict),
        patch=str(row.get("model_patch") or ""),
    )


def _read_evaluated(task: str, row: Mapping[str, Any], name: str) -> Trajectory:
    instance, result = mapping_or_empty(row.get("instance")), mapping_or_empty(row.get("test_result"))
    events = list(_flatten_history(row["history"]))
    prompt = next((event for event in events if event.get("action") == "system"), {})
    report = mapping_or_empty(result.get("report") or row.get("report"))
    return Trajectory(
        task,
        normalise_messages(list(_event_messages(events))),
        parse_tool_schemas(mapping_or_empty(prompt.get("args")).get("tools")),
        name,
        "openhands",
        str(mapping_or_empty(mapping_or_empty(row.get("metadata")).get("llm_config")).get("model") or ""),
        str(instance.get("repo") or ""),
        str(instance.get("base_commit") or ""),
        str(instance.get("problem_statement") or ""),
        parse_verdict(report.get("resolved")),
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
