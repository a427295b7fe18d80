"""Parsers of tool calls between tags: Qwen3-Coder, Seed, GLM, DeepSeek, Kimi, MiniMax and Gemma 4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coderepairrl.tokens.reading import (
    CallIds,
    Calls,
    Invocation,
    ParsedReply,
    TokenReader,
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
        schema, arguments, at = find_tool_schema(tools, function[1]), {}, function.end()
        while parameter := _PARAMETER.match(text, at):
            name, value = parameter.groups()
            if name in arguments or "<parameter=" in value:
                return None
            arguments[name], at = schema.convert(value, name), parameter.end()
        end = _FUNCTION_END.match(text, at)
        if end is None:
            return None
        calls.append(Invocation(function[1], arguments))
        at = end.end()
    return calls or None


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
FUNCTION = re.compile(r"^[ \t]*<function=([^>\n]+)>", re.MULTILINE)


def parse_glm(reader: TokenReader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """Parse a name, then keys and values between tokens. Values that are not text by the schema are JSON."""
    key, key_end, value, value_end = map(reader.convert_tokens_to_ids, GLM_ARGUMENTS)

    def parse_block(inner: list[int]) -> Calls | None:
        title, *pairs = split_at_tokens(inner, key)
        name = reader.decode(title).strip()
        schema, arguments = find_tool_schema(tools, name), {}
        for pair in pairs:
            marks = [token for token in pair if token in (key_end, value, value_end)]
            if marks != [key_end, value, value_end]:
                return None
            at, begin, end = (pair.index(mark) for mark in marks)
            if reader.decode([*pair[at + 1 : begin], *pair[end + 1 :]]).strip():
                return None
            argument = reader.decode(pair[:at]).strip()
            if argument in arguments:
                return None
            arguments[argument] = schema.convert(reader.decode(pair[begin + 1 : end]), argument)
        return [Invocation(name, arguments)] if name and not {key_end, value, value_end} & set(title) else None

    return parse_blocks(reader, ids, thinking, QWEN, parse_block)


_FENCED = re.compile(r"\s*([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


def _make_section_parser(
    tags: tuple[str, str], marks: tuple[str, str, str], read: Callable[[str, str], tuple[str, str, str] | None]
) -> Any:
    """Make a parser of a section between `tags`, with calls between the first two of `marks`.

    The third of `marks` separates the two texts of a call, from which `read` returns name, JSON arguments and id.
    """

    def parse_section(reader: TokenReader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
        begin, end, separator = map(reader.convert_tokens_to_ids, marks)

        def parse_block(inner: list[int]) -> Calls | None:
            head, *parts = split_at_tokens(inner, begin)
            calls: Calls = []
            for part in parts:
                call, *rest = split_at_tokens(part, end)
                halves = split_at_tokens(call, separator)
                if len(rest) != 1 or reader.decode(rest[0]).strip() or len(halves) != 2:
                    return None
                call_parts = read(*map(reader.decode, halves))
                arguments = parse_json_or_none(call_parts[1]) if call_parts else None
                if call_parts is None or not call_parts[0] or not isinstance(arguments, dict):
                    return None
                calls.append(Invocation(call_parts[0], arguments, call_parts[2]))
            return None if reader.decode(head).strip() else calls

        return parse_blocks(reader, ids, thinking, tags, parse_block)

    return parse_section


def _read_fenced_call(kind: str, call: str) -> tuple[str, str, str] | None:
    match = _FENCED.fullmatch(call)
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

    Returns None for text between tags, and a repeated parameter.
    """
    calls: Calls = []
    for function, body in _INVOKE.findall(text):
        schema, parts = find_tool_schema(tools, function), _ARGUMENT.findall(body)
        arguments = {name: schema.convert(value, name) for name, value in parts}
        if _ARGUMENT.sub("", body).strip() or len(arguments) < len(parts):
            return None
        calls.append(Invocation(function, arguments))
    return None if _INVOKE.sub("", text).strip() else calls


_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_GEMMA_CALL = re.compile(r"\s*call:([^{\s]+)(\{.*\})\s*", re.DOTALL)


def parse_gemma4(reader: TokenReader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """Parse ``call:``, a name, and a JSON object with keys without quotes and strings between tokens."""
    quote, channel, end = map(reader.convert_tokens_to_ids, ('<|"|>', "<|channel>", "<channel|>"))

    def parse_block(inner: list[int]) -> Calls | None:
        parts = split_at_tokens(inner, quote)
        texts = [
            json.dumps(reader.decode(part)) if at % 2 else _KEY.sub(r'\1"\2":', reader.decode(part))
            for at, part in enumerate(parts)
        ]
        call = _GEMMA_CALL.fullmatch("".join(texts)) if len(parts) % 2 else None
        arguments = parse_json_or_none(call[2]) if call else None
        return [Invocation(call[1], arguments)] if call and isinstance(arguments, dict) else None

    at, reasoning = 0, ""
    if thinking or ids[:1] == [channel]:
        stop = find_token(ids, end, 0)
        at = stop + 1 if stop < len(ids) else find_token(ids, reader.convert_tokens_to_ids(GEMMA4[0]), 0)
        thoughts = [token for token in ids[: min(stop, at)] if token != channel]
        reasoning = reader.decode(thoughts).removeprefix("thought\n").strip()
    # its template writes words after calls
    return parse_after_thoughts(reader, ids, at, reasoning, GEMMA4, parse_block, words_after=True)


KINDS: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
IMPLIED: dict[str, str] = {
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems"), "array"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
"""Type that a keyword implies in a schema without a type."""
COMBINED = ("allOf", "anyOf", "oneOf")


def find_tool_schema(tools: Sequence[Tool], name: str) -> ToolSchema:
    """Find the schema of the tool `name`; empty for an unknown tool."""
    return ToolSchema(
        next((each["function"].get("parameters") for each in tools if each["function"]["name"] == name), {})
    )


class ToolSchema:
    """Schema of a tool's parameters; `root` may be malformed."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, set[type]] = {}

    def convert(self, text: str, name: str) -> object:
        """Convert the value of parameter `name`: JSON if the schema allows its type, else `text`."""
        try:
            types = set[type]().union(*map(self._find_types, self._find_schemas(name)))
        except RecursionError:  # too many schemas that refer to each other
            return text
        word = text.strip().lower()  # templates write Python's True, False, None
        if bool in types and word in ("true", "false"):
            return word == "true"
        if type(None) in types and word in ("null", "none"):
            return None
        try:
            value = parse_json(text)
        except ValueError:
            return text
        json_type = int if isinstance(value, float) and value.is_integer() else type(value)
        return value if {type(value), json_type} & (types - {str}) else text

    def _find_schemas(self, name: str) -> list[Any]:
        schemas = list(self._iter_combined(self._root, set()))
        named = [each["properties"][name] for each in schemas if name in _as_mapping(each.get("properties"))]
        return named or [each.get("additionalProperties") for each in schemas]

    def _iter_combined(self, schema: Any, seen: set[int]) -> Iterator[Mapping[str, Any]]:
        if isinstance(schema, Mapping) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            for each in (self._resolve(schema), *(part for key in COMBINED for part in _as_list(schema.get(key)))):
                yield from self._iter_combined(each, seen)

    def _find_types(self, schema: Any) -> set[type]:
        if not isinstance(schema, Mapping) or id(schema) in self._known:
            return self._known.get(id(schema), set())
        self._known[id(schema)] = set()  # its parts may refer to it
        names = _as_list(schema.get("type")) or [schema.get("type")]
        values = [schema["const"]] if "const" in schema else _as_list(schema.get("enum"))
        conditions: list[set[type]] = [
            {each for name in names if isinstance(name, str) for each in KINDS.get(name, ())},
            {each for value in values for each in (KINDS["number"] if isinstance(value, float) else (type(value),))},
            *map(self._find_types, (self._resolve(schema), *_as_list(schema.get("allOf")))),
            *(set[type]().union(*map(self._find_types, _as_list(schema.get(key)))) for key in ("anyOf", "oneOf")),
        ]
        restrictions = [types for types in conditions if types]
        types = (
            set.intersection(*restrictions)
            if restrictions
            else {each for key in IMPLIED if key in schema for each in KINDS[IMPLIED[key]]}
        )
        self._known[id(schema)] = types | ({type(None)} if schema.get("nullable") is True else set())
        return self._known[id(schema)]

    def _resolve(self, schema: Mapping[str, Any]) -> Any:
        """Find the schema that `schema` refers to within `root`, or None. Never uses the network."""
        if not isinstance(reference := schema.get("$ref"), str):
            return None
        from referencing import Registry
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        try:
            return Registry().resolver_with_root(DRAFT202012.create_resource(self._root)).lookup(reference).contents
        except (Unresolvable, ValueError, TypeError, AttributeError):  # the schema may be malformed
            return None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
