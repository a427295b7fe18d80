"""Python functions specified by docstrings, and files with one of them masked by a comment.

Selection and comment follow the original's code for The Stack, except for stricter detection of SQL.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

IMPLEMENT = "implement"
"""Kind of tasks in which a function is to be written."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef

_LEAST = 50
_BOILERPLATE = ("# noqa", ":rtype:", "Gets the", "Sets the")
_SECTIONS = re.compile(r"(?:Args|Arguments|Parameters|Params|Returns|Yields|Raises|Examples):|Example", re.IGNORECASE)
_SENTENCES, _SENTENCE = 3, 10
_MOST_VARIABLES = 15
_STATEMENTS = 4
_SQL = re.compile(
    r"\b(?:SELECT\b.+\bFROM|INSERT\s+INTO|UPDATE\b.+\bSET|DELETE\s+FROM|(?:CREATE|DROP|ALTER)\s+TABLE)\b",
    re.IGNORECASE | re.DOTALL,
)
_ACCESSORS = {"property", "cached_property", "setter", "getter", "deleter"}


@dataclass(frozen=True, slots=True)
class Function:
    r"""A function or method with a docstring. Lines count from 1, `end` included, with decorators.

    >>> [found] = find_functions('@cache\ndef f(x):\n    "Doubles."\n    return 2 * x\n')
    >>> found.name, found.comment, found.header
    ('f', '# MASKED: f function (lines 1-4)', '@cache\ndef f(x):\n    "Doubles."')
    """

    name: str
    """Qualified name in its module: ``f``, ``Class.f``, ``f.<locals>.g``."""
    start: int
    end: int
    docstring: str
    header: str
    """Source of decorators, signature and docstring."""
    problem: str
    """Reason that it makes a poor task (plural: ``are simple``), or empty."""

    @property
    def comment(self) -> str:
        """Comment that replaces it."""
        return f"# MASKED: {self.name.rpartition('.')[2]} function (lines {self.start}-{self.end})"

    def masked(self, source: str) -> str:
        """Replace the function in `source` by `comment`."""
        lines = source.split("\n")
        ended = "\r" if lines[self.end - 1].endswith("\r") else ""
        return "\n".join([*lines[: self.start - 1], self.comment + ended, *lines[self.end :]])


def find_functions(source: str) -> list[Function]:
    """Functions with docstrings, in line order. Raises SyntaxError, and ValueError for NUL characters."""
    return sorted(_function_at(_parse_module(source), source.split("\n"), ""), key=lambda found: found.start)


def parses(source: str) -> bool:
    """Whether `source` is valid Python."""
    try:
        _parse_module(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parse_module(source: str) -> ast.Module:
    with warnings.catch_warnings():  # of invalid escapes
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _function_at(node: ast.AST, lines: list[str], within: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            docstring = ast.get_docstring(child)
            if docstring:
                start = min((each.lineno for each in child.decorator_list), default=child.lineno)
                header = "\n".join(lines[start - 1 : child.body[0].end_lineno]).replace("\r", "")
                end = child.end_lineno or child.lineno
                problem = _poor_docstring(docstring) or _poor_code(child)
                yield Function(within + child.name, start, end, docstring, header, problem)
            yield from _function_at(child, lines, f"{within}{child.name}.<locals>.")
        else:
            yield from _function_at(
                child, lines, f"{within}{child.name}." if isinstance(child, ast.ClassDef) else within
            )


def _poor_docstring(docstring: str) -> str:
    if len(docstring) < _LEAST or len(docstring.strip("\"' \t\n")) < 0.8 * _LEAST:
        return f"have a docstring of less than {_LEAST} characters"
    if len([line for line in docstring.split("\n") if line.strip()]) < 2:
        return "have a docstring of one line"
    if any(words in docstring for words in _BOILERPLATE):
        return "have a docstring of set phrases"
    sentences = [part for part in re.split(r"[.!?]+", docstring) if len(part.strip()) > _SENTENCE]
    if not _SECTIONS.search(docstring) and len(sentences) < _SENTENCES:
        return f"have a docstring with no section and less than {_SENTENCES} sentences"
    return ""


def _poor_code(node: _Definition) -> str:
    decorators = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    if _ACCESSORS & {getattr(each, "id", getattr(each, "attr", "")) for each in decorators}:
        return "are properties"
    branches = any(isinstance(each, ast.If | ast.For | ast.While) for each in node.body)
    if len(node.body) <= 2 or (len(node.body) < _STATEMENTS and not branches):
        return "are simple"
    code = (part for statement in node.body[1:] for part in ast.walk(statement))
    texts = (part.value for part in code if isinstance(part, ast.Constant) and isinstance(part.value, str))
    if any(_SQL.search(text) for text in texts):
        return "have SQL in them"
    stored = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    if len(stored | {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}) > _MOST_VARIABLES:
        return f"have more than {_MOST_VARIABLES} variables"
    return ""
