"""Where this machine keeps what can be made, installed or fetched again. No sandbox shows it (`sandbox.answers`).

One rule for all of it: ``$CRRL_CACHE``, else ``$XDG_CACHE_HOME/coderepairrl``, else ``~/.cache/coderepairrl``.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from coderepairrl.errors import PrerequisiteError

_SYSTEM = Path("/var/cache/coderepairrl")
_HOME = "~/.cache/coderepairrl"


def user_cache() -> Path:
    """The folder by the rule above: of what runs make.

    Raises `PrerequisiteError` where it would lie in a home that there is not.
    """
    chosen = _chosen()
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as error:
        raise PrerequisiteError(f"no folder {chosen}: {error}", fix="set CRRL_CACHE, or HOME") from error


def agents_cache() -> Path:
    """Of installed agents. Raises as `user_cache`."""
    return _shown() / "agents"


def environments_cache() -> Path:
    """Of what the tests of tasks need. Raises as `user_cache`."""
    return _shown() / "environments"


def git_cache() -> Path:
    """Of repositories that were fetched. Raises as `user_cache`."""
    return user_cache() / "git"


def folders() -> list[Path]:
    """Every folder that one of these may be or have been in, whatever the variables were then; some may not exist."""
    found = []
    for where in (_chosen(), _HOME, _SYSTEM):
        with contextlib.suppress(RuntimeError):  # there is no home, and so no folder in it
            found.append(Path(where).expanduser().absolute())
    return found


def _shown() -> Path:
    """Of what sandboxes are shown.

    Without ``$CRRL_CACHE``, root's is in ``/var/cache/coderepairrl``, since sandboxes of root run as somebody who
    cannot enter root's home.
    """
    system = os.geteuid() == 0 and not os.environ.get("CRRL_CACHE")
    return _SYSTEM if system else user_cache()


def _chosen() -> str:
    if chosen := os.environ.get("CRRL_CACHE"):
        return chosen
    xdg = os.environ.get("XDG_CACHE_HOME")
    return f"{xdg}/coderepairrl" if xdg else _HOME
