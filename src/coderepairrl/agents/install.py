"""Third-party programs, each in a separate environment (``crrl agents install NAME``).

A folder is named by a digest of its requirements, and complete once it has ``installed.json``. Sandboxes see it
read-only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coderepairrl.agents.recipe import Recipe, is_recipe, label, load, names
from coderepairrl.errors import ConfigError, PrerequisiteError, RunError
from coderepairrl.processes.caches import agents_cache
from coderepairrl.processes.children import run
from coderepairrl.processes.installs import alone, check_reachable, make_venv, pip, python
from coderepairrl.registry import nearest
from coderepairrl.runs.storage import replace_file

_DONE = "installed.json"
_STDERR = 2
_NPM = ("--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=10", "--fetch-retry-mintimeout=1000")


def folder(name: str, recipe: Recipe) -> Path:
    """Installation folder, whether it exists or not."""
    requirements = json.dumps([asdict(recipe.install), str(python()) if recipe.install.pip else ""])
    return agents_cache() / f"{name}-{hashlib.sha256(requirements.encode()).hexdigest()[:12]}"


def installed(name: str, recipe: Recipe) -> dict[str, Any] | None:
    """Versions by package, for ``pip`` and ``npm``; None if not installed."""
    try:
        versions: dict[str, Any] = json.loads((folder(name, recipe) / _DONE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a record that a full disk tore is none
        return None
    return versions


def install_named(source: str) -> tuple[Path, dict[str, Any]]:
    """Install the agent of a recipe, shipped or a file; return its folder and `installed`.

    Raises as `install`, and `ConfigError` if there is nothing to install.
    """
    if not is_recipe(source):
        raise ConfigError(f"{source!r} is no agent to install", fix=nearest(source, names()))
    name, recipe = label(source), load(source)
    if not recipe.install:
        raise ConfigError(f"agent {name!r} has nothing to install", fix="use it as it is")
    return install(name, recipe), installed(name, recipe) or {}


def install(name: str, recipe: Recipe) -> Path:
    """Install the agent unless already installed; return its folder.

    Raises `PrerequisiteError` when a tool is missing or sandboxes cannot see the folder, `RunError` when an installer
    fails.
    """
    target = folder(name, recipe)
    with alone(target):
        if installed(name, recipe) is None:
            shutil.rmtree(target, ignore_errors=True)  # what an interrupted installation left
            target.mkdir(mode=0o755, parents=True)
            check_reachable(target)
            versions = {}
            if recipe.install.pip:
                versions["pip"] = _pip(target / "venv", recipe.install.pip)
            if recipe.install.npm:
                versions["npm"] = _npm(target / "npm", recipe.install.npm)
            with replace_file(target / _DONE) as record:
                record.write_text(json.dumps(versions, indent=1) + "\n")
    return target


def _pip(venv: Path, requirements: Sequence[str]) -> dict[str, str]:
    inside = make_venv(venv, stdout=_STDERR)
    # compiled whatever the machine's pip is set to: a sandbox cannot write there, and would compile at every start
    command = ("install", "--retries=10", "--compile", *requirements)
    if all(pip(inside, *command, stdout=_STDERR).returncode != 0 for _ in range(2)):  # a download may break off
        raise RunError(f"pip could not install {' '.join(requirements)}")
    listing = subprocess.run(
        [str(inside), "-I", "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
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
    if all(run(command, stdout=_STDERR).returncode != 0 for _ in range(2)):  # a download may break off
        raise RunError(f"npm could not install {' '.join(packages)}")
    lock = json.loads((prefix / "package-lock.json").read_text())
    versions = {
        path.rpartition("node_modules/")[2]: entry["version"] for path, entry in lock["packages"].items() if path
    }
    return dict(sorted(versions.items()))
