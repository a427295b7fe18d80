"""How families write tool calls, and how calls are read from ids.

A format is named as vLLM names its parser (``--tool-call-parser``). Which one a model uses is not looked up: it is the
one that reads the calls which the model's own chat template writes (`find`).
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
"""The id of a token that the vocabulary does not have."""


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write calls, between the tokens `begin` and `end` (empty: there is none).

    A reply that starts with `held` is a call or is none, and nobody knows before its end. `needs` are tokens without
    which the format cannot be told from text.
    """

    name: str
    begin: str
    end: str
    needs: tuple[str, ...]
    read: Callable[[Reader, list[int], Sequence[Tool], bool], Any]
    """Ids up to the stop token, tools, and whether they begin in thoughts, to a reply as `renderers` describes one.

    Calls that cannot be read say which ids they are.
    """
    held: str = ""


class Reader:
    """A tokenizer for functions that take the text of a token for the token where there is none."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: InertTokenizer) -> None:
        self.encode = tokenizer.encode
        self.decode = tokenizer.decode
        self._find = tokenizer.convert_tokens_to_ids

    def convert_tokens_to_ids(self, token: str) -> int:
        """The id of `token`, or one that no sequence has."""
        found = self._find(token)
        return NEVER if found is None else found


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

    Values keep their indentation, which `renderers` would strip and code needs; all but one newline at either end.
    """
    from renderers.base import ParsedToolCall, ToolCallParseStatus

    reply = _hermes(reader, ids, tools, thinking)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls = []
    for call in reply.tool_calls:
        found = _FUNCTION.fullmatch(call.raw)
        said = _PARAMETER.findall(found[2]) if found else []
        if call.status == ToolCallParseStatus.UNCLOSED_BLOCK:
            calls.append(call)
        elif found is None or len(said) != found[2].count("<parameter="):
            unread = ToolCallParseStatus.MALFORMED_STRUCTURE
            calls.append(ParsedToolCall(call.raw, token_span=call.token_span, status=unread))
        else:
            wanted = schemas.get(found[1], {}).get("properties") or {}
            arguments = {name: _typed(text, wanted.get(name) or {}) for name, text in said}
            calls.append(ParsedToolCall(call.raw, found[1], arguments, call.token_span))
    reply.tool_calls = calls
    return reply


def _typed(text: str, schema: Mapping[str, Any]) -> object:
    """The value of a parameter: `text`, unless its schema allows something else that `text` says."""
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
    words, raw = reader.decode(ids[:at]).strip(), reader.decode(ids[at + 1 :]).strip()
    said, content = (raw, words) if at < len(ids) else (words, "")
    call = _json(said)
    if tools and isinstance(call, dict) and isinstance(call.get("name"), str):
        arguments = call.get("parameters", call.get("arguments", {}))
        return ParsedResponse(content, tool_calls=[ParsedToolCall(said, call["name"], arguments, (at, len(ids)))])
    unread = ParsedToolCall(raw, token_span=(at, len(ids)), status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    return ParsedResponse(words, tool_calls=[unread] if at < len(ids) else [])


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
    except (ValueError, RecursionError):  # no JSON, or JSON that Python will not read
        return None


_TAGS = ("<tool_call>", "</tool_call>")
HERMES = Format("hermes", *_TAGS, needs=_TAGS, read=_hermes)
FORMATS = (
    HERMES,
    Format("qwen3_coder", *_TAGS, needs=_TAGS, read=_qwen3_coder),
    Format("llama3_json", "<|python_tag|>", "", needs=(), read=_llama3_json, held="{"),
    Format("mistral", "[TOOL_CALLS]", "", needs=("[TOOL_CALLS]", "[ARGS]"), read=_mistral),
)


def find(tokenizer: InertTokenizer, said: Sequence[int], name: str, arguments: object, tools: Sequence[Tool]) -> Format:
    """The format that reads from `said`, which ends with the call's last id, one call of `name` with `arguments`.

    Raises LookupError where none does.
    """
    reader = Reader(tokenizer)
    for each in FORMATS:
        if all(token in tokenizer.added for token in each.needs):
            calls = each.read(reader, list(said), tools, False).tool_calls
            if [(call.status, call.name, call.arguments) for call in calls] == [("ok", name, arguments)]:
                return each
    raise LookupError
