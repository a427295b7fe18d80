"""Folder for weights on their way to an engine, in memory if possible."""

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
    """Folder of a run's weights in transit: below `base`, /dev/shm, or the temporary folder."""
    memory = Path("/dev/shm")
    base = base or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
    return base / f"{PREFIX}{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16]}"


@contextmanager
def shared_folder(run: RunFolder, base: Path | None = None) -> Iterator[Path]:
    """Create an empty `shared_path` for the duration. Raises `UsageError`."""
    path = shared_path(run, base)
    if base is None:
        sweep(path.parent)
    shutil.rmtree(path, ignore_errors=True)
    with owned(path):
        yield path
