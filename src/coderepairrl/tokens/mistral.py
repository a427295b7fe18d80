"""Calls of Mistral: names and JSON objects after tokens, or a JSON list in older versions."""

from __future__ import annotations

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
    parse_json_or_none,
    read_thoughts,
    split_at_tokens,
)

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
IDS = CallIds(re.compile(r"[A-Za-z0-9]{9}"), lambda name, number: f"call{number:05d}")
"""Call ids that templates accept."""


def parse_mistral_each(reader: TokenReader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """``[TOOL_CALLS]``, a name, ``[CALL_ID]`` and an id (version 11 only), ``[ARGS]`` and an object, per call."""
    begin, between = map(reader.convert_tokens_to_ids, (BEGIN, ARGUMENTS))
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
    head, *id_parts = split_at_tokens(halves[0], reader.convert_tokens_to_ids(CALL_ID))
    name, ids = reader.decode(head).strip(), [reader.decode(each).strip() for each in id_parts]
    arguments = parse_json_or_none(reader.decode(halves[1])) if len(halves) == 2 else None
    if not name or not isinstance(arguments, dict) or len(ids) > 1 or not all(map(IDS.pattern.fullmatch, ids)):
        return None
    return Invocation(name, arguments, *ids)


def parse_mistral(text: str, tools: Sequence[Tool]) -> Calls | None:
    """Parse a list of objects with ids (versions 3 to 7)."""
    entries = parse_json_or_none(text)
    calls: Calls = []
    for entry in entries if isinstance(entries, list) else ():
        fields = entry if isinstance(entry, dict) else {}
        name, arguments, call_id = (fields.get(key) for key in ("name", "arguments", "id"))
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        if not (isinstance(call_id, str) and IDS.pattern.fullmatch(call_id)):
            return None
        calls.append(Invocation(name, arguments, call_id))
    return calls or None
