"""Exercises with other names, so that a policy must read and copy what it could otherwise recite.

Trained on some eighty functions as they are, a policy learns them by heart, which lowers the loss faster than
learning to copy, and it fails on the first name it has not seen. With new names for module, functions and variables
only the structure can be memorised.
"""

from __future__ import annotations

import ast
import keyword
import re
import string
from collections.abc import Mapping
from dataclasses import replace
from random import Random

from coderepairrl.tasks.mutants.corpus_tasks import QUOTES, Exercise

VARIABLES = (
    *("xs", "ys", "value", "best", "result", "total", "count", "out", "size", "start", "lo", "hi", "mid", "limit"),
    *("text", "word", "char", "row", "rows", "price", "rate", *string.ascii_lowercase),
)

# The phrases of issues hold words that are variables elsewhere, such as "value".
_NAMES = re.compile("|".join([re.escape(text.split("{")[0]) for text in QUOTES] + [r"[A-Za-z_]\w*"]))


def disguise(exercise: Exercise, rng: Random) -> Exercise:
    """`exercise` with its module, functions and variables renamed throughout, issue included."""
    functions, variables = _find_names(exercise.files[exercise.path])
    names = dict(zip(sorted(variables - {"_"}), rng.sample(VARIABLES, len(VARIABLES)), strict=False))
    names |= {name: _make_name(rng) for name in functions}
    module, other = exercise.mutant.function.module, _make_name(rng)
    modules = {module: other, f"test_{module}": f"test_{other}"}
    names |= modules

    def rename(text: str, known: Mapping[str, str] = names) -> str:
        return _NAMES.sub(lambda match: known.get(match[0], match[0]), text)

    return replace(
        exercise,
        files={rename(path, modules): rename(content) for path, content in exercise.files.items()},
        path=rename(exercise.path, modules),
        tests={rename(path, modules): rename(content) for path, content in exercise.tests.items()},
        command=tuple(rename(word, modules) for word in exercise.command),
        fixed=rename(exercise.fixed),
        prompt=rename(exercise.prompt),
    )


def _find_names(source: str) -> tuple[list[str], set[str]]:
    """Names of functions, and names of parameters and variables."""
    nodes = list(ast.walk(ast.parse(source)))
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    variables = {node.arg for node in nodes if isinstance(node, ast.arg)}
    variables |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return functions, variables


def _make_name(rng: Random) -> str:
    """A name of random letters, sometimes in two parts."""
    parts = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6))) for _ in range(rng.choice((1, 1, 2))))
    name = "_".join(parts)
    return _make_name(rng) if keyword.iskeyword(name) else name
