"""Folders of the host that no task may name as its workspace: a file of tasks may come from anybody, and an agent would
be shown all that is in them."""

from __future__ import annotations

import contextlib
import functools
import pwd
import time
from pathlib import Path

from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.processes.caches import folders, git_cache

_SYSTEM = ("/etc", "/proc", "/sys", "/dev", "/boot", "/run/secrets")
"""Closed with all that is in them."""
_WHOLE = ("/bin", "/home", "/lib", "/mnt", "/opt", "/root", "/run", "/sbin", "/srv", "/tmp", "/usr", "/var")
"""Closed as a whole: what is in them may be a project."""
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
"""In a home, with all that is in them."""
_KEPT_SECONDS = 60


def check_shown(folder: Path) -> None:
    """Raise `TaskError` unless `folder` may be shown to an agent.

    It may not be, nor contain, the user's home, a cache of ours or a folder of the system, nor lie in one that holds
    secrets: those of the system, keys and settings in the home, repositories that were fetched.
    """
    place = folder.resolve()
    home: Path | None = None
    with contextlib.suppress(RuntimeError):  # there is none
        home = Path.home()
    caches: tuple[Path, ...] = ()
    with contextlib.suppress(PrerequisiteError):  # nor a cache
        caches = (git_cache(), *folders())
    around, closed = _private(home, caches, int(time.monotonic() // _KEPT_SECONDS))
    if found := around.get(place):
        each, there = found
        raise _refused(folder, f"contains {each}" if there != place else f"is {each}")
    for parent in (place, *place.parents):
        if parent in closed:
            raise _refused(folder, f"lies in {closed[parent]}")


@functools.lru_cache(1)
def _private(
    home: Path | None, caches: tuple[Path, ...], period: int
) -> tuple[dict[Path, tuple[Path, Path]], dict[Path, Path]]:
    """By each folder that is or contains a private one: that one, as it is called and where it is. By each folder of
    which all that is in it is closed (the first of `caches` is): what it is called.

    Kept for a `period`: a folder is checked whenever a sandbox is opened, a thousand for a plan, and there are a
    hundred of these. Not longer, since they may be moved, and links be set elsewhere.
    """
    homes = [Path(user.pw_dir) for user in pwd.getpwall() if user.pw_dir.startswith(("/home/", "/root"))]
    homes += [home] if home else []
    whole = [*map(Path, _WHOLE), *([home] if home else []), *caches[1:]]
    within = [*map(Path, _SYSTEM), *(own / name for own in homes for name in _OF_A_USER), *caches[:1]]
    around: dict[Path, tuple[Path, Path]] = {}
    closed: dict[Path, Path] = {}
    for number, each in enumerate((*whole, *within)):
        there = each.resolve()
        for outer in (there, *there.parents):
            around.setdefault(outer, (each, there))
        if number >= len(whole):
            closed.setdefault(there, each)
    return around, closed


def _refused(folder: Path, how: str) -> TaskError:
    return TaskError(
        f"workspace {folder} {how}, which agents are not shown",
        fix="name the folder of one project, outside of the system's folders and of your keys and settings",
    )
