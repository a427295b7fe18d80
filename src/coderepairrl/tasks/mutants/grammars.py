"""Mutations of functions in other languages than Python, by their syntax trees (tree-sitter).

The kinds are those of `mutations`: one change on one line, never in a string or a comment, after which the function
still parses. Whether it compiles is for the compiler to say (`languages`, the option ``build`` of the task source).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING

from coderepairrl.errors import PrerequisiteError
from coderepairrl.tasks.mutants.mutations import Mutation, mutations

if TYPE_CHECKING:
    from tree_sitter import Node, Parser, Tree

COMPILED = frozenset(("java", "go", "rust", "c"))
"""Of which a mutation may be no program at all."""
ARITHMETIC = {"+": ("-",), "-": ("+",), "*": ("+",), "/": ("*",), "%": ("/",), "+=": ("-=",), "-=": ("+=",)}
ARITHMETIC |= {"*=": ("+=",), "/=": ("*=",), "++": ("--",), "--": ("++",)}
COMPARISON = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",)}
COMPARISON |= {"===": ("!==",), "!==": ("===",)}
BOOLEAN = {"&&": ("||",), "||": ("&&",)}
BOUNDS = {"..": ("..=",), "..=": ("..",)}
"""Of a range in Rust."""
_OPERATORS = (
    *((symbol, others, "operator") for symbol, others in ARITHMETIC.items()),
    *((symbol, others, "comparison") for symbol, others in COMPARISON.items()),
    *((symbol, others, "boolean") for symbol, others in BOOLEAN.items()),
    *((symbol, others, "off by one") for symbol, others in BOUNDS.items()),
)
OTHERS = {symbol: (others, kind) for symbol, others, kind in _OPERATORS}
_PAIRS = (
    "min max, floor ceil, push unshift, pop shift, indexOf lastIndexOf, startsWith endsWith, some every, "
    "toLowerCase toUpperCase, HasPrefix HasSuffix, ToLower ToUpper, Index LastIndex, starts_with ends_with, "
    "to_lowercase to_uppercase, find rfind, first last, any all, isupper islower, toupper tolower, strchr strrchr"
)
RIVALS = dict(pair for one, other in map(str.split, _PAIRS.split(", ")) for pair in ((one, other), (other, one)))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FUNCTIONS = _words(
    "function_declaration generator_function_declaration function_expression arrow_function method_definition "
    "method_declaration constructor_declaration function_item function_definition"
)
_CLASSES = _words("class_declaration class interface_declaration enum_declaration impl_item trait_item")
_ASSIGNED = _words(
    "assignment_expression augmented_assignment_expression compound_assignment_expr assignment_statement"
)
_STEPS = _words("update_expression inc_statement dec_statement")
_COMPUTED = _ASSIGNED | _STEPS | _words("binary_expression range_expression")
_CALLS = _words("call_expression method_invocation")
_DROPPED = _ASSIGNED | _STEPS | _CALLS
_VALUES = _CALLS | _words(
    "identifier member_expression field_expression field_access selector_expression subscript_expression "
    "array_access index_expression"
)
_INTEGERS = _words("number decimal_integer_literal int_literal integer_literal number_literal")
_STRINGS = _words("string string_literal interpreted_string_literal")
_SPREAD = _words("spread_element variadic_argument")
_DECLARES = _words(
    "formal_parameter.name variable_declarator.name enhanced_for_statement.name parameter_declaration.name "
    "short_var_declaration.left range_clause.left var_spec.name parameter.pattern let_declaration.pattern "
    "for_expression.pattern parameter_declaration.declarator init_declarator.declarator declaration.declarator "
    "for_in_statement.left assignment_pattern.left arrow_function.parameter"
)
"""Where a variable gets its name: the type of a node, and its field."""
_NO_VARIABLES = _words("_ self this")


@cache
def parser(language: str) -> Parser:
    """Of `javascript`, `java`, `go`, `rust` or `c`. Raises `PrerequisiteError` where its grammar is not installed."""
    try:
        library, grammar = import_module("tree_sitter"), import_module(f"tree_sitter_{language}")
    except ImportError as error:
        raise PrerequisiteError(
            f"the grammar of {language} is not installed: {error}",
            fix=f"pip install tree-sitter tree-sitter-{language}",
        ) from error
    made: Parser = library.Parser(library.Language(grammar.language()))
    return made


def mutations_in(source: str, language: str) -> list[Mutation]:
    """All mutations of the functions in `source`, in order of place, each once, in any language.

    Functions with errors are left alone, but for Python, where one is a SyntaxError. Raises `PrerequisiteError` as
    `parser` does.

    >>> code = "int f(int a) {\\n    return a < 1;\\n}\\n"
    >>> "int f(int a) {\\n    return a <= 1;\\n}\\n" in [mutation.apply(code) for mutation in mutations_in(code, "c")]
    True
    """
    if language == "python":
        return mutations(source)
    data = source.encode()
    tree = parser(language).parse(data)
    found: set[Mutation] = set()
    for node, name in _functions(tree.root_node):
        if not node.has_error:
            found |= _Finder(data, tree, parser(language), node, name).found
    return sorted(found, key=lambda m: (m.line, m.start, m.end, m.kind, m.text))


def declared(source: str, language: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the functions in `source`, and of their parameters and variables; not of Python.

    Raises `PrerequisiteError` as `parser` does.

    >>> declared("int f(int a) {\\n    int b = a;\\n    return b;\\n}\\n", "c")
    (('f',), ('a', 'b'))
    """
    found = list(_functions(parser(language).parse(source.encode()).root_node))
    variables = dict.fromkeys(name for node, _ in found for name in _variables(node)[0])
    return tuple(dict.fromkeys(name.rpartition(".")[2] for _, name in found)), tuple(variables)


def _functions(node: Node, outer: str = "") -> Iterator[tuple[Node, str]]:
    """Outermost functions and methods that are no tests, with their dotted names."""
    for child in node.children:
        if child.type == "mod_item" and _text(child.child_by_field_name("name") or child) in ("test", "tests"):
            continue  # Rust has them beside the code
        if child.type in _FUNCTIONS and child.child_by_field_name("body") is not None:
            yield child, outer + _name(child)
        else:
            inside = child.child_by_field_name("type" if child.type == "impl_item" else "name")
            within = f"{outer}{_text(inside)}." if child.type in _CLASSES and inside is not None else outer
            yield from _functions(child, within)


def _name(function: Node) -> str:
    """Of the function itself, or of what it is assigned to."""
    node: Node | None = function
    if function.child_by_field_name("name") is None and function.child_by_field_name("declarator") is None:
        node = function.parent
    for field in ("name", "declarator", "key", "left"):
        while node is not None and (inner := node.child_by_field_name(field)) is not None:
            node = inner
    return _text(node) if node is not None and not node.children else "function"


def _walk(node: Node) -> Iterator[Node]:
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        todo += reversed(node.children)


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


class _Finder:
    """Collects the mutations of one function."""

    def __init__(self, data: bytes, tree: Tree, parser: Parser, function: Node, name: str) -> None:
        self.found: set[Mutation] = set()
        self._data = data
        self._lines = data.split(b"\n")
        self._tree = tree
        self._parser = parser
        self._function = function
        self._name = name
        self._variables, self._written = _variables(function)
        body = function.child_by_field_name("body")
        assert body is not None
        for node in _walk(body):
            self._visit(node)

    def _visit(self, node: Node) -> None:
        if node.type in _COMPUTED:
            for child in node.children:
                if child.type in OTHERS:
                    others, kind = OTHERS[child.type]
                    for other in others:
                        self._replace(child, other, kind)
        elif node.type in _INTEGERS and re.fullmatch(r"0|[1-9]\d{0,17}", _text(node)):
            value = int(_text(node))
            self._replace(node, str(value + 1), "off by one")
            if value:
                self._replace(node, str(value - 1), "off by one")
        elif node.type in ("true", "false") and not node.children:
            self._replace(node, "false" if node.type == "true" else "true", "constant")
        elif node.type in _STRINGS and not (text := _text(node)).startswith('"""'):
            self._replace(node, f"{text[0]} {text[0]}" if len(text) == 2 else text[0] * 2, "constant")
        elif node.type in _CALLS:
            self._call(node)
        elif node.type in ("argument_list", "arguments"):
            self._arguments(node)
        elif node.type == "unary_expression" and node.children[0].type == "!":
            self._replace(node, _text(node)[1:], "negation")
        elif node.type in ("if_statement", "if_expression", "while_statement", "while_expression"):
            self._condition(node)
        elif node.type in ("return_statement", "return_expression"):
            self._returned(node)
        elif node.type in ("break", "continue") and node.parent and _text(node.parent).rstrip("; ") == node.type:
            self._replace(node, "continue" if node.type == "break" else "break", "control flow")
        elif node.type == "identifier" and node.start_byte not in self._written:
            self._variable(node)
        if node.parent is not None and node.parent.type not in ("for_statement", "for_clause"):
            self._statement(node)

    def _call(self, node: Node) -> None:
        callee = node.child_by_field_name("name") or node.child_by_field_name("function")
        bare = callee is not None and callee.type == "identifier" and node.child_by_field_name("object") is None
        kind = "wrong function" if bare else "wrong method"
        while callee is not None and callee.children:
            callee = callee.child_by_field_name("property") or callee.child_by_field_name("field")
        if callee is not None and _text(callee) in RIVALS:
            self._replace(callee, RIVALS[_text(callee)], kind)

    def _arguments(self, node: Node) -> None:
        """Neighbours change places."""
        given = [child for child in node.named_children if "comment" not in child.type]
        if not _SPREAD & {child.type for child in given}:
            for a, b in pairwise(given):
                if _text(a) != _text(b):
                    between = self._data[a.end_byte : b.start_byte].decode("utf-8", "replace")
                    text = f"{_text(b)}{between}{_text(a)}"
                    self._add(a, b, text, "swapped arguments")

    def _condition(self, node: Node) -> None:
        condition = node.child_by_field_name("condition")
        while condition is not None and condition.type == "parenthesized_expression":
            condition = condition.named_children[0] if condition.named_child_count == 1 else None
        if condition is not None and condition.type in _VALUES:
            self._replace(condition, f"!{_text(condition)}", "negation")

    def _returned(self, node: Node) -> None:
        """Another value: one more, or the opposite of a comparison."""
        value = node
        while value.type in (node.type, "expression_list") and value.named_child_count == 1:
            value = value.named_children[0]
        if value.type == "binary_expression":
            symbols = {child.type for child in value.children}
            if symbols & (COMPARISON.keys() | BOOLEAN.keys()):
                self._replace(value, f"!({_text(value)})", "returned value")
        if value.type in _VALUES:
            self._replace(value, f"{_text(value)} + 1", "returned value")

    def _variable(self, node: Node) -> None:
        """The neighbours of the name in the order of first appearance, as in Python."""
        if (name := _text(node)) in self._variables:
            at = self._variables.index(name)
            for other in (at - 1, at + 1):
                if 0 <= other < len(self._variables):
                    self._replace(node, self._variables[other], "wrong variable")

    def _statement(self, node: Node) -> None:
        """A statement that has its line to itself is lost; the line stays, empty."""
        dropped = node.type in ("assignment_statement", "inc_statement", "dec_statement") or (
            node.type == "expression_statement" and node.named_child_count == 1 and node.children[0].type in _DROPPED
        )
        line = self._lines[node.start_point.row]
        if dropped and line.strip() == (node.text or b""):
            end = len(line.rstrip(b"\r").decode("utf-8", "replace"))
            self.found.add(Mutation(node.start_point.row + 1, 0, end, "", "missing statement", self._name))

    def _replace(self, node: Node, text: str, kind: str) -> None:
        if text != _text(node):
            self._add(node, node, text, kind)

    def _add(self, first: Node, last: Node, text: str, kind: str) -> None:
        start, end = first.start_point, last.end_point
        if start.row == end.row and self._parses(first, last, text.encode()):
            line = self._lines[start.row]
            begin, stop = (len(line[: at.column].decode("utf-8", "replace")) for at in (start, end))
            self.found.add(Mutation(start.row + 1, begin, stop, text, kind, self._name))

    def _parses(self, first: Node, last: Node, text: bytes) -> bool:
        """Whether the function is still one, without an error in it."""
        start, end = first.start_byte, last.end_byte
        column = first.start_point.column
        edited = self._tree.copy()
        edited.edit(
            start_byte=start,
            old_end_byte=end,
            new_end_byte=start + len(text),
            start_point=first.start_point,
            old_end_point=last.end_point,
            new_end_point=(first.start_point.row, column + len(text)),
        )
        changed = self._parser.parse(self._data[:start] + text + self._data[end:], edited)
        own = self._function
        grown = own.end_byte + len(text) - (end - start)
        node = changed.root_node.descendant_for_byte_range(own.start_byte, grown)
        return node is not None and not node.has_error and (node.start_byte, node.end_byte) == (own.start_byte, grown)


def _variables(function: Node) -> tuple[list[str], set[int]]:
    """Names of parameters and variables in the order of appearance, and where names stand that are no values."""
    names: dict[str, None] = {}
    no_values: set[int] = set()
    for node in _walk(function):
        for index, child in enumerate(node.children):
            field = node.field_name_for_child(index) or ""
            declared = f"{node.type}.{field}" in _DECLARES and child.type != "init_declarator"
            if declared or (node.type == "formal_parameters" and child.type == "identifier"):
                inside = [each for each in _walk(child) if each.type == "identifier"]
                names |= dict.fromkeys(_text(each) for each in inside)
                no_values |= {each.start_byte for each in inside}
            if (node.type in _ASSIGNED and field == "left") or (node.type in _CALLS and field in ("function", "name")):
                inside = child.children if child.type == "expression_list" else [child]
                no_values |= {each.start_byte for each in inside if each.type == "identifier"}
    return [name for name in names if name not in _NO_VARIABLES], no_values
