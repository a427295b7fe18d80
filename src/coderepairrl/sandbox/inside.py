"""Path resolution confined to the tree of an image."""

from __future__ import annotations

import os
import stat
from collections import deque
from pathlib import Path

LINKS = 40
"""Most links followed, like the kernel."""


def resolve(tree: Path, path: str, base: str = "") -> str | None:
    """Resolve `path`, from `base` unless absolute, to a link-free path relative to `tree`; None if missing."""
    resolved: list[str] = []
    left, links = deque([*("" if path.startswith("/") else base).split("/"), *path.split("/")]), 0
    while left:
        part = left.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            del resolved[-1:]
            continue
        at = tree.joinpath(*resolved, part)
        try:
            kind = at.lstat().st_mode
        except OSError:
            return None
        if stat.S_ISLNK(kind):
            links += 1
            if links > LINKS:
                return None
            target = os.fspath(at.readlink())
            resolved = [] if target.startswith("/") else resolved
            left.extendleft(reversed(target.split("/")))
        elif left and not stat.S_ISDIR(kind):
            return None
        else:
            resolved.append(part)
    return "/".join(resolved)


def text(tree: Path, path: str, base: str = "", longest: int = 1 << 20) -> str:
    """Read up to `longest` bytes of a regular file; empty without one."""
    resolved = resolve(tree, path, base)
    if not resolved or not stat.S_ISREG((tree / resolved).lstat().st_mode):
        return ""
    with (tree / resolved).open("rb") as file:
        return os.fsdecode(file.read(longest))
