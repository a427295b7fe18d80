"""Calls as JSON, most in a list: Granite 3, Phi-4, Command R7B, Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from coderepairrl.tokens.reading import (
    CallIds,
    Calls,
    Invocation,
    ParsedCall,
    ParsedReply,
    TokenReader,
    Tool,
    find_token,
    parse_after_thoughts,
    parse_json_or_none,
    read_thoughts,
    split_at_tokens,
)

GRANITE = ("<|tool_call|>", "")
PHI4 = ("<|tool_call|>", "<|/tool_call|>")
COHERE = ("<|START_ACTION|>", "<|END_ACTION|>")
RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


def parse_json_list(
    text: str, tools: Sequence[Tool] = (), *, name: str = "name", arguments: str = "arguments", id: str = ""
) -> Calls | None:
    """Parse a JSON list of objects with these keys; None for anything else."""
    entries = parse_json_or_none(text)
    calls: Calls = []
    for entry in entries if isinstance(entries, list) else ():
        fields = entry if isinstance(entry, dict) else {}
        title, values, call_id = fields.get(name), fields.get(arguments), fields.get(id, "") if id else ""
        if not (isinstance(title, str) and title and isinstance(values, dict) and isinstance(call_id, str)):
            return None
        calls.append(Invocation(title, values, call_id))
    return calls or None


def write_json_list(calls: Calls) -> str:
    """Write `calls` as a JSON list."""
    return json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls], ensure_ascii=False)


def parse_cohere(reader: TokenReader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """Thoughts, then a list of calls or a response, each between its tokens."""

    def parse_block(inner: list[int]) -> Calls | None:
        return parse_json_list(reader.decode(inner), name="tool_name", arguments="parameters", id="tool_call_id")

    opened, closed = reader.thoughts
    at, reasoning = 0, ""
    if thinking or ids[:1] == [opened]:
        begins = [find_token(ids, reader.convert_tokens_to_ids(tag), 0) for tag in (COHERE[0], RESPONSE[0])]
        stop = min(find_token(ids, closed, 0), *begins)
        at = stop + (ids[stop : stop + 1] == [closed])
        reasoning = reader.decode([token for token in ids[:stop] if token != opened]).strip()
    reply = parse_after_thoughts(reader, ids, at, reasoning, COHERE, parse_block)
    tags = {reader.convert_tokens_to_ids(tag) for tag in RESPONSE}
    words = ids[at : find_token(ids, reader.convert_tokens_to_ids(COHERE[0]), at)]
    reply.content = reader.decode([token for token in words if token not in tags]).strip()
    return reply


MISTRAL, ARGUMENTS, IDENTITY = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MISTRAL_IDS = CallIds(re.compile(r"[A-Za-z0-9]{9}"), lambda name, number: f"call{number:05d}")
"""Form of ids that templates accept."""


def parse_mistral_each(reader: TokenReader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """``[TOOL_CALLS]``, a name, ``[CALL_ID]`` and an id (version 11 only), ``[ARGS]`` and an object, per call."""
    begin, between = map(reader.convert_tokens_to_ids, (MISTRAL, ARGUMENTS))
    reasoning, start = read_thoughts(reader, ids, thinking, begin)
    if start is None:
        return ParsedReply("", reasoning)
    content, *parts = split_at_tokens(ids[start:], begin)
    calls, at = list[ParsedCall](), start + len(content)
    for part in parts:
        span, at = (at, at + 1 + len(part)), at + 1 + len(part)
        calls.append(ParsedCall(span, *(_parse_mistral_call(reader, split_at_tokens(part, between)) or ())))
    return ParsedReply(reader.decode(content).strip(), reasoning, calls)


def _parse_mistral_call(reader: TokenReader, halves: list[list[int]]) -> Invocation | None:
    head, *id_parts = split_at_tokens(halves[0], reader.convert_tokens_to_ids(IDENTITY))
    name, ids = reader.decode(head).strip(), [reader.decode(each).strip() for each in id_parts]
    arguments = parse_json_or_none(reader.decode(halves[1])) if len(halves) == 2 else None
    if not name or not isinstance(arguments, dict) or len(ids) > 1 or not all(map(MISTRAL_IDS.pattern.fullmatch, ids)):
        return None
    return Invocation(name, arguments, *ids)


def parse_mistral(text: str, tools: Sequence[Tool]) -> Calls | None:
    """Parse a list of objects with ids (versions 3 to 7)."""
    calls = parse_json_list(text, id="id")
    return calls if calls and all(MISTRAL_IDS.pattern.fullmatch(call.id) for call in calls) else None
