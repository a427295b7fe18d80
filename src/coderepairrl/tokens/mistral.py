"""Parsers of Mistral's calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from coderepairrl.tokens import listed
from coderepairrl.tokens.reading import Calls, Ids, Invocation, Reader, Tool, blocks, from_json, leading_thoughts, split

CALLS, ARGUMENTS, IDENTITY = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
IDS = Ids(re.compile(r"[A-Za-z0-9]{9}"), lambda name, number: f"call{number:05d}")
"""Form of ids that templates accept."""


def each(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """``[TOOL_CALLS]``, a name, ``[CALL_ID]`` and an id (version 11 only), ``[ARGS]`` and an object, per call."""
    from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

    begin, between = map(reader.convert_tokens_to_ids, (CALLS, ARGUMENTS))
    reasoning, start = leading_thoughts(reader, ids, thinking, begin)
    if start is None:
        return ParsedResponse("", reasoning_content=reasoning, reasoning_complete=False)
    content, *parts = split(ids[start:], begin)
    calls, at = [], start + len(content)
    for part in parts:
        span, at = (at, at + 1 + len(part)), at + 1 + len(part)
        call = _call(reader, split(part, between))
        if call is None:
            unread = ToolCallParseStatus.MALFORMED_STRUCTURE
            calls.append(ParsedToolCall(reader.decode(part), token_span=span, status=unread))
        else:
            calls.append(ParsedToolCall(reader.decode(part), call.name, call.arguments, span, id=call.id))
    return ParsedResponse(reader.decode(content).strip(), reasoning_content=reasoning or None, tool_calls=calls)


def _call(reader: Reader, halves: list[list[int]]) -> Invocation | None:
    head, *id_parts = split(halves[0], reader.convert_tokens_to_ids(IDENTITY))
    name, ids = reader.decode(head).strip(), [reader.decode(each).strip() for each in id_parts]
    arguments = from_json(reader.decode(halves[1])) if len(halves) == 2 else None
    if not name or not isinstance(arguments, dict) or len(ids) > 1 or not all(map(IDS.pattern.fullmatch, ids)):
        return None
    return Invocation(name, arguments, *ids)


def together(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """``[TOOL_CALLS]`` and a list of objects with ids (versions 3 to 7)."""

    def block(inner: list[int]) -> Calls | None:
        calls = listed.parse(reader.decode(inner), id="id")
        return calls if calls and all(IDS.pattern.fullmatch(call.id) for call in calls) else None

    return blocks(reader, ids, thinking, (CALLS, ""), block)
