"""Reader of OpenHands: published rows of chats, and ``output.jsonl`` of evaluations.

Rows: nebius/SWE-rebench-openhands-trajectories (``trajectory``), SWE-Gym (``messages``). Evaluations keep replies in
``tool_call_metadata``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import (
    Trajectory,
    as_mapping,
    conversation,
    schemas,
    verdict_or_none,
)


def read(row: Mapping[str, Any], name: str) -> Trajectory:
    """Read an attempt. Raises `ValueError`."""
    task = row.get("instance_id")
    if not isinstance(task, str):
        raise ValueError("it has no instance_id")
    if "history" in row:
        return _read_evaluated(task, row, name)
    verdict = row.get("resolved", as_mapping(row.get("test_result")).get("resolved"))
    return Trajectory(
        task,
        conversation(row.get("trajectory", row.get("messages"))),
        schemas(row.get("tools")),
        str(row.get("trajectory_id") or row.get("run_id") or name),
        "openhands",
        str(row.get("model") or ""),
        str(row.get("repo") or ""),
        resolved=verdict_or_none(verdict),
        patch=str(row.get("model_patch") or ""),
    )


def _read_evaluated(task: str, row: Mapping[str, Any], name: str) -> Trajectory:
    instance, result = as_mapping(row.get("instance")), as_mapping(row.get("test_result"))
    events = list(_flat(row["history"]))
    prompt = next((event for event in events if event.get("action") == "system"), {})
    report = as_mapping(result.get("report") or row.get("report"))
    return Trajectory(
        task,
        conversation(list(_event_messages(events))),
        schemas(as_mapping(prompt.get("args")).get("tools")),
        name,
        "openhands",
        str(as_mapping(as_mapping(row.get("metadata")).get("llm_config")).get("model") or ""),
        str(instance.get("repo") or ""),
        str(instance.get("base_commit") or ""),
        str(instance.get("problem_statement") or ""),
        verdict_or_none(report.get("resolved")),
        patch=str(result.get("git_patch") or ""),
    )


def _event_messages(events: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    # a reply with several calls is several events
    replies = set()
    for event in events:
        if "kind" in event:
            raise ValueError("its events are those of OpenHands' SDK, which are not read")
        metadata, arguments = as_mapping(event.get("tool_call_metadata")), as_mapping(event.get("args"))
        if "observation" in event:
            if metadata:
                yield {"role": "tool", "content": event.get("content"), "tool_call_id": metadata.get("tool_call_id")}
        elif event.get("action") in ("system", "message") and not metadata:
            role = {"user": "user", "agent": "assistant"}.get(str(event.get("source")), "system")
            yield {"role": "system" if event["action"] == "system" else role, "content": arguments.get("content")}
        elif metadata:
            response = as_mapping(metadata.get("model_response"))
            choices = response.get("choices")
            if not isinstance(choices, list) or not choices:
                raise ValueError("a reply is incomplete")
            if response.get("id") not in replies:
                replies.add(response.get("id"))
                yield {**as_mapping(as_mapping(choices[0]).get("message")), "role": "assistant"}


def _flat(history: Any) -> Iterator[Mapping[str, Any]]:
    # older versions wrote pairs of an action and its observation
    if not isinstance(history, list):
        raise ValueError("history is not a list")
    for each in history:
        yield from _flat(each) if isinstance(each, list) else [as_mapping(each)]
