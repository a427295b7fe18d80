"""Parsers of tool calls between tags: Qwen3-Coder, Seed, GLM, DeepSeek, Kimi, MiniMax and Gemma 4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.reading import (
    CallIds,
    Calls,
    Invocation,
    ParsedReply,
    Tool,
    find_token,
    parse_after_thoughts,
    parse_blocks,
    parse_json,
    parse_json_or_none,
    split_at_tokens,
)


def parse_function_tags(text: str, tools: Sequence[Tool]) -> Calls | None:
    """Parse calls of Qwen3-Coder, Nemotron and Seed: tags for the function and each parameter.

    Values keep indentation, but lose a newline at either end. Returns None for anything else.
    """
    calls: Calls = []
    text, at = text.strip(), 0
    while at < len(text):
        function = _FUNCTION.match(text, at)
        if function is None:
            return None
        arguments, at = dict[str, Any](), function.end()
        while parameter := _PARAMETER.match(text, at):
            name, value = parameter.groups()
            if name in arguments or "<parameter=" in value:
                return None
            arguments[name], at = convert_argument(value, tools, function[1], name), parameter.end()
        end = _FUNCTION_END.match(text, at)
        if end is None:
            return None
        calls.append(Invocation(function[1], arguments))
        at = end.end()
    return calls or None


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
# the newlines around a value belong to the tags
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# the text of a call without an opening tag includes its closing tag
_FUNCTION_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
FUNCTION = re.compile(r"^[ \t]*<function=([^>\n]+)>", re.MULTILINE)  # at the start of any line of a reply's text


def parse_glm(tokenizer: InertTokenizer, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """Parse a name, then keys and values between tokens."""
    key, key_end, value, value_end = map(tokenizer.find_id, GLM_ARGUMENTS)

    def parse_block(inner: list[int]) -> Calls | None:
        title, *pairs = split_at_tokens(inner, key)
        name = tokenizer.decode(title).strip()
        arguments: dict[str, Any] = {}
        for pair in pairs:
            marks = [token for token in pair if token in (key_end, value, value_end)]
            if marks != [key_end, value, value_end]:
                return None
            at, begin, end = (pair.index(mark) for mark in marks)
            if tokenizer.decode([*pair[at + 1 : begin], *pair[end + 1 :]]).strip():
                return None
            argument = tokenizer.decode(pair[:at]).strip()
            if argument in arguments:
                return None
            arguments[argument] = convert_argument(tokenizer.decode(pair[begin + 1 : end]), tools, name, argument)
        return [Invocation(name, arguments)] if name and not {key_end, value, value_end} & set(title) else None

    return parse_blocks(tokenizer, ids, thinking, QWEN, parse_block)


# a name, and below it JSON in a Markdown fence
_FENCED_CALL = re.compile(r"\s*([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


def _make_section_parser(
    tags: tuple[str, str], marks: tuple[str, str, str], read: Callable[[str, str], tuple[str, str, str] | None]
) -> Any:
    """Make a parser of a section between `tags`, with calls between the first two of `marks`.

    The third of `marks` separates the two texts of a call, from which `read` returns name, JSON arguments and id.
    """

    def parse_section(tokenizer: InertTokenizer, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
        begin, end, separator = map(tokenizer.find_id, marks)

        def parse_block(inner: list[int]) -> Calls | None:
            head, *parts = split_at_tokens(inner, begin)
            calls: Calls = []
            for part in parts:
                call, *rest = split_at_tokens(part, end)
                halves = split_at_tokens(call, separator)
                if len(rest) != 1 or tokenizer.decode(rest[0]).strip() or len(halves) != 2:
                    return None
                call_parts = read(*map(tokenizer.decode, halves))
                arguments = parse_json_or_none(call_parts[1]) if call_parts else None
                if call_parts is None or not call_parts[0] or not isinstance(arguments, dict):
                    return None
                calls.append(Invocation(call_parts[0], arguments, call_parts[2]))
            return None if tokenizer.decode(head).strip() else calls

        return parse_blocks(tokenizer, ids, thinking, tags, parse_block)

    return parse_section


def _read_fenced_call(kind: str, call: str) -> tuple[str, str, str] | None:
    match = _FENCED_CALL.fullmatch(call)
    return (match[1].strip(), match[2], "") if match and kind.strip() == "function" else None


def _read_id_call(title: str, arguments: str) -> tuple[str, str, str] | None:
    match = KIMI_IDS.pattern.fullmatch(title.strip())
    return (match[1], arguments, match[0]) if match else None


QWEN = ("<tool_call>", "</tool_call>")
SEED = ("<seed:tool_call>", "</seed:tool_call>")
MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
GEMMA4 = ("<|tool_call>", "<tool_call|>")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_IDS = CallIds(re.compile(r"functions\.([^:\s]+):\d{1,9}"), lambda name, number: f"functions.{name}:{number}")
KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>")
GLM_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

deepseek_v31 = _make_section_parser(DEEPSEEK, DEEPSEEK_CALL, lambda name, arguments: (name.strip(), arguments, ""))
"""Parses a call as name, separator, JSON."""
deepseek_v3 = _make_section_parser(DEEPSEEK, DEEPSEEK_CALL, _read_fenced_call)
"""Parses a call as the word *function*, separator, name and fenced JSON."""
kimi_k2 = _make_section_parser(KIMI, KIMI_CALL, _read_id_call)
"""Parses a call as id ``functions.NAME:NUMBER``, separator, JSON."""

_INVOKE = re.compile(r'<invoke name="([^"\n]+)">(.*?)</invoke>', re.DOTALL)
_ARGUMENT = re.compile(r'<parameter name="([^"\n]+)">(.*?)</parameter>', re.DOTALL)


def parse_minimax(text: str, tools: Sequence[Tool]) -> Calls | None:
    """Parse tags (text, not tokens) for each function and parameter, with all calls in one block.

    Returns None for text between tags, or a repeated parameter.
    """
    calls: Calls = []
    for function, body in _INVOKE.findall(text):
        parts = _ARGUMENT.findall(body)
        arguments = {name: convert_argument(value, tools, function, name) for name, value in parts}
        if _ARGUMENT.sub("", body).strip() or len(arguments) < len(parts):
            return None
        calls.append(Invocation(function, arguments))
    return None if _INVOKE.sub("", text).strip() else calls


# a word between a brace or comma and a colon
_UNQUOTED_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_GEMMA_CALL = re.compile(r"\s*call:([^{\s]+)(\{.*\})\s*", re.DOTALL)


def parse_gemma4(tokenizer: InertTokenizer, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """Parse ``call:``, a name, and a JSON object with unquoted keys, and strings between tokens."""
    quote, channel, end = map(tokenizer.find_id, ('<|"|>', "<|channel>", "<channel|>"))

    def parse_block(inner: list[int]) -> Calls | None:
        parts = split_at_tokens(inner, quote)
        texts = [  # every second part is a string
            json.dumps(tokenizer.decode(part)) if at % 2 else _UNQUOTED_KEY.sub(r'\1"\2":', tokenizer.decode(part))
            for at, part in enumerate(parts)
        ]
        call = _GEMMA_CALL.fullmatch("".join(texts)) if len(parts) % 2 else None
        arguments = parse_json_or_none(call[2]) if call else None
        return [Invocation(call[1], arguments)] if call and isinstance(arguments, dict) else None

    at, reasoning = 0, ""
    if thinking or ids[:1] == [channel]:
        stop = find_token(ids, end, 0)
        at = stop + 1 if stop < len(ids) else find_token(ids, tokenizer.find_id(GEMMA4[0]), 0)
        thoughts = [token for token in ids[: min(stop, at)] if token != channel]
        reasoning = tokenizer.decode(thoughts).removeprefix("thought\n").strip()
    # Gemma's template writes text after calls
    return parse_after_thoughts(tokenizer, ids, at, reasoning, GEMMA4, parse_block, words_after=True)


_PYTHON = {"True": True, "False": False, "None": None}
"""Python's spellings of JSON values, which some templates write."""


def convert_argument(text: str, tools: Sequence[Tool], function: str, name: str) -> object:
    """Convert a parameter's value: `text` if its schema allows a string, else JSON or a Python constant, else `text`.

    If null is allowed, ``null`` and ``None`` are null.
    """
    types, word = _list_types(tools, function, name), text.strip()
    if "null" in types and word in ("null", "None"):
        return None
    if "string" in types:
        return text
    try:
        return _PYTHON[word] if word in _PYTHON else parse_json(text)
    except ValueError:
        return text


def _list_types(tools: Sequence[Tool], function: str, name: str) -> list[Any]:
    """List a parameter's types by its schema (perhaps malformed), also in unions, references and choices."""
    called = next((tool["function"] for tool in tools if tool["function"]["name"] == function), None)
    parameters = _get_part(called, "parameters")
    schema = _get_part(parameters, "properties", name)
    types: list[Any] = []
    for part in [schema, *(each for key in ("anyOf", "oneOf", "allOf") for each in _get_list(schema, key))]:
        if isinstance(reference := _get_part(part, "$ref"), str):  # pydantic's `#/$defs/NAME`
            part = _get_part(parameters, *reference.removeprefix("#/").split("/"))
        choices = [*_get_list(part, "enum"), _get_part(part, "const")]
        types += [_get_part(part, "type"), *_get_list(part, "type")]
        types += ["string" for choice in choices if isinstance(choice, str)]
    return types


def _get_part(schema: Any, *path: str) -> Any:
    for key in path:
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _get_list(schema: Any, key: str) -> list[Any]:
    value = _get_part(schema, key)
    return value if isinstance(value, list) else []
