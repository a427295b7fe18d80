"""Helpers of task sources: load tasks once, log those left out, cache results and workspaces."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from coderepairrl import sandbox as sandboxes
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.printable import format_count
from coderepairrl.processes.signals import run_until_interrupted
from coderepairrl.protocols import SandboxBackend, TaskSource
from coderepairrl.sandbox.contents import check_path
from coderepairrl.types import Task

T = TypeVar("T")
_log = logging.getLogger(__name__)


class TaskLeftOut(Exception):
    """Raised with the reason to leave out a task, worded to follow a number of tasks: ``change no tests``."""


class LoadedSource(TaskSource):
    """A source that calls `load` once, on demand."""

    _tasks: tuple[Task, ...] = ()

    @abstractmethod
    def load(self) -> Iterable[Task]:
        """Make the tasks. Raises `TaskError` if no task can be used."""

    def prepare(self) -> None:
        """Load the tasks, on the first call. Raises as `load`."""
        if not self._tasks:
            self._tasks = tuple(self.load())

    def __iter__(self) -> Iterator[Task]:
        self.prepare()
        return iter(self._tasks)


def check_day(option: str, day: str) -> None:
    """Raise `ConfigError` unless `day` is empty or ``YYYY-MM-DD``."""
    try:
        if day:
            date.fromisoformat(day)
    except ValueError:
        raise ConfigError(f"{option}={day!r} is not a date", fix="write YYYY-MM-DD") from None


def log_left_out(where: str, noun: str, tasks: Sequence[Task], left_out: Counter[str], *, fix: str) -> None:
    """Log the number of `tasks` and, by reason, of those left out. Raises `TaskError` with `fix` without `tasks`."""
    reasons = "; ".join(f"{number:,} {reason}" for reason, number in left_out.most_common())
    if not tasks:
        raise TaskError(f"{where}: no {noun} can be used ({reasons or 'none was found'})", fix=fix)
    _log.warning("%s: %s; left out: %s", where, format_count(len(tasks), noun), reasons or "none")


def find_code_folder(path: str) -> Path:
    """Find the folder at `path`, or the installed package `path` without importing it. Raises `TaskError`."""
    folder = Path(path).expanduser()
    if not folder.exists() and path.isidentifier():
        spec = importlib.util.find_spec(path)
        if spec is not None and spec.submodule_search_locations:
            return Path(spec.submodule_search_locations[0]).resolve()
        if spec is not None and spec.origin:  # a module of one file
            return Path(spec.origin).resolve()
        raise TaskError(f"{path} is neither a folder nor an installed package", fix=f"pip install {path}")
    return folder.resolve()


def compute_cached_json(
    folder: Path,
    key: Any,
    compute: Callable[[SandboxBackend], Coroutine[Any, Any, Any]],
    sandbox: str,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the result of `compute`, called with the backend `sandbox`; cached as JSON in `folder` under `key`."""
    cache_file = folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"
    if not cache_file.exists():
        backend = sandboxes.make_backend(sandboxes.choose_backend(sandbox).name, **options)
        try:
            result = run_blocking(compute(backend))
        finally:
            backend.close()
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        partial = cache_file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.replace(cache_file)
    return json.loads(cache_file.read_text(encoding="utf-8"))


def run_blocking(job: Coroutine[Any, Any, T]) -> T:
    """Run `job` and return its result; a running event loop is blocked. Raises `Interrupted` on a signal."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run_until_interrupted(job))
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def run_job() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await job

    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(asyncio.run, run_job())
        try:
            return future.result()
        except BaseException:  # a signal, which only this thread receives: let the job clean up before leaving
            if not future.done():
                loop, task = started.result()
                loop.call_soon_threadsafe(task.cancel)
            raise


def store_folder(root: Path, files: Mapping[str, bytes], name: str = "") -> Path:
    """Write `files` (contents by path) atomically to the folder `name` below `root`, unless it exists.

    Default name: a digest of the files. Raises OSError, and `TaskError` for paths outside or in ``.git``.
    """
    for path in files:
        check_path(path, "a row")
        if "\0" in path:
            raise TaskError(f"a row has a path with a NUL byte: {path!r}")
    folder = root / (name or digest_contents(files))[:24]
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
        try:
            partial.chmod(0o755)  # sandboxes read it under another user id
            write_tree(partial, files)
            partial.rename(folder)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(error, OSError) or not folder.exists():  # else another process was faster
                raise
    return folder


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` below `folder`."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def digest_contents(files: Mapping[str, bytes]) -> str:
    """Hexadecimal digest of paths and contents."""
    manifest = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())})
    return hashlib.sha256(manifest.encode()).hexdigest()
