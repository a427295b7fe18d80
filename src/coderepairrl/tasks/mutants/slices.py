"""The shipped corpus, cut into single functions and put together again as tiny repositories."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
"""Data, not modules of ours: pure functions without imports, each with a ``check_`` twin of plain ``assert`` lines."""
UNSEEN_MODULES = frozenset({"games", "grid", "stock"})
"""Modules no function of which is ever trained on. Never move the split."""


@dataclass(frozen=True, slots=True)
class Check:
    """``assert CALL == WANT``, both as source text. Its repr is part of the digest of the corpus (`corpus_digest`).

    >>> Check("mean([1, 3])", "2").statement
    'assert mean([1, 3]) == 2'
    """

    call: str
    want: str

    @property
    def statement(self) -> str:
        """The check as a line of a test script."""
        return f"assert {self.call} == {self.want}"


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the corpus: bare source (no docstring, no annotations) and its checks."""

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
    """Every function of the corpus, in order of module and place."""
    found = []
    for path in sorted(CORPUS.glob("check_*.py")):
        module = path.stem.removeprefix("check_")
        checks: dict[str, list[Check]] = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assert):
                name, check = _check(node)
                checks.setdefault(name, []).append(check)
        for node in ast.parse((CORPUS / f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found.append(Function(module, node.name, _bare(node), tuple(checks[node.name])))
    return tuple(found)


def module_source(parts: Sequence[str]) -> str:
    """Functions as one module, two blank lines apart."""
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def check_script(module: str, names: Sequence[str], checks: Sequence[Check]) -> str:
    """A plain script that ends at the first check that fails."""
    lines = [f"from {module} import {', '.join(sorted(names))}", "", *(check.statement for check in checks)]
    return "\n".join(lines) + "\n"


def _check(node: ast.Assert) -> tuple[str, Check]:
    match node.test:
        case ast.Compare(left=ast.Call(func=ast.Name(id=name)) as call, ops=[_], comparators=[want]):
            return name, Check(ast.unparse(call), ast.unparse(want))
    raise ValueError(f"line {node.lineno}: a check of the corpus reads `assert CALL == WANT`")


def _bare(node: ast.FunctionDef) -> str:
    """Source without docstring and annotations, so that an episode spends its tokens on code."""
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
    """``x: T = value`` as ``x = value``."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        assert node.value is not None
        return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)
