"""The same exercise under other names, so that a policy must read and copy what it could otherwise recite.

Trained on some eighty functions as they are, a policy learns them by heart, which lowers the loss faster than
learning to copy, and it fails on the first name it has not seen. Behind new names for module, functions and
variables only the structure can be known beforehand.
"""

from __future__ import annotations

import ast
import keyword
import re
import string
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random

from coderepairrl.tasks.mutants.corpus_tasks import Exercise
from coderepairrl.tasks.mutants.grammars import declared, parser
from coderepairrl.tasks.mutants.issues import QUOTES
from coderepairrl.tasks.mutants.languages import LANGUAGES, SCRIPT

VARIABLES = (
    *("xs", "ys", "value", "best", "result", "total", "count", "out", "size", "start", "lo", "hi", "mid", "limit"),
    *("text", "word", "char", "row", "rows", "price", "rate", *string.ascii_lowercase),
)

# The phrases of issues hold words that are variables elsewhere, such as "value".
_NAMES = re.compile("|".join([re.escape(text.split("{")[0]) for text in QUOTES] + [r"[A-Za-z_]\w*"]))


def disguise(exercise: Exercise, rng: Random) -> Exercise:
    """`exercise` with its module, functions and variables renamed throughout, issue included."""
    language, source = exercise.mutant.function.language, exercise.files[exercise.path]
    functions, variables = _python(source) if language == "python" else declared(source, language)
    names = dict(zip(sorted({*variables} - {"_"}), rng.sample(VARIABLES, len(VARIABLES)), strict=False))
    called = {name: _spelled(rng) for name in functions}
    modules = _modules(exercise.mutant.function.module, _spelled(rng), language)
    names |= called | modules

    def rename(text: str, known: Mapping[str, str] = names) -> str:
        def renamed(match: re.Match[str]) -> str:
            # ``.c`` may end the name of a file, and ``c`` be a variable
            member = language != "python" and re.search(r"(?<!\.)\.$", text[: match.start()])
            return (called if member else known).get(match[0], match[0])

        return _NAMES.sub(renamed, text)

    def file(path: str, content: str) -> tuple[str, str]:
        # what the shell runs has variables of its own
        return rename(path, modules), rename(content, modules if path == SCRIPT else names)

    made = replace(
        exercise,
        files=dict(file(*each) for each in exercise.files.items()),
        path=rename(exercise.path, modules),
        tests=dict(file(*each) for each in exercise.tests.items()),
        command=tuple(rename(word, modules) for word in exercise.command),
        fixed=rename(exercise.fixed),
        prompt=rename(exercise.prompt),
    )
    if language != "python" and _keywords(language) & {*names.values()}:
        return disguise(exercise, rng)
    return made


@cache
def _keywords(language: str) -> frozenset[str]:
    """What is no name. Of ``char``, a type in some languages, their grammars do not say it."""
    grammar = parser(language).language
    assert grammar is not None
    unnamed = (at for at in range(grammar.node_kind_count) if not grammar.node_kind_is_named(at))
    return frozenset(kind for kind in map(grammar.node_kind_for_id, unnamed) if kind) | {"char"}


def _python(source: str) -> tuple[list[str], set[str]]:
    """Names of functions, and of parameters and variables."""
    nodes = list(ast.walk(ast.parse(source)))
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    variables = {node.arg for node in nodes if isinstance(node, ast.arg)}
    variables |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return functions, variables


def _modules(old: str, new: str, language: str) -> dict[str, str]:
    """How what is called after the module `old` is called after `new`: the file, its checks, classes."""

    def stems(module: str) -> list[str]:
        layout = LANGUAGES.get(language)
        paths = (layout.module_path(module), layout.tests_path(module)) if layout else (f"{module}.", f"test_{module}.")
        return [path.rpartition(".")[0] for path in paths]

    return dict(zip(stems(old), stems(new), strict=True))


def _spelled(rng: Random) -> str:
    """A name of random letters, sometimes in two parts."""
    parts = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6))) for _ in range(rng.choice((1, 1, 2))))
    name = "_".join(parts)
    return _spelled(rng) if keyword.iskeyword(name) else name
