"""Whether an environment is still what was built: a digest over all of its files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

from coderepairrl.errors import TaskError

record_name = "environment.json"
"""The file of an environment that says what it is; written last, so that one without it is half built."""


def digest_of(folder: Path) -> str:
    """SHA-256 in hex over path, kind, permission to execute and content of every file of `folder`, but its record."""
    whole = hashlib.sha256()
    for parent, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted((*files, *links)):
            path = Path(parent, name)
            if path == folder / record_name:
                continue
            mode = path.lstat().st_mode
            content = os.fsencode(path.readlink()) if stat.S_ISLNK(mode) else path.read_bytes()
            kind = "link" if stat.S_ISLNK(mode) else "program" if mode & stat.S_IXUSR else "file"
            about = f"{path.relative_to(folder)}\0{kind}\0{hashlib.sha256(content).hexdigest()}\n"
            whole.update(about.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def check_unchanged(folder: Path) -> None:
    """Raise `TaskError` if a file of the environment `folder` is not as it was built."""
    try:
        recorded = json.loads((folder / record_name).read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError) as error:
        raise TaskError(
            f"{folder} is no environment that was built to its end", fix="prepare its tasks again (crrl data prepare)"
        ) from error
    if digest_of(folder) != recorded:
        raise TaskError(
            f"the environment {folder} has changed since it was built",
            fix="delete that folder, and prepare its tasks again (crrl data prepare)",
        )
