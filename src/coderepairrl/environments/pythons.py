"""Python interpreters for sandboxes, by version.

Those in ``/usr`` are used in place; pyenv's and uv's are copied, since sandboxes of root cannot enter a home.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from coderepairrl.errors import ConfigError, PrerequisiteError
from coderepairrl.processes.caches import environments_cache
from coderepairrl.processes.installs import check_reachable, lock_installation, system_python
from coderepairrl.runs.storage import replace_file

_DONE = ".complete"
_LEFT_OUT = ("test", "idlelib", "turtledemo", "ensurepip", "site-packages", "__pycache__", "tkinter")
"""Folders of the standard library that no project's test imports, and installed packages."""
_ELF_MAGIC = b"\x7fELF"
_PRINT_PREFIX = "import json, sys; print(sys.base_prefix)"  # importing json tests that compiled modules are found


def find_interpreter(version: str) -> Path:
    """Find the newest Python ``MAJOR.MINOR`` usable in sandboxes. Raises `PrerequisiteError`."""
    if not re.fullmatch(r"3\.\d+", version):
        raise PrerequisiteError(f"Python {version} is not a version of Python 3", fix="write it as 3.9")
    path = next(_list_installed_pythons(version), None)
    if path is None:
        raise PrerequisiteError(
            f"this machine has no Python {version}, which the environment of a task needs",
            fix=f"uv python install {version}, or pyenv install {version}",
        )
    if path.is_relative_to("/usr"):
        return path
    return _copy_interpreter(path)


def sandbox_version() -> str:
    """``MAJOR.MINOR`` of the sandbox's Python. Raises `ConfigError` if unclear."""
    match = re.fullmatch(r"python(3\.\d+)", system_python().name)
    if match is None:
        raise ConfigError(
            "the Python version of sandboxes is unclear", fix="name a version, for example python='\"3.12\"'"
        )
    return match[1]


def _list_installed_pythons(version: str) -> Iterator[Path]:
    # the distribution's first, then pyenv's and uv's, newest first
    for folder in ("/usr/bin", "/usr/local/bin"):
        if (python := Path(folder, f"python{version}")).exists():
            yield python.resolve()
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", "~/.local/share/uv/python")).expanduser()
    releases = [*pyenv.glob(f"{version}.*"), *uv.glob(f"cpython-{version}.*-linux-*-gnu")]
    for release in sorted(releases, key=_patch_release, reverse=True):
        if (python := release / f"bin/python{version}").exists():
            yield python.resolve()


def _patch_release(folder: Path) -> int:
    match = re.search(r"3\.\d+\.(\d+)", folder.name)
    return int(match[1]) if match else -1


def _copy_interpreter(python: Path) -> Path:
    prefix = python.parent.parent
    target = environments_cache() / "pythons" / prefix.name
    with lock_installation(target):
        if not (target / _DONE).exists():
            shutil.rmtree(target, ignore_errors=True)  # remains of an interrupted copy
            target.mkdir(mode=0o755)
            check_reachable(target)
            version = python.name.removeprefix("python")
            for part in (f"bin/{python.name}", f"lib/python{version}", "include"):
                _copy_part(prefix / part, target / part)
            for library in (prefix / "lib").glob("libpython*.so*"):
                shutil.copy2(library, target / "lib" / library.name)
            _relocate(target / "bin" / python.name, prefix)
            _require_running(target / "bin" / python.name, target)
            (target / _DONE).touch()
        _relocate_settings(target, prefix)
    return target / "bin" / python.name


def _copy_part(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignored = shutil.ignore_patterns(*_LEFT_OUT, "config-*", "*.pyc")
        shutil.copytree(source, target, symlinks=True, ignore=ignored)
    elif source.exists():
        shutil.copy2(source, target)


def _relocate(program: Path, prefix: Path) -> None:
    # the library search path in the ELF header is overwritten in place by the shorter ``$ORIGIN/../lib``
    old, new = os.fsencode(prefix / "lib"), b"$ORIGIN/../lib"
    data = program.read_bytes()
    if data.startswith(_ELF_MAGIC) and old in data and len(new) <= len(old):
        program.write_bytes(data.replace(old + b"\0", new.ljust(len(old), b"\0") + b"\0"))


def _relocate_settings(target: Path, prefix: Path) -> None:
    # extensions compiled for the copy must be linked with its library
    for settings in target.glob("lib/python3.*/_sysconfigdata_*.py"):
        text = settings.read_text(encoding="utf-8")
        if f"{prefix}/" in text:
            with replace_file(settings) as partial:
                shutil.copy2(settings, partial)  # keeps the file's mode
                partial.write_text(text.replace(f"{prefix}/", f"{target}/"), encoding="utf-8")


def _require_running(python: Path, prefix: Path) -> None:
    done = subprocess.run([str(python), "-I", "-c", _PRINT_PREFIX], capture_output=True, text=True, timeout=60)
    if done.returncode != 0 or str(prefix) not in done.stdout:
        raise PrerequisiteError(
            f"a copy of {python.name} does not run elsewhere: {(done.stderr or done.stdout)[-300:].strip()}",
            fix="install that version of Python with the distribution's packages",
        )
