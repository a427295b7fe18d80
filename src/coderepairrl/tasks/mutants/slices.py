"""The shipped corpus, cut into single functions and put together again as tiny repositories."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from coderepairrl.tasks.mutants.languages import LANGUAGES, SCRIPT

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
    """In Python, whatever the language."""
    language: str = "python"

    @property
    def key(self) -> str:
        """``module.name``, or ``language/module.name`` of another language than Python."""
        return f"{'' if self.language == 'python' else f'{self.language}/'}{self.module}.{self.name}"


@cache
def functions(language: str = "python") -> tuple[Function, ...]:
    """Every function of the corpus, in order of module and place. Other languages have some of those in Python."""
    if language != "python":
        return tuple(_translated(language))
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


def _translated(language: str) -> Iterator[Function]:
    layout, own = LANGUAGES[language], {f.key: f for f in functions()}
    for path in sorted((CORPUS / language).iterdir()):
        names = {layout.spelled(f.name): f.name for f in own.values() if f.module == path.stem}
        for source in path.read_text(encoding="utf-8").rstrip("\n").split("\n\n"):
            name = names[next(word for word in re.findall(r"\w+", source) if word in names)]
            yield Function(path.stem, name, f"{source}\n", own[f"{path.stem}.{name}"].checks, language)


class Repository(NamedTuple):
    """A file of functions at `path`, and how they are checked: files by path, and the command."""

    path: str
    text: str
    tests: Mapping[str, str]
    command: tuple[str, ...]


def repository(parts: Sequence[Function]) -> Repository:
    """Functions of one module and language as a tiny repository."""
    module, names = parts[0].module, [f.name for f in parts]
    checks = [check for f in parts for check in f.checks]
    sources = [f.source for f in parts]
    if parts[0].language == "python":
        tests = {f"test_{module}.py": check_script(module, names, checks)}
        # -S -E and -B: 10 ms instead of 20, no environment, no bytecode in the diff
        return Repository(f"{module}.py", module_source(sources), tests, ("python3", "-S", "-E", "-B", *tests))
    layout = LANGUAGES[parts[0].language]
    program = layout.tests_text(module, names, [(check.call, check.want) for check in checks])
    return Repository(
        layout.module_path(module),
        layout.module_text(module, names, sources),
        {layout.tests_path(module): program, SCRIPT: layout.script(module)},
        ("sh", SCRIPT),
    )


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
