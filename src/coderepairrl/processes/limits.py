"""System limits."""

from __future__ import annotations

import resource

OPEN_FILES = 1 << 16


def allow_open_files() -> None:
    """Raise the limit on open files towards `OPEN_FILES`."""
    # shells begin with 1,024: a few agents' connections use them up, and descriptors in unread messages count for all
    # sandboxes of a user
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, most))
