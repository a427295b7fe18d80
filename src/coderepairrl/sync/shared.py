"""The folder for weights on their way to an engine: in memory, since they are large."""

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
    """The folder of a run's weights on their way to the engine: below `base`, else in /dev/shm, else in the temporary
    folder."""
    memory = Path("/dev/shm")
    base = base or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
    return base / f"{PREFIX}{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16]}"


@contextmanager
def shared_folder(run: RunFolder, base: Path | None = None) -> Iterator[Path]:
    """An empty `shared_path`, removed on leaving; what a killed process of this run left in it is deleted.

    Without `base`, folders of other runs that were killed are removed, too. Raises `UsageError` when the folder cannot
    be made.
    """
    path = shared_path(run, base)
    if base is None:
        sweep(path.parent)
    shutil.rmtree(path, ignore_errors=True)
    with owned(path):
        yield path
