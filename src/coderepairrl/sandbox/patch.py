"""The canonical diff.

Git never sees the tree an agent worked in, so nothing left there (hooks, filters, textconv, nested repositories, a
broken ``.git``) can run or hide anything. The guest lists the files that differ from the task's commit; they become a
second, temporary commit, and ``git diff-tree`` compares both.

All files count, including ignored ones (``add -A -f``), except untracked caches of tools (``__pycache__``, ``*.pyc``,
``.pytest_cache``, ``.mypy_cache``, ``.ruff_cache``); renames appear as deletion and creation, independent of similarity
heuristics; full object ids; binary patches; three lines of context; bytes, never text.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from coderepairrl.errors import SandboxFault
from coderepairrl.processes.hostgit import DIFF, git, reason
from coderepairrl.sandbox.contents import Entry
from coderepairrl.sandbox.privileges import command_as
from coderepairrl.sandbox.workspace import Prepared, commit_stream, quoted

_REMEMBERED, _SHORT = 256, 1 << 16
"""Number and largest size (bytes) of cached diffs per workspace: attempts often end in the same change."""


def compose(
    prepared: Prepared, changed: Sequence[Entry], deleted: Sequence[str], scratch: Path, *, user: int | None = None
) -> bytes:
    """Diff `prepared`'s commit against it with `changed` files added and `deleted` ones removed.

    Blocks for two git commands, unless nothing changed or the diff is cached. `scratch` is a unique temporary path.
    Raises `SandboxFault`.
    """
    if not changed and not deleted:
        return b""
    ref = f"refs/heads/{scratch.parent.name}-{scratch.name}"
    stream = commit_stream(ref, changed, base=prepared.base, deleted=deleted)
    change = hashlib.sha256(memoryview(stream)[stream.index(b"\ncommitter") :]).digest()
    if (diff := prepared.diffs.get(change)) is None:
        diff = _compared(prepared, ref, stream, scratch, user)
        if len(prepared.diffs) < _REMEMBERED and len(diff) < _SHORT:
            prepared.diffs[change] = diff
    return diff


def _compared(prepared: Prepared, ref: str, stream: bytes, scratch: Path, user: int | None) -> bytes:
    objects = {
        "GIT_OBJECT_DIRECTORY": str(scratch),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.fsdecode(quoted(f"{prepared.git}/objects")),
    }
    try:
        scratch.mkdir()
        if user is not None:
            os.chown(scratch, user, user)
        comparison = (*DIFF, prepared.base, ref)
        folder = prepared.attempts
        who = command_as(user, [])
        return git("fast-import", "--quiet", then=comparison, folder=folder, stdin=stream, prefix=who, env=objects)
    except subprocess.CalledProcessError as error:
        raise SandboxFault(f"git could not take the diff: {reason(error)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxFault(f"cannot take the diff: {error}", fix="check the disk's free space") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        (prepared.attempts / ref).unlink(missing_ok=True)
