"""Host folders that untrusted task files may not name as a workspace, which agents see as a whole."""

from __future__ import annotations

import contextlib
import functools
import pwd
import time
from pathlib import Path

from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.processes.caches import folders, git_cache

_SYSTEM = ("/etc", "/proc", "/sys", "/dev", "/boot", "/run/secrets")
"""Closed, with everything below."""
_WHOLE = ("/bin", "/home", "/lib", "/mnt", "/opt", "/root", "/run", "/sbin", "/srv", "/tmp", "/usr", "/var")
"""Closed themselves; a project may lie below."""
_OF_A_USER = (
    ".aws",
    ".azure",
    ".cache/huggingface",
    ".config",
    ".docker",
    ".gnupg",
    ".kube",
    ".local/share/keyrings",
    ".password-store",
    ".ssh",
)
"""Below a home: closed, with everything below."""
_KEPT_SECONDS = 60


def check_shown(folder: Path) -> None:
    """Raise `TaskError` unless an agent may see `folder`.

    It must not be or contain the home, one of our caches or a system folder, nor lie in a folder with secrets: system
    folders, keys and settings in the home, fetched repositories.
    """
    place = folder.resolve()
    home: Path | None = None
    with contextlib.suppress(RuntimeError):  # no home
        home = Path.home()
    caches: tuple[Path, ...] = ()
    with contextlib.suppress(PrerequisiteError):  # no cache
        caches = (git_cache(), *folders())
    around, closed = _private(home, caches, int(time.monotonic() // _KEPT_SECONDS))
    if match := around.get(place):
        each, private_path = match
        raise _refused(folder, f"contains {each}" if private_path != place else f"is {each}")
    for parent in (place, *place.parents):
        if parent in closed:
            raise _refused(folder, f"lies in {closed[parent]}")


@functools.lru_cache(1)
def _private(
    home: Path | None, caches: tuple[Path, ...], period: int
) -> tuple[dict[Path, tuple[Path, Path]], dict[Path, Path]]:
    """Map folders that are or contain a private one to its (name, path), and closed folders to their name.

    Cached for a `period`: a plan checks a thousand folders, but links may change later.
    """
    homes = [Path(user.pw_dir) for user in pwd.getpwall() if user.pw_dir.startswith(("/home/", "/root"))]
    homes += [home] if home else []
    shallow = [*map(Path, _WHOLE), *([home] if home else []), *caches[1:]]
    within = [*map(Path, _SYSTEM), *(user_home / name for user_home in homes for name in _OF_A_USER), *caches[:1]]
    around: dict[Path, tuple[Path, Path]] = {}
    closed: dict[Path, Path] = {}
    for number, each in enumerate((*shallow, *within)):
        resolved = each.resolve()
        for outer in (resolved, *resolved.parents):
            around.setdefault(outer, (each, resolved))
        if number >= len(shallow):
            closed.setdefault(resolved, each)
    return around, closed


def _refused(folder: Path, how: str) -> TaskError:
    return TaskError(
        f"workspace {folder} {how}, which agents are not shown",
        fix="name the folder of one project, outside of the system's folders and of your keys and settings",
    )
