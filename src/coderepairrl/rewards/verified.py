"""Rules for repairs that passed their checks: which ones become further references of their task."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from coderepairrl.grading.steering import find_named_files, find_shadowed_module, list_excluded_patterns
from coderepairrl.rewards.changes import is_test_file
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse_patch
from coderepairrl.types import Task

MAX_BYTES = 64 << 10
"""Longest repair: every attempt is compared with every reference, and longer repairs change unrelated things."""

MAX_NET_REMOVED = 5
"""Net number of lines that a repair may remove at most, beyond those of the reference. Of 785 real repairs that passed
their tests (public attempts at SWE-bench), 5 removed more, and 11 removed a definition.
"""
_DEFINITION = re.compile(rb"\b(?:def|class|function|func|fn|struct|enum|trait|interface)\s+(?:\([^)]*\)\s*)?(\w+)")

Identity = frozenset[tuple[object, ...]]


def compute_identity(patch: bytes) -> Identity:
    """Key of a patch's effect, ignoring context, hashes, order, and trailing whitespace. Raises `MalformedPatch`."""
    return frozenset(map(_make_file_key, parse_patch(patch)))


def _make_file_key(file: FilePatch) -> tuple[object, ...]:
    blocks = tuple(
        (block.at, *(tuple(line.rstrip() for line in lines) for lines in (block.removed, block.added)))
        for block in file.blocks
    )
    return file.old, file.new, file.old_mode, file.new_mode, file.renamed, file.copied, file.binary, blocks


def explain_unfit(task: Task, patch: bytes) -> str:
    """Reason that `patch`, which passed the checks of `task`, is not a reference for it, or ""."""
    if len(patch) > MAX_BYTES:
        return f"longer than {MAX_BYTES >> 10} KiB"
    try:
        files = parse_patch(patch)
    except MalformedPatch as problem:
        return str(problem)
    if not files:
        return "changes nothing"
    reference = parse_patch(task.reference)
    reference_paths = {name for file in reference for name in (file.old, file.new)}
    allowed_modules = {"", *map(find_shadowed_module, reference_paths)}
    # grading restores these files or leaves out changes to them, so the checks passed without the patch's version
    ignored_files = {
        *task.checks.restore,
        *(set(find_named_files(task.checks)) - reference_paths),
        *(file.new for file in files if not file.old and find_shadowed_module(file.new) not in allowed_modules),
    }
    ignored_patterns = list_excluded_patterns(task.reference)
    for name in (name for file in files for name in (file.old, file.new) if name):
        if name in ignored_files or any(fnmatchcase(f"/{name}", f"*/{pattern}") for pattern in ignored_patterns):
            return f"changes {name}, which grading does not take from a patch"
        if name not in reference_paths and is_test_file(name):
            return f"changes the tests in {name}"
    (lines, names), (reference_lines, reference_names) = _count_removed(files), _count_removed(reference)
    if removed_names := sorted(names - reference_names):
        return f"removes {removed_names[0].decode(errors='replace')}, which the task's own reference keeps"
    if lines > max(reference_lines, 0) + MAX_NET_REMOVED:
        return f"removes {lines} more lines than it adds"
    return ""


def _count_removed(files: Iterable[FilePatch]) -> tuple[int, set[bytes]]:
    """Net number of removed lines, and names whose definitions are removed and not added again."""
    blocks = [block for file in files for block in file.blocks]
    removed = [line for block in blocks for line in block.removed]
    added = [line for block in blocks for line in block.added]
    removed_names, added_names = (
        {name for line in side for name in _DEFINITION.findall(line)} for side in (removed, added)
    )
    return len(removed) - len(added), removed_names - added_names
