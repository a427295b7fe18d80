"""Formats of tool calls, and parsing them from ids.

Formats are named as vLLM's parsers (``--tool-call-parser``). Which one a model uses is not looked up: it is the one
that parses the calls that the model's own chat template renders (`find`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coderepairrl.tokens.inert import InertTokenizer

Tool = Mapping[str, Any]
NEVER = -1
"""Stands for the id of a token that the vocabulary does not have."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of calls between the tokens `begin` and `end` (empty: none).

    Only the end of a reply that starts with the text `held` shows whether it is a call. `needs` are special tokens
    without which calls could not be distinguished from text.
    """

    name: str
    begin: str
    end: str
    needs: tuple[str, ...]
    read: Callable[[Reader, list[int], Sequence[Tool], bool], Any]
    """Parses ids up to the stop token, given the tools and whether they begin in thoughts.

    Returns a `renderers.base.ParsedResponse`, in which invalid calls have the range of their ids.
    """
    held: str = ""


class Reader:
    """The tokenizer interface of `renderers`' parsers, in which unknown tokens have the id `NEVER`."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: InertTokenizer) -> None:
        self.encode = tokenizer.encode
        self.decode = tokenizer.decode
        self._find = tokenizer.convert_tokens_to_ids

    def convert_tokens_to_ids(self, token: str) -> int:
        """The id of `token`, `NEVER` if there is none."""
        token_id = self._find(token)
        return NEVER if token_id is None else token_id


def _hermes(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """A JSON object with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``."""
    from renderers.parsing import parse_qwen3

    return parse_qwen3(
        reader,
        ids,
        stop_ids=set(),
        tool_call_id=reader.convert_tokens_to_ids("<tool_call>"),
        tool_call_end_id=reader.convert_tokens_to_ids("</tool_call>"),
        reasoning_end_id=reader.convert_tokens_to_ids("</think>"),
        prefilled_thinking=thinking,
    )


_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_KINDS: dict[str, type | tuple[type, ...]] = {"integer": int, "number": (int, float), "object": dict, "array": list}


def _qwen3_coder(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """Tags for the function and each parameter between ``<tool_call>`` and ``</tool_call>``.

    Values keep their whitespace but for one newline at either end: code needs the indentation that `renderers` strips.
    """
    from renderers.base import ParsedToolCall, ToolCallParseStatus

    reply = _hermes(reader, ids, tools, thinking)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls = []
    for call in reply.tool_calls:
        function = _FUNCTION.fullmatch(call.raw)
        parameters = _PARAMETER.findall(function[2]) if function else []
        if call.status == ToolCallParseStatus.UNCLOSED_BLOCK:
            calls.append(call)
        elif function is None or len(parameters) != function[2].count("<parameter="):
            unread = ToolCallParseStatus.MALFORMED_STRUCTURE
            calls.append(ParsedToolCall(call.raw, token_span=call.token_span, status=unread))
        else:
            wanted = schemas.get(function[1], {}).get("properties") or {}
            arguments = {name: _typed(text, wanted.get(name) or {}) for name, text in parameters}
            calls.append(ParsedToolCall(call.raw, function[1], arguments, call.token_span))
    reply.tool_calls = calls
    return reply


def _typed(text: str, schema: Mapping[str, Any]) -> object:
    """The value of a parameter: `text`, or what it parses to if the schema allows that type."""
    branches = [schema, *(schema.get("anyOf") or schema.get("oneOf") or [])]
    kinds: set[str] = set()
    for branch in branches:
        kind = branch.get("type", ())
        kinds |= {kind} if isinstance(kind, str) else set(kind)
    word = text.strip().lower()  # templates write Python's names
    if "boolean" in kinds and word in ("true", "false"):
        return word == "true"
    if "null" in kinds and word in ("null", "none"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    allowed = any(isinstance(value, _KINDS[kind]) for kind in kinds & _KINDS.keys())
    return value if allowed and not isinstance(value, bool) else text


def _llama3_json(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """A reply that is one JSON object with ``name`` and ``parameters``, perhaps after ``<|python_tag|>``."""
    from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

    tag = reader.convert_tokens_to_ids("<|python_tag|>")
    at = ids.index(tag) if tag in ids else len(ids)
    text, raw = reader.decode(ids[:at]).strip(), reader.decode(ids[at + 1 :]).strip()
    source, content = (raw, text) if at < len(ids) else (text, "")
    call = _json(source)
    if tools and isinstance(call, dict) and isinstance(call.get("name"), str):
        arguments = call.get("parameters", call.get("arguments", {}))
        return ParsedResponse(content, tool_calls=[ParsedToolCall(source, call["name"], arguments, (at, len(ids)))])
    unread = ParsedToolCall(raw, token_span=(at, len(ids)), status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    return ParsedResponse(text, tool_calls=[unread] if at < len(ids) else [])


def _mistral(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """``[TOOL_CALLS]``, a name, ``[ARGS]`` and a JSON object, for each call (tokenizers of version 13 on)."""
    from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

    begin, between = map(reader.convert_tokens_to_ids, ("[TOOL_CALLS]", "[ARGS]"))
    content, *parts = _split(ids, begin)
    calls, at = [], len(content)
    for part in parts:
        span, at = (at, at + 1 + len(part)), at + 1 + len(part)
        name, *rest = _split(part, between)
        arguments = _json(reader.decode(rest[0])) if len(rest) == 1 else None
        ok, title = isinstance(arguments, dict), reader.decode(name).strip()
        status = ToolCallParseStatus.OK if ok and title else ToolCallParseStatus.MALFORMED_STRUCTURE
        calls.append(ParsedToolCall(reader.decode(part), title, arguments, span, status=status))
    return ParsedResponse(reader.decode(content).strip(), tool_calls=calls)


def _split(ids: list[int], at: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == at:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or JSON that Python refuses
        return None


_TAGS = ("<tool_call>", "</tool_call>")
HERMES = Format("hermes", *_TAGS, needs=_TAGS, read=_hermes)
QWEN3_CODER = Format("qwen3_coder", *_TAGS, needs=_TAGS, read=_qwen3_coder)
FORMATS = (
    HERMES,
    QWEN3_CODER,
    Format("llama3_json", "<|python_tag|>", "", needs=(), read=_llama3_json, held="{"),
    Format("mistral", "[TOOL_CALLS]", "", needs=("[TOOL_CALLS]", "[ARGS]"), read=_mistral),
)


def find(tokenizer: InertTokenizer, ids: Sequence[int], name: str, arguments: object, tools: Sequence[Tool]) -> Format:
    """The format in which the `ids` of a reply are exactly one call of `name` with `arguments`.

    Raises LookupError where there is none.
    """
    reader = Reader(tokenizer)
    for each in FORMATS:
        if all(token in tokenizer.added for token in each.needs):
            calls = each.read(reader, list(ids), tools, False).tool_calls
            if [(call.status, call.name, call.arguments) for call in calls] == [("ok", name, arguments)]:
                return each
    raise LookupError
