"""Repairs that passed their checks, as further references."""

from __future__ import annotations

from fnmatch import fnmatchcase

from coderepairrl.grading.steering import left_out, named, shadowed
from coderepairrl.rewards.beside import is_test
from coderepairrl.rewards.parse import FilePatch, MalformedPatch, parse
from coderepairrl.types import Task

LARGEST = 64 << 10
"""Bytes: every attempt is compared with every reference, and a longer repair is mostly something else."""

Identity = frozenset[tuple[object, ...]]


def identity(patch: bytes) -> Identity:
    """Key of a patch's effect: equal for diffs that differ in context, hashes, order, or trailing whitespace.

    Raises `MalformedPatch`.
    """
    return frozenset(_file(file) for file in parse(patch))


def _file(file: FilePatch) -> tuple[object, ...]:
    blocks = tuple((block.at, _bare(block.removed), _bare(block.added)) for block in file.blocks)
    return file.old, file.new, file.old_mode, file.new_mode, file.renamed, file.copied, file.binary, blocks


def _bare(lines: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(line.rstrip() for line in lines)


def unfit(task: Task, patch: bytes) -> str:
    """Reason that `patch`, which passed the checks of `task`, is no reference for it; else empty.

    Changes to tests and restored files had no part in its passing.
    """
    if len(patch) > LARGEST:
        return f"longer than {LARGEST >> 10} KiB"
    try:
        files = parse(patch)
    except MalformedPatch as problem:
        return str(problem)
    if not files:
        return "changes nothing"
    own = {name for file in parse(task.reference) for name in (file.old, file.new)}
    ignored, fixed = left_out(task.reference), {*task.checks.restore, *(set(named(task.checks)) - own)}
    fixed |= {file.new for file in files if not file.old and shadowed(file.new) not in {"", *map(shadowed, own)}}
    for name in (name for file in files for name in (file.old, file.new) if name):
        if name in fixed or any(fnmatchcase(f"/{name}", f"*/{pattern}") for pattern in ignored):
            return f"changes {name}, which the checks do not take from a patch"
        if name not in own and is_test(name):
            return f"changes the tests in {name}"
    return ""
