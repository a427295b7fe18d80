"""Where weights lie on their way to an engine: they are large, and lie in memory."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coderepairrl.processes.scratch import PREFIX, owned, sweep
from coderepairrl.runs import RunFolder


def shared_path(run: RunFolder, base: Path | None = None) -> Path:
    """Where weights lie on their way to the engine, one folder per run: below `base`, else in memory where the system
    offers it."""
    memory = Path("/dev/shm")
    base = base or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
    return base / f"{PREFIX}{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16]}"


@contextmanager
def shared_folder(run: RunFolder, base: Path | None = None) -> Iterator[Path]:
    """`shared_path`, empty: cleared of what a killed process of this run left. Gone on leaving.

    On this machine alone (without `base`) those of other runs that were killed are cleared away, too. Raises
    `UsageError` when it cannot be made.
    """
    path = shared_path(run, base)
    if base is None:
        sweep(path.parent)
    shutil.rmtree(path, ignore_errors=True)
    with owned(path):
        yield path
