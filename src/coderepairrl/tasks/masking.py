"""Find Python functions that a docstring specifies, and replace one of them by a comment.

Selection and comment follow the code for The Stack in ``ASSERT-KTH/CodeRepairRL``, but SQL is detected more strictly.
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

_MIN_DOCSTRING = 50
_BOILERPLATE = ("# noqa", ":rtype:", "Gets the", "Sets the")
_SECTIONS = re.compile(r"(?:Args|Arguments|Parameters|Params|Returns|Yields|Raises|Examples):|Example", re.IGNORECASE)
_MIN_SENTENCES, _MIN_SENTENCE_LENGTH = 3, 10
_MAX_VARIABLES = 15
_MIN_STATEMENTS = 4  # including the docstring; fewer if one of them branches or loops
_SQL = re.compile(
    r"\b(?:SELECT\b.+\bFROM|INSERT\s+INTO|UPDATE\b.+\bSET|DELETE\s+FROM|(?:CREATE|DROP|ALTER)\s+TABLE)\b",
    re.IGNORECASE | re.DOTALL,
)
_ACCESSORS = {"property", "cached_property", "setter", "getter", "deleter"}


@dataclass(frozen=True, slots=True)
class Function:
    r"""Function or method with a docstring. Line numbers begin at 1, and include decorators and `end`.

    >>> [function] = find_functions('@cache\ndef f(x):\n    "Doubles."\n    return 2 * x\n')
    >>> function.name, function.comment, function.header
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
    """Reason that it makes a poor task, as a verb in the plural (``are simple``), or empty."""

    @property
    def comment(self) -> str:
        """Comment that replaces the function."""
        return f"# MASKED: {self.name.rpartition('.')[2]} function (lines {self.start}-{self.end})"

    def mask(self, source: str) -> str:
        """Replace the function in `source` by `comment`."""
        lines = source.split("\n")
        line_end = "\r" if lines[self.end - 1].endswith("\r") else ""
        return "\n".join([*lines[: self.start - 1], self.comment + line_end, *lines[self.end :]])


def find_functions(source: str) -> list[Function]:
    """Find functions with docstrings, in line order. Raises SyntaxError, and ValueError for NUL characters."""
    return sorted(_walk_functions(_parse_module(source), source.split("\n"), ""), key=lambda function: function.start)


def is_valid_python(source: str) -> bool:
    """Whether `source` is valid Python."""
    try:
        _parse_module(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parse_module(source: str) -> ast.Module:
    with warnings.catch_warnings():  # about invalid escapes
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _walk_functions(node: ast.AST, lines: list[str], prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            docstring = ast.get_docstring(child)
            if docstring:
                start = min((each.lineno for each in child.decorator_list), default=child.lineno)
                header = "\n".join(lines[start - 1 : child.body[0].end_lineno]).replace("\r", "")
                end = child.end_lineno or child.lineno
                problem = _find_docstring_problem(docstring) or _find_code_problem(child)
                yield Function(prefix + child.name, start, end, docstring, header, problem)
            yield from _walk_functions(child, lines, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _walk_functions(
                child, lines, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
            )


def _find_docstring_problem(docstring: str) -> str:
    if len(docstring) < _MIN_DOCSTRING or len(docstring.strip("\"' \t\n")) < 0.8 * _MIN_DOCSTRING:
        return f"have a docstring of less than {_MIN_DOCSTRING} characters"
    if len([line for line in docstring.split("\n") if line.strip()]) < 2:
        return "have a docstring of one line"
    if any(words in docstring for words in _BOILERPLATE):
        return "have a docstring of set phrases"
    sentences = [part for part in re.split(r"[.!?]+", docstring) if len(part.strip()) > _MIN_SENTENCE_LENGTH]
    if not _SECTIONS.search(docstring) and len(sentences) < _MIN_SENTENCES:
        return f"have a docstring with no section and less than {_MIN_SENTENCES} sentences"
    return ""


def _find_code_problem(node: _Definition) -> str:
    decorators = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    if _ACCESSORS & {getattr(each, "id", getattr(each, "attr", "")) for each in decorators}:
        return "are properties"
    branches = any(isinstance(each, ast.If | ast.For | ast.While) for each in node.body)
    if len(node.body) <= 2 or (len(node.body) < _MIN_STATEMENTS and not branches):
        return "are simple"
    code = (part for statement in node.body[1:] for part in ast.walk(statement))
    texts = (part.value for part in code if isinstance(part, ast.Constant) and isinstance(part.value, str))
    if any(_SQL.search(text) for text in texts):
        return "have SQL in them"
    assigned = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    if len(assigned | {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}) > _MAX_VARIABLES:
        return f"have more than {_MAX_VARIABLES} variables"
    return ""
