"""Limits that the system puts on this process, and that it may raise itself."""

from __future__ import annotations

import resource

OPEN_FILES = 1 << 16


def allow_open_files() -> None:
    """Raise the limit of open files to `OPEN_FILES`, or as near to it as we may.

    Shells begin with 1,024, which the permitted connections of a few agents use up. And who has more descriptors than
    that on their way, in messages that nobody has read yet, can send no further ones; those of the tasks in all
    sandboxes count, too, as they have one user.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
