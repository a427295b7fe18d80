"""Calls as Python, ``name(key="value", ...)``: in a list (LFM2, Llama 4), or one per line (OLMo 3)."""

from __future__ import annotations

import ast
import io
import json
import keyword
import math
import re
import tokenize
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from coderepairrl.tokens.reading import Calls, Invocation, ParsedCall, ParsedReply, TokenReader, Tool

LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
OLMO3 = ("<function_calls>", "</function_calls>")
LLAMA4 = ("<|python_start|>", "<|python_end|>")
JSON_NAMES = {"true": True, "false": False, "null": None}
RESERVED = "_reserved"
BITS = 1024
"""Largest integers that are read: a short hexadecimal literal can be huge, and is not JSON."""
TRIED = 4
"""Most places at which a list of calls is looked for after words."""


class _InvalidCall(Exception):
    """Invalid call: not only literals as keyword arguments."""


def parse_python_calls(text: str, tools: Sequence[Tool] = ()) -> Calls | None:
    """Parse calls in a list, or on separate lines; None for anything else.

    Values are literals of Python, or JSON's ``true``, ``false`` and ``null``.
    """
    tree = _parse_tree(text.strip())
    if tree is None:
        return None
    nodes: list[ast.AST] = []
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        nodes += value.elts if isinstance(value, ast.List) else [value]
    try:
        return [_read_call(node) for node in nodes] or None
    except _InvalidCall:
        return None


def _parse_tree(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for unknown escapes
        try:
            return ast.parse(text)
        except SyntaxError:
            pass
        except (ValueError, MemoryError, RecursionError):
            return None
        try:
            return ast.parse(_mark_keywords(text))
        except (SyntaxError, ValueError, MemoryError, RecursionError, tokenize.TokenError):
            return None


def _mark_keywords(text: str) -> str:
    # ``from="a"``
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.split("\n")  # as the tokenizer of Python does
    for token, following in reversed(list(pairwise(tokens))):
        if keyword.iskeyword(token.string) and following.string == "=":
            row, column = token.end
            lines[row - 1] = f"{lines[row - 1][:column]}{RESERVED}{lines[row - 1][column:]}"
    return "\n".join(lines)


def _read_call(node: ast.AST) -> Invocation:
    if not isinstance(node, ast.Call) or node.args:
        raise _InvalidCall
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        name = argument.arg or ""
        if keyword.iskeyword(name.removesuffix(RESERVED)):
            name = name.removesuffix(RESERVED)
        if not name or name in arguments:
            raise _InvalidCall
        arguments[name] = _read_value(argument.value)
    return Invocation(_read_name(node.func), arguments)


def _read_name(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise _InvalidCall
    return ".".join([node.id, *reversed(parts)])


def _read_value(node: ast.AST) -> Any:
    if isinstance(node, ast.List):
        return [_read_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_read_value(key) if key else None for key in node.keys]
        if len(set(map(str, keys))) < len(keys) or not all(isinstance(key, str) for key in keys):
            raise _InvalidCall
        return dict(zip(keys, map(_read_value, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in JSON_NAMES:
        return JSON_NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _read_value(node.operand)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _InvalidCall
        return -value
    value = node.value if isinstance(node, ast.Constant) else ...
    if value is None or isinstance(value, (str, bool)):
        return value
    is_integer = isinstance(value, int) and value.bit_length() <= BITS
    if is_integer or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise _InvalidCall


def write_python_list(calls: Calls) -> str:
    """Write `calls` as a list. Raises ValueError for names and numbers that Python cannot write."""
    return "[" + ", ".join(map(_format_pythonic_call, calls)) + "]"


def write_python_lines(calls: Calls) -> str:
    """Write `calls`, one per line. Raises as `write_python_list`."""
    return "\n".join(map(_format_pythonic_call, calls))


def _format_pythonic_call(call: Invocation) -> str:
    for name in (*call.name.split("."), *call.arguments):
        if not name.isidentifier():
            raise ValueError(f"{name!r} in a call of {call.name!r} cannot be written as Python")
    return f"{call.name}({', '.join(f'{key}={_format_literal(value)}' for key, value in call.arguments.items())})"


def _format_literal(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_literal(key)}: {_format_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_literal, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def parse_bare_list(reader: TokenReader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """List at the end of a reply, perhaps within Llama 4's python tokens."""
    # the name of one of `tools` after the bracket alone distinguishes it from words
    tags = {reader.convert_tokens_to_ids(tag) for tag in LLAMA4}
    text = reader.decode([token for token in ids if token not in tags]).strip()
    names = {tool["function"]["name"] for tool in tools}
    places = [match.start() for match in _BEGINS.finditer(text) if match[1] in names][:TRIED]
    span = (0, len(ids))
    for at in places:
        calls = parse_python_calls(text[at:])
        if calls:
            return ParsedReply(text[:at].strip(), calls=[ParsedCall(span, *call) for call in calls])
    return ParsedReply("", calls=[ParsedCall(span)]) if places[:1] == [0] else ParsedReply(text)


_BEGINS = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
