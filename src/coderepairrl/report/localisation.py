"""Places that a patch changes, compared with its reference: files, functions and lines of the old side.

Recall is the share of the reference's places that the patch changes, precision the reverse (Agentless, Xia et al. 2024,
arXiv 2407.01489, requires recall 1). A line is a removed one, or the one above a pure addition (0 at the top).
Functions are innermost functions or classes by `ast`, Python only; a file's other code is one place. Tests are left
out, unless the reference changes nothing else.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Hashable, Mapping, Set
from functools import lru_cache

from coderepairrl.rewards.changes import is_test
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse_patch
from coderepairrl.rewards.thesis import enclosing

Line = tuple[str, int]
_PYTHON = (".py", ".pyi")
# a policy can write any number, and parsing takes 20 s and 100 MB for every MiB
LARGEST = 1 << 20
"""Bytes of a patch; a longer one changes no place."""
_LARGEST_SOURCE = 1 << 20
_KNOWN = 8


def locate_changes(patch: bytes, *, tests: bool = False) -> frozenset[Line]:
    """Lines that `patch` changes, by file; a malformed patch has none.

    >>> sorted(locate_changes(b"--- a/x.py\\n+++ b/x.py\\n@@ -3,2 +3,2 @@\\n a\\n-b\\n+c\\n"))
    [('x.py', 4)]
    """
    return frozenset(
        line
        for file in parse_patch_or_none(patch)
        if tests or not is_test(file.path)
        for line in _changed_file_lines(file)
    )


@lru_cache(maxsize=_KNOWN)
def parse_patch_or_none(patch: bytes) -> tuple[FilePatch, ...]:
    """Files of `patch`; none if malformed or beyond `LARGEST`."""
    try:
        return parse_patch(patch) if len(patch) <= LARGEST else ()
    except MalformedPatch:
        return ()


def _changed_file_lines(file: FilePatch) -> set[Line]:
    changed = set()
    for block in file.blocks:
        changed |= {(file.path, at) for at in range(block.at + 1, block.at + len(block.removed) + 1) or (block.at,)}
    return changed or {(file.path, 0)}  # a mode, a name, or binary content


def both(patch: bytes, reference: bytes) -> tuple[frozenset[Line], frozenset[Line]]:
    """Lines of `patch` and `reference` to compare: without tests, unless that leaves no reference.

    >>> both(b"", b"--- a/test_x.py\\n+++ b/test_x.py\\n@@ -1 +1 @@\\n-b\\n+c\\n")[1]
    frozenset({('test_x.py', 1)})
    """
    reference_lines = locate_changes(reference)
    return (
        (locate_changes(patch), reference_lines)
        if reference_lines
        else (locate_changes(patch, tests=True), locate_changes(reference, tests=True))
    )


def files_of(changed: Set[Line]) -> frozenset[str]:
    """Files of `changed`."""
    return frozenset(path for path, _ in changed)


def functions_of(changed: Set[Line], sources: Mapping[str, bytes | None]) -> frozenset[tuple[str, str]] | None:
    """Python functions around `changed`, as (file, qualified name).

    `sources` are files before any patch, None for new ones. Returns None if one is missing or does not parse.

    >>> code = b"class A:\\n    def f(self):\\n        return 1\\n"
    >>> functions_of({("x.py", 3)}, {"x.py": code}), functions_of({("x.py", 3)}, {})
    (frozenset({('x.py', 'A.f')}), None)
    """
    functions = set()
    for path, line in changed:
        if not path.endswith(_PYTHON):
            continue
        if path not in sources:
            return None
        source = sources[path]
        tree = None if source is None else _tree(source)
        if source is not None and tree is None:
            return None
        functions.add((path, enclosing(tree, line) if tree is not None else ""))
    return frozenset(functions)


def python_files(*patches: bytes) -> set[str]:
    """Python files that `patches` change."""
    return {path for patch in patches for path in files_of(locate_changes(patch, tests=True)) if path.endswith(_PYTHON)}


@lru_cache(maxsize=_KNOWN)
def _tree(source: bytes) -> ast.Module | None:
    if len(source) > _LARGEST_SOURCE:
        return None
    with warnings.catch_warnings():  # of invalid escapes
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def recall(given: Set[Hashable], wanted: Set[Hashable]) -> float | None:
    """|given & wanted| / |wanted|; None without wanted places.

    >>> recall({1, 2}, {2, 3}), recall(set(), {1}), recall({1}, set())
    (0.5, 0.0, None)
    """
    return len(given & wanted) / len(wanted) if wanted else None


def precision(given: Set[Hashable], wanted: Set[Hashable]) -> float | None:
    """|given & wanted| / |given|; None if either is empty.

    >>> precision({1, 2}, {2, 3}), precision(set(), {1}), precision({1}, set())
    (0.5, None, None)
    """
    return len(given & wanted) / len(given) if given and wanted else None
