"""Plain folders in the cache, named by content."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from coderepairrl.errors import TaskError
from coderepairrl.sandbox.contents import check_path


def store(root: Path, files: Mapping[str, bytes], named: str = "") -> Path:
    """Write `files` (contents by path) atomically to a folder below `root`, unless it exists.

    Its name is `named`, else their digest. Raises OSError, and `TaskError` for paths outside or in ``.git``.
    """
    for name in files:
        check_path(name, "a row")
        if "\0" in name:
            raise TaskError(f"a row holds a path that no file may have: {name!r}")
    folder = root / (named or digest(files))[:24]
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
        try:
            scratch.chmod(0o755)  # a sandbox under another user id reads it
            write_tree(scratch, files)
            scratch.rename(folder)
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if not isinstance(error, OSError) or not folder.exists():  # whoever else made the same folder meanwhile
                raise
    return folder


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` below `folder`."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def digest(files: Mapping[str, bytes]) -> str:
    """Hexadecimal digest of paths and contents."""
    manifest = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())})
    return hashlib.sha256(manifest.encode()).hexdigest()
