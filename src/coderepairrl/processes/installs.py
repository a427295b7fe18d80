"""Optional packages and how to install them; virtual environments that sandboxes share, for agents and tests."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from coderepairrl.errors import PrerequisiteError
from coderepairrl.processes.caches import environments_cache
from coderepairrl.processes.children import run_child

_QUIETLY = ("--quiet", "--disable-pip-version-check", "--no-input")
_DONE = ".installed"
_POLL_SECONDS = 0.2
_umask_lock = threading.Lock()
_locks: set[int] = set()
"""Descriptors of held locks: inherited by installers, they stay locked if this process is killed."""
_umasks: list[int] = []  # to restore
_VENV_FIX = "sudo apt-get install python3-venv (or your distribution's name for it)"
EXTRAS = {
    "train": ("torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "renderers"),
    "deepspeed": ("deepspeed",),
    "bitsandbytes": ("bitsandbytes",),
    "ray": ("ray",),
    "hub": ("datasets",),
    "pdf": ("svglib",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def system_python() -> Path:
    """Python in ``/usr``, visible to all sandboxes."""
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return base if base.is_relative_to("/usr") else Path("/usr/bin/python3").resolve()


@contextmanager
def lock_installation(target: Path) -> Iterator[None]:
    """Lock `target` for installation; new files are readable by all. Raises `PrerequisiteError`."""
    with _open_lock(target) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@asynccontextmanager
async def lock_installation_async(target: Path) -> AsyncIterator[None]:
    """Hold `lock_installation` without blocking other coroutines."""
    with _open_lock(target) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_POLL_SECONDS)
        yield


def remove_partial(folder: Path) -> None:
    """Remove this user's ``NAME.partial`` in `folder`, left by killed installations."""
    for partial in folder.glob("*.partial"):
        with suppress(FileNotFoundError):  # it was completed just now
            if partial.lstat().st_uid != os.geteuid():
                continue
        with _open_lock(partial) as lock, suppress(BlockingIOError, FileNotFoundError):  # in use, or just removed
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial)


@contextmanager
def _open_lock(target: Path) -> Iterator[TextIO]:
    with _make_files_readable():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.with_suffix(".lock").open("w") as lock:
                _locks.add(lock.fileno())
                try:
                    yield lock
                finally:
                    _locks.discard(lock.fileno())
        except OSError as error:
            raise PrerequisiteError(
                f"cannot install into {target.parent}: {error}",
                fix=f"free some disk space there and in {tempfile.gettempdir()} (TMPDIR), or set CRRL_CACHE to a "
                "folder that can be written",
            ) from error


@contextmanager
def _make_files_readable() -> Iterator[None]:
    # the umask is per process: the last of overlapping contexts restores it
    with _umask_lock:
        _umasks.append(os.umask(0o022))
    try:
        yield
    finally:
        with _umask_lock:
            before = _umasks.pop()  # 0o022 for all but the first one
            if not _umasks:
                os.umask(before)


def check_reachable(target: Path) -> None:
    """Raise `PrerequisiteError` if the user of sandboxes could not reach `target`."""
    closed = [parent for parent in target.parents if not parent.stat().st_mode & stat.S_IXOTH]
    if os.geteuid() == 0 and closed:
        raise PrerequisiteError(
            f"sandboxes started by root could not see {target}: {closed[-1]} is closed to other users",
            fix="set CRRL_CACHE to a folder that everybody may enter",
        )


def make_venv(folder: Path, *, stdout: int) -> Path:
    """Create a virtual environment; returns its interpreter. Raises `PrerequisiteError`."""
    base = system_python()
    if not base.exists():
        raise PrerequisiteError(f"sandboxes need {base}, which is not installed", fix=_VENV_FIX)
    # -I: import nothing from the current folder, which may be an untrusted repository
    if run_child([str(base), "-I", "-m", "venv", str(folder)], stdout=stdout, pass_fds=_locks).returncode != 0:
        raise PrerequisiteError("no virtual environment can be made", fix=_VENV_FIX)
    return folder / "bin/python"


def run_pip(python: Path, *arguments: str, stdout: int) -> subprocess.CompletedProcess[bytes]:
    """Run pip of the environment with interpreter `python`."""
    command = [str(python), "-I", "-m", "pip", *arguments, *_QUIETLY]
    return run_child(command, stdout=stdout, pass_fds=_locks)


def install_tool(name: str, requirements: Sequence[str]) -> Path:
    """Install `requirements` without their dependencies, cached. Raises `PrerequisiteError`."""
    digest = hashlib.sha256("\0".join((str(system_python()), *requirements)).encode()).hexdigest()[:12]
    target = environments_cache() / "tools" / f"{name}-{digest}"
    if (target / _DONE).exists():  # without the lock, which users who can only read the cache could not take
        return target
    with lock_installation(target):
        if not (target / _DONE).exists():
            shutil.rmtree(target, ignore_errors=True)  # remains of an interrupted installation
            python = make_venv(target, stdout=subprocess.DEVNULL)
            done = run_pip(python, "install", "--retries=5", "--no-deps", *requirements, stdout=subprocess.PIPE)
            if done.returncode != 0:
                output = done.stdout.decode("utf-8", "replace")[-300:].strip()
                raise PrerequisiteError(
                    f"pip cannot install {' '.join(requirements)}: {output}",
                    fix="connect this machine to a package index: the first installation needs it",
                )
            (target / _DONE).touch()
    return target


def require_extra(extra: str, purpose: str) -> None:
    """Raise `PrerequisiteError` if a package of `extra`, needed by `purpose`, is missing."""
    missing = [name for name in EXTRAS[extra] if not (sys.modules.get(name) or find_spec(name))]
    if missing:
        packages = "package" if len(missing) == 1 else "packages"
        raise PrerequisiteError(f"{purpose} needs the {packages} {', '.join(missing)}", fix=install_extra(extra))


def require_train() -> None:
    """Raise `PrerequisiteError` unless models can run here."""
    require_extra("train", "a model on this machine")


def install_extra(extra: str, checkout: Path = Path(__file__).parents[3]) -> str:
    """Install command of `extra`: the script of `checkout` if this is its environment, else pip.

    >>> install_extra("train", Path("/usr"))
    "pip install 'coderepairrl[train]'"
    """
    script = checkout / "scripts/setup.sh"
    if script.is_file() and Path(sys.prefix) == checkout / ".venv":
        return f"{shlex.quote(str(script))} {extra}"
    return f"pip install 'coderepairrl[{extra}]'"
