"""Calls as a JSON list: Granite 3, Phi-4, Command R7B."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coderepairrl.tokens.reading import Calls, Invocation, Reader, Tool, after_thoughts, blocks, find, from_json

GRANITE = ("<|tool_call|>", "")
PHI4 = ("<|tool_call|>", "<|/tool_call|>")
COHERE = ("<|START_ACTION|>", "<|END_ACTION|>")
RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


def parse(text: str, name: str = "name", arguments: str = "arguments", id: str = "") -> Calls | None:
    """Parse a JSON list of objects with these keys; None for anything else."""
    entries = from_json(text)
    calls: Calls = []
    for entry in entries if isinstance(entries, list) else ():
        fields = entry if isinstance(entry, dict) else {}
        title, values, call_id = fields.get(name), fields.get(arguments), fields.get(id, "") if id else ""
        if not (isinstance(title, str) and title and isinstance(values, dict) and isinstance(call_id, str)):
            return None
        calls.append(Invocation(title, values, call_id))
    return calls or None


def write(calls: Calls) -> str:
    """Write `calls` as a JSON list."""
    return json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls], ensure_ascii=False)


def granite(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """Token, and a list up to the reply's end."""
    return blocks(reader, ids, thinking, GRANITE, lambda inner: parse(reader.decode(inner)))


def phi4(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """List between tokens."""
    return blocks(reader, ids, thinking, PHI4, lambda inner: parse(reader.decode(inner)))


def cohere(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """Thoughts, then a list of calls or a response, each between its tokens."""

    def block(inner: list[int]) -> Calls | None:
        return parse(reader.decode(inner), "tool_name", "parameters", "tool_call_id")

    opened, closed = reader.thoughts
    at, reasoning = 0, ""
    if thinking or ids[:1] == [opened]:
        begins = [find(ids, reader.convert_tokens_to_ids(tag), 0) for tag in (COHERE[0], RESPONSE[0])]
        stop = min(find(ids, closed, 0), *begins)
        at = stop + (ids[stop : stop + 1] == [closed])
        reasoning = reader.decode([token for token in ids[:stop] if token != opened]).strip()
    reply = after_thoughts(reader, ids, at, reasoning, COHERE, block)
    tags = {reader.convert_tokens_to_ids(tag) for tag in RESPONSE}
    words = ids[at : find(ids, reader.convert_tokens_to_ids(COHERE[0]), at)]
    reply.content = reader.decode([token for token in words if token not in tags]).strip()
    return reply
