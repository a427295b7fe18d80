"""Candidate files for a diff."""

from __future__ import annotations

import os
import stat

from coderepairrl.sandbox.guest.kernel import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LONG = 256  # characters of a path that count as an entry
DROPPINGS = frozenset(("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"))


class Walk:
    """Files and links under `root` for a diff, without `.git` and caches of tools.

    Visits at most `strays` entries outside `base`, as agents can create too many. `left_out` lists what was skipped.
    """

    def __init__(self, root: str, base: dict[str, Any], strays: int) -> None:
        self.root, self.base, self.strays = root, base, strays
        self.left_out: list[str] = []
        self.homes = {""}  # the folders of base
        for path in base:
            while path := path.rpartition("/")[0]:
                self.homes.add(path)

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield each as ``(path, git mode)``."""
        root_mode = os.lstat(self.root).st_mode if os.path.lexists(self.root) else 0
        folders = [("", root_mode)] if stat.S_ISDIR(root_mode) else []
        while folders:
            deeper = []
            for path, mode in self._inside(*folders.pop()):
                if stat.S_ISDIR(mode):
                    deeper.append((path, mode))
                elif stat.S_ISLNK(mode):
                    yield path, "120000"
                elif stat.S_ISREG(mode):
                    yield path, "100755" if mode & stat.S_IXUSR else "100644"
            folders += sorted(deeper, key=lambda each: each[0] in self.homes)  # the last is next: ours before strays

    def _inside(self, folder: str, mode: int) -> Iterator[tuple[str, int]]:
        full = os.path.join(self.root, folder)
        try:
            if mode & 0o500 != 0o500:
                os.chmod(full, 0o700)
            entries = os.scandir(full)
        except OSError:  # a path too long for the kernel, and so for git
            self.left_out.append(folder + "/")
            return
        with entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                if not self._counts(path, entry.name):
                    continue
                try:
                    mode = os.lstat(os.path.join(self.root, path)).st_mode
                except OSError:
                    self.left_out.append(path)
                    continue
                if stat.S_ISLNK(mode) and entry.name.lower() == ".gitmodules":  # git refuses a patch that has one
                    self.left_out.append(path)
                elif not (stat.S_ISDIR(mode) and entry.name in DROPPINGS and path not in self.homes):
                    yield path, mode

    def _counts(self, path: str, name: str) -> bool:
        if name.lower() == ".git":
            return False
        if path in self.base or path in self.homes:
            return True
        if self.strays <= 0:
            return False
        self.strays -= 1 + len(path) // LONG  # their names take memory
        if self.strays <= 0:
            self.left_out.append("(more files than are looked at)")
        return not name.endswith(".pyc")


def content(path: str, mode: str, most: int) -> bytes | None:
    """Content of a file or link as git stores it; None if larger than `most` bytes or unreadable."""
    try:
        if os.lstat(path).st_size > most:
            return None
        return os.fsencode(os.readlink(path)) if mode == "120000" else _readable(path)
    except OSError as error:
        if error.errno == 5:  # the disk, not the name
            raise
    except MemoryError:
        pass
    return None


def _readable(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # mode 000 and the like: git would not get in, and so lose the file
        before = stat.S_IMODE(os.lstat(path).st_mode)
        os.chmod(path, before | stat.S_IRUSR)
        descriptor = os.open(path, os.O_RDONLY)
        os.chmod(path, before)
    with open(descriptor, "rb") as file:
        return file.read()


def blob_id(data: bytes) -> str:
    """Git blob id of the content."""
    try:
        from _sha1 import sha1  # type: ignore[import-not-found]  # hashlib would load all of OpenSSL
    except ImportError:
        from hashlib import sha1

    return str(sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest())
