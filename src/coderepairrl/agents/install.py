"""Programs of other people, each in an environment of its own (``crrl agents install NAME``).

An installation is a folder that only ever appears whole: its name has a digest of what was asked for, and the file
``installed.json`` (which has every version that came with it) is written last. Sandboxes see it read-only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coderepairrl.agents.recipe import Recipe, is_recipe, label, load, names
from coderepairrl.errors import ConfigError, PrerequisiteError, RunError
from coderepairrl.processes.caches import agents_cache
from coderepairrl.processes.children import run
from coderepairrl.registry import nearest
from coderepairrl.runs.storage import replace_file

_DONE = "installed.json"
_STDERR = 2
_PIP = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries=10", "--compile")
"""Compiled whatever the machine's pip is set to: a sandbox cannot write there, and would compile at every start."""
_NPM = ("--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=10", "--fetch-retry-mintimeout=1000")


def folder(name: str, recipe: Recipe) -> Path:
    """Where what agent `name` needs is, or would be, installed."""
    asked = json.dumps([asdict(recipe.install), str(_python()) if recipe.install.pip else ""])
    return agents_cache() / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"


def installed(name: str, recipe: Recipe) -> dict[str, Any] | None:
    """What came with it: versions by package, for ``pip`` and ``npm``. None if it is not installed."""
    try:
        found: dict[str, Any] = json.loads((folder(name, recipe) / _DONE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a record that a full disk tore is none
        return None
    return found


def install_named(source: str) -> tuple[Path, dict[str, Any]]:
    """Install the agent of the recipe `source`, shipped or in a file: its folder, and `installed`.

    Raises what `install` does, and `ConfigError` for an agent that needs no installation or is none.
    """
    if not is_recipe(source):
        raise ConfigError(f"{source!r} is no agent to install", fix=nearest(source, names()))
    name, recipe = label(source), load(source)
    if not recipe.install:
        raise ConfigError(f"agent {name!r} has nothing to install", fix="use it as it is")
    return install(name, recipe), installed(name, recipe) or {}


def install(name: str, recipe: Recipe) -> Path:
    """Install what agent `name` needs, unless it is there already; its folder.

    What the installers say goes to stderr. Raises `PrerequisiteError` when a tool is missing or sandboxes could not
    see the folder, and `RunError` when an installer fails.
    """
    target = folder(name, recipe)
    with _alone(target):
        if installed(name, recipe) is None:
            shutil.rmtree(target, ignore_errors=True)  # what an interrupted installation left
            target.mkdir(mode=0o755, parents=True)
            _check_reachable(target)
            versions = {}
            if recipe.install.pip:
                versions["pip"] = _pip(target / "venv", recipe.install.pip)
            if recipe.install.npm:
                versions["npm"] = _npm(target / "npm", recipe.install.npm)
            with replace_file(target / _DONE) as record:
                record.write_text(json.dumps(versions, indent=1) + "\n")
    return target


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Nobody else installs `target` meanwhile, and everybody may read what we write."""
    before = os.umask(0o022)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise PrerequisiteError(f"cannot install into {target.parent}: {error}", fix="set CRRL_CACHE") from error
    finally:
        os.umask(before)


def _check_reachable(target: Path) -> None:
    """As root, sandboxes are somebody else's."""
    closed = [parent for parent in target.parents if not parent.stat().st_mode & stat.S_IXOTH]
    if os.geteuid() == 0 and closed:
        raise PrerequisiteError(
            f"sandboxes of root could not see {target}: {closed[-1]} is closed to other users",
            fix="set CRRL_CACHE to a folder that everybody may enter",
        )


def _python() -> Path:
    """An interpreter that sandboxes see: they have ``/usr``, and as root nobody's home."""
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return own if own.is_relative_to("/usr") else Path("/usr/bin/python3").resolve()


def _pip(venv: Path, requirements: Sequence[str]) -> dict[str, str]:
    python = _python()
    fix = "sudo apt-get install python3-venv (or what your distribution calls it)"
    if not python.exists():
        raise PrerequisiteError(f"{python}, which sandboxes can run, is not installed", fix=fix)
    # -I: nothing is imported from the folder that we were started in, which may be anybody's repository
    _run([str(python), "-I", "-m", "venv", str(venv)], PrerequisiteError("no virtual environment can be made", fix=fix))
    inside = str(venv / "bin/python")
    command = [inside, "-I", "-m", "pip", "install", *_PIP, *requirements]
    _run(command, RunError(f"pip could not install {' '.join(requirements)}"))
    listing = subprocess.run(
        [inside, "-I", "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return {entry["name"]: entry["version"] for entry in json.loads(listing.stdout)}


def _npm(prefix: Path, packages: Sequence[str]) -> dict[str, str]:
    npm = shutil.which("npm")
    if npm is None:
        raise PrerequisiteError("npm is not installed", fix="sudo apt-get install npm, or see nodejs.org")
    prefix.mkdir()
    command = [npm, "install", "--prefix", str(prefix), *_NPM, *packages]
    _run(command, RunError(f"npm could not install {' '.join(packages)}"))
    lock = json.loads((prefix / "package-lock.json").read_text())
    found = {path.rpartition("node_modules/")[2]: entry["version"] for path, entry in lock["packages"].items() if path}
    return dict(sorted(found.items()))


def _run(command: Sequence[str], failure: PrerequisiteError | RunError) -> None:
    """Run an installer, its words to stderr; once more if it fails, for a download may break off. Raises `failure`."""
    if all(run(command, stdout=_STDERR).returncode != 0 for _ in range(2)):
        raise failure
