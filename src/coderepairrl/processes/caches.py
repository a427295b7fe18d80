"""Cache folders: what can be made, installed or fetched again. Hidden from sandboxes (`sandbox.answers`).

One rule for all: ``$CRRL_CACHE``, else ``$XDG_CACHE_HOME/coderepairrl``, else ``~/.cache/coderepairrl``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from coderepairrl.errors import PrerequisiteError

_SYSTEM = Path("/var/cache/coderepairrl")
ENVIRONMENT_RECORD = "environment.json"
"""The file of a built environment that says what it is; written last, so that one without it is half built."""
_BUILDS = 1
"""Raised when what a build of an environment leaves changes, so that those of before are built again."""
_HOME = "~/.cache/coderepairrl"


def user_cache() -> Path:
    """The folder by the rule above.

    Raises `PrerequisiteError` where it would be in a home that does not exist.
    """
    chosen = _chosen()
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as error:
        raise PrerequisiteError(f"no folder {chosen}: {error}", fix="set CRRL_CACHE, or HOME") from error


def agents_cache() -> Path:
    """For installed agents. Raises as `user_cache`."""
    return _shown() / "agents"


def environments_cache() -> Path:
    """For environments in which the tests of tasks run. Raises as `user_cache`."""
    return _shown() / "environments"


def images_cache() -> Path:
    """Of images that tasks run in. Raises as `user_cache`."""
    return _shown() / "images"


def environment_folder(specification: str) -> Path:
    """Of the environment that is, or would be, built from `specification` (``python:...``). Raises as `user_cache`."""
    return environments_cache() / hashlib.sha256(f"{_BUILDS}\0{specification}".encode()).hexdigest()[:16]


def git_cache() -> Path:
    """For fetched repositories. Raises as `user_cache`."""
    return user_cache() / "git"


def folders() -> list[Path]:
    """All folders that caches may be in, under any setting of the variables; some may not exist."""
    result = []
    for where in (_chosen(), _HOME, _SYSTEM):
        with contextlib.suppress(RuntimeError):  # there is no home
            result.append(Path(where).expanduser().absolute())
    return result


def _shown() -> Path:
    """The cache of files that sandboxes may see.

    Root's is in ``/var/cache/coderepairrl`` unless ``$CRRL_CACHE`` is set, since sandboxes of root run as another user,
    who cannot enter root's home.
    """
    system = os.geteuid() == 0 and not os.environ.get("CRRL_CACHE")
    return _SYSTEM if system else user_cache()


def _chosen() -> str:
    if chosen := os.environ.get("CRRL_CACHE"):
        return chosen
    xdg = os.environ.get("XDG_CACHE_HOME")
    return f"{xdg}/coderepairrl" if xdg else _HOME
