"""Dropping privileges before anything of a task runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import cache

from coderepairrl.errors import PrerequisiteError

SANDBOX_USER = 65533
"""Unused user id for root to drop to. Not 65534 (``nobody``), whose processes it could signal."""


def sandbox_user() -> int | None:
    """User id of sandboxes: `SANDBOX_USER` for root, else ours (None)."""
    return SANDBOX_USER if os.geteuid() == 0 else None


def command_as(user: int | None, argv: Sequence[str]) -> list[str]:
    """Prefix `argv` to run as user and group `user`, without other groups or a way back; None changes nothing.

    ``Popen(user=...)`` cannot use vfork, so it would copy the controller's page tables. Raises `PrerequisiteError`.
    """
    if user is None:
        return list(argv)
    return [_setpriv(), f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--", *argv]


@cache
def _setpriv() -> str:
    path = shutil.which("setpriv")
    if path is None:
        raise PrerequisiteError("setpriv, which root needs to start sandboxes, is missing",
                                fix="install the package util-linux, or run as an ordinary user")  # fmt: skip
    return path
