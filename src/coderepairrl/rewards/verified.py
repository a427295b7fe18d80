"""Repairs that passed their checks, as further references."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from coderepairrl.grading.steering import find_named_files, find_shadowed_module, list_excluded_patterns
from coderepairrl.rewards.changes import is_test_file
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse_patch
from coderepairrl.types import Task

LARGEST = 64 << 10
"""Most bytes: every attempt is compared with every reference, and longer repairs hold other things."""

LOST_LINES = 5
"""Lines that a repair may remove without others in their place, beyond those of the task's reference. Of 785 real
repairs that passed their tests (public attempts at SWE-bench) 5 removed more, and 11 removed a definition."""
_DEFINED = re.compile(rb"\b(?:def|class|function|func|fn|struct|enum|trait|interface)\s+(?:\([^)]*\)\s*)?(\w+)")

Identity = frozenset[tuple[object, ...]]


def compute_identity(patch: bytes) -> Identity:
    """Key of a patch's effect: ignores context, hashes, order, and trailing whitespace. Raises `MalformedPatch`."""
    return frozenset(map(_make_file_key, parse_patch(patch)))


def _make_file_key(file: FilePatch) -> tuple[object, ...]:
    blocks = tuple(
        (block.at, *(tuple(line.rstrip() for line in lines) for lines in (block.removed, block.added)))
        for block in file.blocks
    )
    return file.old, file.new, file.old_mode, file.new_mode, file.renamed, file.copied, file.binary, blocks


def explain_unfit(task: Task, patch: bytes) -> str:
    """Reason that `patch`, which passed the checks of `task`, is not a reference for it, or ""."""
    if len(patch) > LARGEST:
        return f"longer than {LARGEST >> 10} KiB"
    try:
        files = parse_patch(patch)
    except MalformedPatch as problem:
        return str(problem)
    if not files:
        return "changes nothing"
    reference = parse_patch(task.reference)
    reference_paths = {name for file in reference for name in (file.old, file.new)}
    allowed_modules = {"", *map(find_shadowed_module, reference_paths)}
    ignored_files = {
        *task.checks.restore,
        *(set(find_named_files(task.checks)) - reference_paths),
        *(file.new for file in files if not file.old and find_shadowed_module(file.new) not in allowed_modules),
    }
    ignored_patterns = list_excluded_patterns(task.reference)
    for name in (name for file in files for name in (file.old, file.new) if name):
        if name in ignored_files or any(fnmatchcase(f"/{name}", f"*/{pattern}") for pattern in ignored_patterns):
            return f"changes {name}, which the checks do not take from a patch"
        if name not in reference_paths and is_test_file(name):
            return f"changes the tests in {name}"
    (lines, names), (reference_lines, reference_names) = _count_lost(files), _count_lost(reference)
    if removed_names := sorted(names - reference_names):
        return f"removes {removed_names[0].decode(errors='replace')}, which the task's own reference keeps"
    if lines > max(reference_lines, 0) + LOST_LINES:
        return f"removes {lines} lines without others in their place"
    return ""


def _count_lost(files: Iterable[FilePatch]) -> tuple[int, set[bytes]]:
    blocks = [block for file in files for block in file.blocks]
    removed = [line for block in blocks for line in block.removed]
    added = [line for block in blocks for line in block.added]
    removed_names, added_names = (
        {name for line in side for name in _DEFINED.findall(line)} for side in (removed, added)
    )
    return len(removed) - len(added), removed_names - added_names
