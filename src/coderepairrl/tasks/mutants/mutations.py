"""Syntax-tree mutations of Python functions: small, one-line, believable bugs.

Kinds follow mutation testing (operator, comparison and constant replacement: DeMillo, Lipton and Sayward 1978) and
common slips.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise

ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+", "//")),
    ast.Div: ("/", ("*", "//")),
    ast.FloorDiv: ("//", ("%", "*")),
    ast.Mod: ("%", ("//",)),
    ast.Pow: ("**", ("*",)),
}
COMPARISON: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}
REPLACED_NAMES = {  # functions and methods, and what replaces them
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "len": "sum",
    "sum": "len",
    "lower": "upper",
    "upper": "lower",
    "append": "extend",
    "extend": "append",
    "strip": "lstrip",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "startswith": "endswith",
    "endswith": "startswith",
    "find": "rfind",
    "rfind": "find",
    "keys": "values",
    "values": "keys",
    "sorted": "list",
    "ord": "len",
    "abs": "int",
}


@dataclass(frozen=True, slots=True, order=True)
class Mutation:
    """Replacement of characters ``[start, end)`` of source line `line` (from 1) by `text`.

    >>> Mutation(line=1, start=9, end=10, text="-", kind="operator", function="f").apply("return a + b")
    'return a - b'
    """

    line: int
    start: int
    end: int
    text: str
    kind: str
    function: str

    def apply(self, source: str) -> str:
        """Insert the bug into `source`."""
        lines = source.split("\n")  # not at form feeds, as `splitlines` does
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.start] + self.text + old[self.end :]
        return "\n".join(lines)


def list_mutations(source: str, lines: Container[int] | None = None) -> list[Mutation]:
    """Unique mutations of the functions in `source`, in order of place; optionally only on `lines`.

    Docstrings, annotations and decorators stay unchanged. Raises SyntaxError.

    >>> code = "def f(a):\\n    return a < 1\\n"
    >>> "def f(a):\\n    return a <= 1\\n" in [mutation.apply(code) for mutation in list_mutations(code)]
    True
    """
    finder = _MutationFinder(source, lines)
    for node, name in _walk_functions(ast.parse(source)):
        finder.mutate_function(node, name)
    return sorted(finder.mutations, key=lambda m: (m.line, m.start, m.end, m.kind, m.text))


def _walk_functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Top-level functions and methods with dotted names, without nested functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, outer + node.name
        elif isinstance(node, ast.ClassDef):
            yield from _walk_functions(node, f"{outer}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _walk_functions(node, outer)


class _MutationFinder:
    def __init__(self, source: str, wanted: Container[int] | None) -> None:
        self.wanted = wanted
        self.lines = source.split("\n")  # split as in `Mutation.apply`
        self.mutations: set[Mutation] = set()
        self._function = ""
        self._names: list[str] = []

    def mutate_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        self._function = name
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        inner = [n for statement in body for n in ast.walk(statement)]
        stored = [n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self._names = list(dict.fromkeys(n for n in (*parameters, *stored) if n not in ("self", "cls", "_")))
        annotations = {id(sub) for n in inner if isinstance(n, ast.AnnAssign) for sub in ast.walk(n.annotation)}
        for child in inner:
            if id(child) not in annotations and self._is_wanted(child):
                self._mutate_node(child)

    def _is_wanted(self, node: ast.AST) -> bool:
        """Whether `node` touches a wanted line."""
        if self.wanted is None or not isinstance(node, ast.expr | ast.stmt):
            return True
        return any(line in self.wanted for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))

    def _mutate_node(self, node: ast.AST) -> None:
        match node:
            case ast.BinOp(left=left, op=op, right=right) | ast.AugAssign(target=left, op=op, value=right):
                if type(op) in ARITHMETIC:
                    self._replace_operator(left, right, *ARITHMETIC[type(op)], "operator")
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for a, compare, b in zip((left, *comparators), ops, comparators, strict=False):  # a < b < c: twice
                    self._replace_operator(a, b, *COMPARISON[type(compare)], "comparison")
            case ast.BoolOp(op=junction, values=values):
                symbol, other = ("and", "or") if isinstance(junction, ast.And) else ("or", "and")
                for a, b in pairwise(values):
                    self._replace_operator(a, b, symbol, (other,), "boolean")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._replace_node(node, self._get_text(operand), "negation")
            case ast.Constant():
                self._mutate_constant(node)
            case ast.Call():
                self._mutate_call(node)
            case ast.Return(value=ast.expr() as value):
                self._replace_node(node, self._get_text(value), "missing return")
            case ast.If(test=test) | ast.While(test=test):
                if isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
                    self._replace_node(test, f"not {self._get_text(test)}", "negation")
            case ast.Name(ctx=ast.Load()):
                self._mutate_variable(node)
            case ast.Break():
                self._replace_node(node, "continue", "control flow")
            case ast.Continue():
                self._replace_node(node, "break", "control flow")

    def _mutate_constant(self, node: ast.Constant) -> None:
        value = node.value
        if value is True or value is False:
            self._replace_node(node, str(not value), "constant")
        elif isinstance(value, int):
            self._replace_node(node, str(value + 1), "off by one")
            if value > 0:
                self._replace_node(node, str(value - 1), "off by one")
        elif isinstance(value, str) and self._get_text(node)[:1] in "'\"":
            self._replace_node(node, "' '" if value == "" else "''", "constant")

    def _mutate_call(self, node: ast.Call) -> None:
        args = node.args
        if not any(isinstance(a, ast.Starred) for a in args):
            for a, b in pairwise(args):
                if self._is_on_one_line(node) and self._get_text(a) != self._get_text(b):
                    middle = self._slice_line(a.lineno, self._end_column(a), self._start_column(b))
                    text = f"{self._get_text(b)}{middle}{self._get_text(a)}"
                    self._add(a.lineno, self._start_column(a), self._end_column(b), text, "swapped arguments")
        match node.func:
            case ast.Name(id="range") if args:
                stop = args[min(len(args), 2) - 1]
                self._replace_node(stop, f"{self._get_text(stop)} - 1", "off by one")
                self._replace_node(stop, f"{self._get_text(stop)} + 1", "off by one")
            case ast.Name(id=name) if name in REPLACED_NAMES:
                self._replace_node(node.func, REPLACED_NAMES[name], "wrong function")
            case ast.Attribute(attr=name) if name in REPLACED_NAMES and self._is_on_one_line(node.func):
                end = self._end_column(node.func)
                self._add(node.func.lineno, end - len(name), end, REPLACED_NAMES[name], "wrong method")

    def _mutate_variable(self, node: ast.Name) -> None:
        """Replace the name by its neighbours in order of first appearance."""
        if node.id in self._names:
            at = self._names.index(node.id)  # neighbours alone: typical slips, not all combinations
            for other in (at - 1, at + 1):
                if 0 <= other < len(self._names):
                    self._replace_node(node, self._names[other], "wrong variable")

    def _replace_operator(self, a: ast.expr, b: ast.expr, symbol: str, others: tuple[str, ...], kind: str) -> None:
        """Replace the operator `symbol` between two operands on one line."""
        if a.end_lineno != b.lineno:
            return
        start, end = self._end_column(a), self._start_column(b)
        gap = self._slice_line(b.lineno, start, end)
        match = re.search(re.escape(symbol).replace(r"\ ", r"\s+"), gap)  # "not in" may have several spaces
        if match is not None:
            for other in others:
                self._add(b.lineno, start + match.start(), start + match.end(), other, kind)

    def _replace_node(self, node: ast.expr | ast.stmt, text: str, kind: str) -> None:
        if self._is_on_one_line(node) and text != self._get_text(node):
            self._add(node.lineno, self._start_column(node), self._end_column(node), text, kind)

    def _add(self, line: int, start: int, end: int, text: str, kind: str) -> None:
        if self.wanted is None or line in self.wanted:
            self.mutations.add(Mutation(line, start, end, text, kind, self._function))

    @staticmethod
    def _is_on_one_line(node: ast.expr | ast.stmt) -> bool:
        return node.lineno == node.end_lineno

    def _get_text(self, node: ast.expr | ast.stmt) -> str:
        # faster than `ast.get_source_segment`; wrong for nodes of several lines, which are never replaced
        return self._slice_line(node.lineno, self._start_column(node), self._end_column(node))

    def _slice_line(self, line: int, start: int, end: int) -> str:
        return self.lines[line - 1][start:end]

    def _start_column(self, node: ast.expr | ast.stmt) -> int:
        return self._character_column(node.lineno, node.col_offset)

    def _end_column(self, node: ast.expr | ast.stmt) -> int:
        return self._character_column(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _character_column(self, line: int, offset: int) -> int:
        """Character column of the UTF-8 byte offset that `ast` gives."""
        text = self.lines[line - 1]
        return offset if text.isascii() else len(text.encode()[:offset].decode())
