"""Where this machine keeps what can be made, installed or fetched again. No sandbox shows it (`sandbox.answers`).

``$CRRL_CACHE`` replaces the folders of `user_cache` and `agents_cache`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from coderepairrl.errors import PrerequisiteError

_SYSTEM = Path("/var/cache/coderepairrl")


def user_cache() -> Path:
    """Of what runs make: ``$CRRL_CACHE``, else ``~/.cache/coderepairrl``.

    Raises `PrerequisiteError` where it would lie in a home that there is not.
    """
    chosen = os.environ.get("CRRL_CACHE") or "~/.cache/coderepairrl"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise PrerequisiteError(f"no folder {chosen}: {error}", fix="set CRRL_CACHE, or HOME") from error


def agents_cache() -> Path:
    """Of installed agents: ``agents`` in ``$CRRL_CACHE``, else in the user's cache folder.

    Root's is in ``/var/cache/coderepairrl``, since sandboxes of root run as somebody who cannot enter root's home.
    """
    if chosen := os.environ.get("CRRL_CACHE"):
        base = Path(chosen).expanduser()
    else:
        base = _SYSTEM if os.geteuid() == 0 else _xdg()
    return base.absolute() / "agents"


def git_cache() -> Path:
    """Of repositories that were fetched."""
    return _xdg() / "git"


def folders() -> list[Path]:
    """Every folder that one of these may be or have been in, whatever the variables said then; some may not exist."""
    found = []
    for where in (os.environ.get("CRRL_CACHE"), "~/.cache/coderepairrl", _SYSTEM):
        with contextlib.suppress(RuntimeError):  # there is no home, and so no folder in it
            found += [Path(where).expanduser()] if where else []
    with contextlib.suppress(RuntimeError):
        found.append(_xdg())
    return [path.absolute() for path in found]


def _xdg() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "coderepairrl"
