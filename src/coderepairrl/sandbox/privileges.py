"""Becoming an unprivileged user before anything of a task runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache

from coderepairrl.errors import PrerequisiteError

SANDBOX_USER = 65533
"""The user id that root becomes: one without an account. Not 65534, ``nobody``, whose processes it could signal."""


def command_as(user: int | None, argv: Sequence[str]) -> list[str]:
    """`argv`, run by user (and group) id `user` without groups or any way back; None changes nothing.

    A program rather than ``Popen(user=...)``, which cannot use vfork: copying the controller's page tables
    takes longer than ``setpriv`` does, and holds up its event loop. Raises `PrerequisiteError`.
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
