"""Localisation: whether a patch changes the files, functions and lines that its reference changes.

Recall is the share of the reference's places that the patch changes too, precision the share of the patch's places that
the reference changes too (Agentless, Xia et al. 2024, arXiv 2407.01489, requires recall 1). Lines are those of the file
before the patch: each removed line, or the line above a pure addition (0 at the top). A function is the innermost
function or class by `ast`, in Python only; a file's other code is one place. Tests are left out, unless the reference
changes only tests.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping, Set
from functools import lru_cache

from coderepairrl.rewards.changes import is_test_file, parse_python
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse_patch
from coderepairrl.rewards.thesis import find_enclosing

Line = tuple[str, int]  # file, and number of a line
_PYTHON = (".py", ".pyi")
MAX_PATCH_BYTES = 1 << 20
"""Longer patches change no place: parsing takes 20 s and 100 MB per MiB."""
_MAX_SOURCE_BYTES = 1 << 20
_CACHE_SIZE = 8  # several metrics in a row parse the same patch and files


def locate_changes(patch: bytes, *, tests: bool = False) -> frozenset[Line]:
    """Find the lines that `patch` changes, as (file, line); none if it is malformed.

    >>> sorted(locate_changes(b"--- a/x.py\\n+++ b/x.py\\n@@ -3,2 +3,2 @@\\n a\\n-b\\n+c\\n"))
    [('x.py', 4)]
    """
    return frozenset(
        line
        for file in parse_patch_or_empty(patch)
        if tests or not is_test_file(file.path)
        for line in _list_file_lines(file)
    )


@lru_cache(maxsize=_CACHE_SIZE)
def parse_patch_or_empty(patch: bytes) -> tuple[FilePatch, ...]:
    """Parse `patch`; no files if it is malformed or longer than `MAX_PATCH_BYTES`."""
    try:
        return parse_patch(patch) if len(patch) <= MAX_PATCH_BYTES else ()
    except MalformedPatch:
        return ()


def _list_file_lines(file: FilePatch) -> set[Line]:
    changed = set()
    for block in file.blocks:
        removed = range(block.at + 1, block.at + len(block.removed) + 1)
        changed |= {(file.path, at) for at in removed or (block.at,)}
    return changed or {(file.path, 0)}  # it changes only a mode, a name, or binary content


def find_compared_lines(patch: bytes, reference: bytes) -> tuple[frozenset[Line], frozenset[Line]]:
    """Find the lines of `patch` and `reference` to compare; without tests, unless the reference changes only tests.

    >>> find_compared_lines(b"", b"--- a/test_x.py\\n+++ b/test_x.py\\n@@ -1 +1 @@\\n-b\\n+c\\n")[1]
    frozenset({('test_x.py', 1)})
    """
    reference_lines = locate_changes(reference)
    return (
        (locate_changes(patch), reference_lines)
        if reference_lines
        else (locate_changes(patch, tests=True), locate_changes(reference, tests=True))
    )


def list_changed_files(changed: Set[Line]) -> frozenset[str]:
    """Files of `changed` lines."""
    return frozenset(path for path, _ in changed)


def find_changed_functions(
    changed: Set[Line], sources: Mapping[str, bytes | None]
) -> frozenset[tuple[str, str]] | None:
    """Find the Python functions around `changed` lines, as (file, qualified name).

    `sources` are files before any patch, None for new ones. Returns None if one is missing or does not parse.

    >>> code = b"class A:\\n    def f(self):\\n        return 1\\n"
    >>> find_changed_functions({("x.py", 3)}, {"x.py": code}), find_changed_functions({("x.py", 3)}, {})
    (frozenset({('x.py', 'A.f')}), None)
    """
    functions = set()
    for path, line in changed:
        if not path.endswith(_PYTHON):
            continue
        if path not in sources:
            return None
        if (source := sources[path]) is None:
            functions.add((path, ""))  # a new file is one place
        elif tree := _parse_or_none(source):
            functions.add((path, find_enclosing(tree, line)))
        else:
            return None
    return frozenset(functions)


def list_python_files(*patches: bytes) -> set[str]:
    """List the Python files that `patches` change."""
    paths = {path for patch in patches for path, _ in locate_changes(patch, tests=True)}
    return {path for path in paths if path.endswith(_PYTHON)}


@lru_cache(maxsize=_CACHE_SIZE)
def _parse_or_none(source: bytes) -> ast.Module | None:
    return parse_python(source) if len(source) <= _MAX_SOURCE_BYTES else None


def recall(changed: Set[Hashable], reference: Set[Hashable]) -> float | None:
    """|changed & reference| / |reference|; None if `reference` is empty.

    >>> recall({1, 2}, {2, 3}), recall(set(), {1}), recall({1}, set())
    (0.5, 0.0, None)
    """
    return len(changed & reference) / len(reference) if reference else None


def precision(changed: Set[Hashable], reference: Set[Hashable]) -> float | None:
    """|changed & reference| / |changed|; None if either is empty.

    >>> precision({1, 2}, {2, 3}), precision(set(), {1}), precision({1}, set())
    (0.5, None, None)
    """
    return len(changed & reference) / len(changed) if changed and reference else None
