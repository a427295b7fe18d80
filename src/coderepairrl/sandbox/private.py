"""Folders of the host that no task may name as its workspace: a file of tasks may come from anybody, and an agent would
be shown all that is in them."""

from __future__ import annotations

import contextlib
import pwd
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


def check_shown(folder: Path) -> None:
    """Raise `TaskError` unless `folder` may be shown to an agent.

    It may not be, nor contain, the user's home, a cache of ours or a folder of the system, nor lie in one that holds
    secrets: those of the system, keys and settings in the home, repositories that were fetched.
    """
    place = folder.resolve()
    whole, closed = [Path(name) for name in _WHOLE], [Path(name) for name in _SYSTEM]
    homes = [Path(user.pw_dir) for user in pwd.getpwall() if user.pw_dir.startswith(("/home/", "/root"))]
    with contextlib.suppress(RuntimeError):  # there is no home
        whole.append(Path.home())
        homes.append(Path.home())
    closed += [home / name for home in homes for name in _OF_A_USER]
    with contextlib.suppress(PrerequisiteError):  # nor a cache
        whole += folders()
        closed.append(git_cache())
    for each in (*whole, *closed):
        if each.resolve().is_relative_to(place):
            raise _refused(folder, f"contains {each}" if each.resolve() != place else f"is {each}")
    for each in closed:
        if place.is_relative_to(each.resolve()):
            raise _refused(folder, f"lies in {each}")


def _refused(folder: Path, how: str) -> TaskError:
    return TaskError(
        f"workspace {folder} {how}, which agents are not shown",
        fix="name the folder of one project, outside of the system's folders and of your keys and settings",
    )
