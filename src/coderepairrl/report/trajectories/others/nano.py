"""Reader of the logs of the agent Nano, ``~/.nano/TIME-ID/``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coderepairrl.report.trajectories.others.trajectory import (
    Trajectory,
    find_issue,
    mapping_or_empty,
    normalise_messages,
    parse_tool_schemas,
)

MESSAGES = "messages.jsonl"


def read(folder: Path) -> Trajectory:
    """Read the attempt in `folder`. Raises `ValueError` if it is unfinished or damaged."""
    logged = [json.loads(line) for line in _read_nano_text(folder / MESSAGES).split("\n") if line.strip()]
    metadata = mapping_or_empty(_read_json(folder / "metadata.json"))
    patch = _read_nano_text(folder / "diff.txt")
    last = mapping_or_empty(logged[-1]) if logged else {}
    if not patch.strip() and (last.get("role") != "assistant" or last.get("tool_calls")):
        raise ValueError("it was not finished")
    messages = normalise_messages(logged)
    return Trajectory(
        task="",
        messages=messages,
        tools=parse_tool_schemas(_read_json(folder / "tools.json")),
        id=folder.name,
        agent="nano",
        model=str(metadata.get("model") or ""),
        issue=find_issue(messages),
        patch=patch,
    )


def _read_json(path: Path) -> Any:
    return json.loads(_read_nano_text(path) or "null")


def _read_nano_text(path: Path) -> str:
    """Text of a file; empty if it does not exist."""
    return path.read_text("utf-8") if path.is_file() else ""
