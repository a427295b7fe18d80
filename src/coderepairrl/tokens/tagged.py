"""Readers of calls whose arguments are not one JSON object after Qwen's tags: GLM, DeepSeek, Gemma 4, MiniMax, Seed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from coderepairrl.tokens.reading import (
    Calls,
    Reader,
    Tool,
    after_thoughts,
    find,
    from_json,
    properties,
    split,
    tagged,
    typed,
)


def functions(text: str, tools: Sequence[Tool]) -> Calls | None:
    """Calls as Qwen3-Coder, Nemotron and Seed write them: a tag for the function and one for each parameter.

    Values keep their whitespace but for one newline at either end: code needs the indentation that `renderers` strips.
    None for text between the tags, and for a parameter given twice: a call without them would be another call.
    """
    calls: Calls = []
    text, at = text.strip(), 0
    while at < len(text):
        function = _FUNCTION.match(text, at)
        if function is None:
            return None
        wanted, arguments, at = properties(tools, function[1]), {}, function.end()
        while parameter := _PARAMETER.match(text, at):
            name, value = parameter.groups()
            if name in arguments or "<parameter=" in value:
                return None
            arguments[name], at = typed(value, wanted.get(name) or {}), parameter.end()
        end = _FUNCTION_END.match(text, at)
        if end is None:
            return None
        calls.append((function[1], arguments))
        at = end.end()
    return calls or None


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>")


def seed_oss(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """`functions` between Seed's own tags."""
    return tagged(reader, ids, thinking, SEED, lambda block: functions(reader.decode(block), tools))


def glm(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """A name, then keys and values, each between tokens. Values are exact; what the schema calls no text is JSON."""
    key, key_end, value, value_end = map(reader.convert_tokens_to_ids, GLM_ARGUMENTS)

    def block(inner: list[int]) -> Calls | None:
        title, *pairs = split(inner, key)
        name = reader.decode(title).strip()
        wanted, arguments = properties(tools, name), {}
        for pair in pairs:
            marks = [token for token in pair if token in (key_end, value, value_end)]
            if marks != [key_end, value, value_end]:
                return None
            at, begins, ends = (pair.index(mark) for mark in marks)
            if reader.decode([*pair[at + 1 : begins], *pair[ends + 1 :]]).strip():
                return None
            argument = reader.decode(pair[:at]).strip()
            arguments[argument] = typed(reader.decode(pair[begins + 1 : ends]), wanted.get(argument) or {})
        return [(name, arguments)] if name and not {key_end, value, value_end} & set(title) else None

    return tagged(reader, ids, thinking, QWEN, block)


_FENCED = re.compile(r"\s*([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


def _deepseek(read: Callable[[str, str], tuple[str, str] | None]) -> Any:
    """A reader of DeepSeek's section of calls; `read` takes what stands before and after the separator."""

    def reply(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
        begin, end, between = map(reader.convert_tokens_to_ids, DEEPSEEK_CALL)

        def block(inner: list[int]) -> Calls | None:
            head, *parts = split(inner, begin)
            calls: Calls = []
            for part in parts:
                call, *rest = split(part, end)
                halves = split(call, between)
                if len(rest) != 1 or reader.decode(rest[0]).strip() or len(halves) != 2:
                    return None
                found = read(*map(reader.decode, halves))
                arguments = from_json(found[1]) if found else None
                if found is None or not found[0] or not isinstance(arguments, dict):
                    return None
                calls.append((found[0], arguments))
            return None if reader.decode(head).strip() else calls

        return tagged(reader, ids, thinking, DEEPSEEK, block)

    return reply


deepseek_v31 = _deepseek(lambda name, arguments: (name.strip(), arguments))
"""The name before the separator, the JSON after it."""


@_deepseek
def deepseek_v3(kind: str, call: str) -> tuple[str, str] | None:
    """The word *function* before the separator, the name and fenced JSON after it."""
    found = _FENCED.fullmatch(call)
    return (found[1].strip(), found[2]) if found and kind.strip() == "function" else None


_INVOKE = re.compile(r'<invoke name="([^"\n]+)">(.*?)</invoke>', re.DOTALL)
_ARGUMENT = re.compile(r'<parameter name="([^"\n]+)">(.*?)</parameter>', re.DOTALL)


def minimax(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """Tags of ordinary text for each function and parameter, all calls within one block. Values are exact."""

    def block(inner: list[int]) -> Calls | None:
        text = reader.decode(inner)
        calls: Calls = []
        for name, body in _INVOKE.findall(text):
            if _ARGUMENT.sub("", body).strip():
                return None
            wanted = properties(tools, name)
            calls.append((name, {key: typed(value, wanted.get(key) or {}) for key, value in _ARGUMENT.findall(body)}))
        return None if _INVOKE.sub("", text).strip() else calls

    return tagged(reader, ids, thinking, MINIMAX, block)


_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_GEMMA_CALL = re.compile(r"\s*call:([^{\s]+)(\{.*\})\s*", re.DOTALL)


def gemma4(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """``call:``, a name, and a JSON object whose keys stand bare and whose strings stand between tokens."""
    quote, channel, end = map(reader.convert_tokens_to_ids, ('<|"|>', "<|channel>", "<channel|>"))

    def block(inner: list[int]) -> Calls | None:
        parts = split(inner, quote)
        texts = [
            json.dumps(reader.decode(part)) if at % 2 else _KEY.sub(r'\1"\2":', reader.decode(part))
            for at, part in enumerate(parts)
        ]
        call = _GEMMA_CALL.fullmatch("".join(texts)) if len(parts) % 2 else None
        arguments = from_json(call[2]) if call else None
        return [(call[1], arguments)] if call and isinstance(arguments, dict) else None

    at, reasoning = 0, ""
    if thinking or ids[:1] == [channel]:
        stop = find(ids, end, 0)
        at = stop + 1 if stop < len(ids) else find(ids, reader.convert_tokens_to_ids(GEMMA4[0]), 0)
        thoughts = [token for token in ids[: min(stop, at)] if token != channel]
        reasoning = reader.decode(thoughts).removeprefix("thought\n").strip()
    reply = after_thoughts(reader, ids, at, reasoning, GEMMA4, block)
    if reply.tool_calls:  # its template writes words behind calls
        words = reader.decode(ids[reply.tool_calls[-1].token_span[1] :]).strip()
        reply.content = "\n".join(part for part in (reply.content, words) if part)
    return reply


QWEN = ("<tool_call>", "</tool_call>")
SEED = ("<seed:tool_call>", "</seed:tool_call>")
MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
GEMMA4 = ("<|tool_call>", "<tool_call|>")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
GLM_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
