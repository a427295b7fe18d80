"""Functions of other Python code, each checked by its docstring's examples (`corpus_tasks.Function`)."""

from __future__ import annotations

import ast
import doctest
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from coderepairrl.errors import TaskError
from coderepairrl.protocols import SandboxBackend
from coderepairrl.runs import codec
from coderepairrl.tasks.mutants import judge
from coderepairrl.tasks.mutants.corpus_tasks import Check, Function, index_mutations, make_mutant, strip_annotations
from coderepairrl.tasks.mutants.package_tasks import is_test_or_docs, read_tree
from coderepairrl.types import Task

MAX_LINES = 12
"""Lines of a function, imports included."""
_TIMEOUT_SECONDS = 600.0
_BATCH = 2_000
"""Jobs of one run of the judge."""
_HASH_SEEDS = 0, 1, 2
"""Values of PYTHONHASHSEED, which orders sets."""


def find_documented_functions(root: Path) -> list[Function]:
    """Find functions with examples of plain values in the folder or file `root`, without running code.

    They have no decorators and at most `MAX_LINES` lines.
    """
    files = {root.name: root.read_bytes()} if root.is_file() else read_tree(root)
    by_key: dict[str, Function] = {}
    with warnings.catch_warnings():  # about invalid escapes
        warnings.simplefilter("ignore")
        for path, data in files.items():
            if not path.endswith(".py") or is_test_or_docs(path):
                continue
            try:
                tree = ast.parse(data)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            module = re.sub(r"\W", "_", path.removesuffix(".py").removesuffix("/__init__"))
            for node in tree.body:
                if not isinstance(node, ast.FunctionDef) or node.decorator_list:
                    continue
                code = strip_annotations(node)
                code = "".join([*_list_imports(tree, code), code])
                if (checks := _read_doctest_checks(node)) and code.count("\n") <= MAX_LINES:
                    function = Function(module, node.name, code, checks)
                    by_key.setdefault(function.key, function)  # a/b.py and a_b.py have the same key
    return [*by_key.values()]


def _list_imports(tree: ast.Module, code: str) -> Iterator[str]:
    """Import lines of the standard library that a function uses."""
    used = {each.id for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Name)}
    for each in tree.body:
        if isinstance(each, ast.Import | ast.ImportFrom):
            names = [alias for alias in each.names if (alias.asname or alias.name.partition(".")[0]) in used]
            module = getattr(each, "module", "") or ""
            roots = {(module or alias.name).partition(".")[0] for alias in names}
            if names and roots <= sys.stdlib_module_names and not getattr(each, "level", 0):
                statement = ast.ImportFrom(module, names, 0) if module else ast.Import(names)
                yield f"{ast.unparse(statement)}\n"


def _read_doctest_checks(node: ast.FunctionDef) -> tuple[Check, ...]:
    checks = []
    try:
        examples = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
    except ValueError:
        return ()
    for each in examples:
        if each.options.get(doctest.SKIP):  # its authors do not trust it: random, or in the order of a set
            continue
        call, want = each.source.strip(), each.want.strip()
        try:
            tree = ast.parse(call, mode="eval")
            call = ast.unparse(tree)  # without a comment that may follow it
            names = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}
            want = ast.unparse(ast.parse(want, mode="eval"))
            ast.literal_eval(want)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
        if node.name in names and "..." not in want:
            checks.append(Check(call if isinstance(tree.body, ast.Call) else f"({call})", want))
    return tuple(checks)


async def verify_functions(candidates: Sequence[Function], workspace: str, backend: SandboxBackend) -> Any:
    """Mutants of `candidates` that a check notices, as plain data; checks that unmutated functions fail are dropped.

    Judged in a sandbox of `backend`, in the empty `workspace`, under each of `_HASH_SEEDS`; mutants with differing
    verdicts are left out, so that equal code gives equal tasks. Raises `TaskError`.
    """
    single_checks = [(each.source, [(check.call, check.want)]) for each in candidates for check in each.checks]
    results = iter(await _judge_in_sandbox(backend, workspace, single_checks))  # in the order of `single_checks`
    passing = [
        replace(each, checks=tuple(check for check in each.checks if not any(next(results)))) for each in candidates
    ]
    mutated = list(index_mutations([each for each in passing if each.checks]).values())
    jobs = [(m.apply(f.source), [(c.call, c.want) for c in f.checks]) for f, m in mutated]
    failures = await _judge_in_sandbox(backend, workspace, jobs)
    noticed = [
        make_mutant(*pair, *first)
        for pair, (first, *others) in zip(mutated, failures, strict=True)
        # at a negative index, the mutant hangs or does not compile
        if first and first[0] >= 0 and all(other == first for other in others)
    ]
    return codec.dump(noticed)


async def _judge_in_sandbox(
    backend: SandboxBackend, workspace: str, jobs: Sequence[tuple[str, Sequence[tuple[str, str]]]]
) -> list[tuple[judge.Failure | None, ...]]:
    """Failures of each job, by `_HASH_SEEDS`."""
    failures: list[tuple[judge.Failure | None, ...]] = []
    remaining = iter(jobs)
    async with backend.open(Task("mutants/documented", "find bugs", "python", workspace, b"")) as box:
        await box.write("judge.py", Path(judge.__file__).read_bytes())
        while batch := list(islice(remaining, _BATCH)):
            lines = "".join(json.dumps({"source": source, "checks": checks}) + "\n" for source, checks in batch)
            failures_by_seed = []
            for seed in _HASH_SEEDS:
                argv = ("env", f"PYTHONHASHSEED={seed}", "python3", "-S", "-B", "judge.py")
                result = await box.exec(argv, stdin=lines.encode(), timeout=_TIMEOUT_SECONDS, max_bytes=1 << 26)
                answers = result.output.decode("utf-8", "replace").splitlines()
                if not result.ok or len(answers) != len(batch):
                    raise TaskError(
                        f"the functions cannot be judged: {result.output[-300:]!r}", fix="name another package"
                    )
                failures_by_seed.append([json.loads(answer) for answer in answers])
            failures += zip(*failures_by_seed, strict=True)
    return failures
