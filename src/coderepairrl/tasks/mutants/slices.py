"""Single functions of the shipped corpus, and tiny repositories made of them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(__file__).parent / "corpus"
"""Data, not modules of ours: pure functions without imports, each with a ``check_`` twin of plain ``assert`` lines."""
UNSEEN_MODULES = frozenset({"games", "grid", "stock"})
"""Modules no function of which is ever trained on. Never move the split."""


@dataclass(frozen=True, slots=True)
class Check:
    """``assert CALL == WANT`` as source text; its repr is part of `corpus_digest`.

    >>> Check("mean([1, 3])", "2").statement
    'assert mean([1, 3]) == 2'
    """

    call: str
    want: str

    @property
    def statement(self) -> str:
        """Check as a line of a test script."""
        return f"assert {self.call} == {self.want}"


@dataclass(frozen=True, slots=True)
class Function:
    """A corpus function: source without docstring and annotations, and its checks."""

    module: str
    name: str
    source: str
    checks: tuple[Check, ...]

    @property
    def key(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"


@cache
def functions() -> tuple[Function, ...]:
    """All corpus functions, in order of module and place."""
    corpus_functions = []
    for path in sorted(CORPUS.glob("check_*.py")):
        module = path.stem.removeprefix("check_")
        checks: dict[str, list[Check]] = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assert):
                name, check = _check(node)
                checks.setdefault(name, []).append(check)
        for node in ast.parse((CORPUS / f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef):
                corpus_functions.append(Function(module, node.name, bare(node), tuple(checks[node.name])))
    return tuple(corpus_functions)


class Repository(NamedTuple):
    """A file of functions at `path`, and the script `tests` that checks it."""

    path: str
    text: str
    tests: dict[str, str]
    command: tuple[str, ...]


def repository(parts: Sequence[Function]) -> Repository:
    """Functions of one module as a tiny repository, with a script that ends at the first failing check."""
    module = parts[0].module
    names = ", ".join(sorted(f.name for f in parts))
    lines = [f"from {module} import {names}", "", *(check.statement for f in parts for check in f.checks)]
    tests = {f"test_{module}.py": "\n".join(lines) + "\n"}
    text = "\n\n\n".join(f.source.strip("\n") for f in parts) + "\n"
    # -S -E and -B: 10 ms instead of 20, no environment, no bytecode in the diff
    return Repository(f"{module}.py", text, tests, ("python3", "-S", "-E", "-B", *tests))


def _check(node: ast.Assert) -> tuple[str, Check]:
    match node.test:
        case ast.Compare(left=ast.Call(func=ast.Name(id=name)) as call, ops=[_], comparators=[want]):
            return name, Check(ast.unparse(call), ast.unparse(want))
    raise ValueError(f"line {node.lineno}: a check of the corpus reads `assert CALL == WANT`")


def bare(node: ast.FunctionDef) -> str:
    """Source without docstring and annotations, which would cost an episode tokens."""
    tree = ast.parse(ast.unparse(node))
    for sub in ast.walk(tree):
        match sub:
            case ast.FunctionDef():
                sub.returns = None
                sub.body = sub.body[1:] if ast.get_docstring(sub) is not None else sub.body
            case ast.arg():
                sub.annotation = None
    return ast.unparse(_Plain().visit(tree)) + "\n"


class _Plain(ast.NodeTransformer):
    """Turn ``x: T = value`` into ``x = value``, and ``x: T`` into ``pass``."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)
