"""Cache folders, hidden from sandboxes (`sandbox.answers`).

All are below ``$CRRL_CACHE``, else ``$XDG_CACHE_HOME/coderepairrl``, else ``~/.cache/coderepairrl``; root's are below
``/var/cache/coderepairrl`` if sandboxes must see them and ``$CRRL_CACHE`` is unset.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from coderepairrl.errors import PrerequisiteError

_SYSTEM = Path("/var/cache/coderepairrl")
ENVIRONMENT_RECORD = "environment.json"
_BUILDS = 1
"""Version of environment builds; raised to build them again."""
_HOME = "~/.cache/coderepairrl"


def user_cache() -> Path:
    """Main cache folder. Raises `PrerequisiteError`, like all below, without a home."""
    chosen = _choose_cache()
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as error:
        raise PrerequisiteError(f"no folder {chosen}: {error}", fix="set CRRL_CACHE, or HOME") from error


def agents_cache() -> Path:
    """Installed agents."""
    return _cache_root() / "agents"


def environments_cache() -> Path:
    """Built environments."""
    return _cache_root() / "environments"


def images_cache() -> Path:
    """Images."""
    return _cache_root() / "images"


def environment_folder(specification: str) -> Path:
    """Cache folder for `specification` (``python:...``)."""
    return environments_cache() / hashlib.sha256(f"{_BUILDS}\0{specification}".encode()).hexdigest()[:16]


def git_cache() -> Path:
    """Fetched repositories."""
    return user_cache() / "git"


def folders() -> list[Path]:
    """Cache folders under any setting."""
    result = []
    for where in (_choose_cache(), _HOME, _SYSTEM):
        with contextlib.suppress(RuntimeError):  # there is no home
            result.append(Path(where).expanduser().absolute())
    return result


def _cache_root() -> Path:
    # sandboxes of root run as another user, who cannot enter root's home
    system = os.geteuid() == 0 and not os.environ.get("CRRL_CACHE")
    return _SYSTEM if system else user_cache()


def _choose_cache() -> str:
    if chosen := os.environ.get("CRRL_CACHE"):
        return chosen
    xdg = os.environ.get("XDG_CACHE_HOME")
    return f"{xdg}/coderepairrl" if xdg else _HOME
