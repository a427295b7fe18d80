"""Images that were unpacked: where each lies, and what is known of it. `coderepairrl.environments` makes them.

Below the cache's folder for images:

- ``names/KEY.json``: which image a name or a digest stands for;
- ``trees-USER/ID/``: an image for sandboxes that run as that user, and there whole or not at all: its files (``tree``),
  a repository of ours with the files of the working folder as its one commit (``git``, ``manifest.json``), and the
  `Image` (``image.json``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import images_cache

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
IMAGE_RECORD = "image.json"
"""The file of an unpacked image that says what it is; written last, so that one without it is half unpacked."""
SHARES = "shares"
"""The folder beside unpacked images with the files that they share."""
MOUNTED = "run/crrl"
"""Folder of an image that sandboxes mount what they need upon."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""``PATH`` in an image that does not set it."""
_PREPARE = "crrl data prepare with the task's source, on a machine with a network: it fetches and unpacks images"


@dataclass(frozen=True)
class Image:
    """An unpacked image, as JSON in ``image.json``. Paths are as commands inside see them."""

    name: str
    id: str
    """SHA-256 of its configuration, in hex: that of the same layers with the same settings."""
    workdir: str
    """The working folder, whose files are the task's repository."""
    env: Mapping[str, str]
    user: int
    group: int
    """Whom its programs run as."""
    home: str
    base: str
    """Id of the one commit in ``git``."""
    size: int
    """Bytes that a file system of 4 KiB pages needs for the working folder."""
    head: str = ""
    """The commit that the image's own repository is at, and later than which there is none; empty without one."""
    hidden: tuple[str, ...] = ()
    """Folders in it with answers to the tasks that ship."""
    report: Mapping[str, Any] | None = None
    """How it was made, what was left out."""
    digest: str = ""
    """SHA-256 in hex over all its files, and over those of ``git``, as they were unpacked; empty if they were before
    there was one."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The image that was unpacked to `folder`. Raises FileNotFoundError where none was, or not to its end."""
        values = json.loads((folder / IMAGE_RECORD).read_text())
        return cls(**values | {"hidden": tuple(values["hidden"])})


def store(user: int | None) -> Path:
    """Where the images of sandboxes that run as `user` (None: as we do) lie."""
    return images_cache() / f"trees-{os.getuid() if user is None else user}"


def record_of(where: str) -> Path:
    """The file that says which image `where` (``NAME``, ``NAME@DIGEST``) stands for. A digest says it all."""
    name, _, digest = where.rpartition("@")
    key = digest.replace(":", "-") if name and DIGEST.fullmatch(digest) else hashlib.sha256(where.encode()).hexdigest()
    return images_cache() / "names" / f"{key}.json"


def pinned(where: str) -> str:
    """`where` with the digest that it had when it was prepared; as it is where it has one, or was not prepared."""
    if DIGEST.fullmatch(where.rpartition("@")[2]):
        return where
    try:
        return str(json.loads(record_of(where).read_text())["pinned"])
    except FileNotFoundError:
        return where


def find(where: str, user: int | None) -> tuple[Path, Image]:
    """The folder of the unpacked image that `where` stands for, and what is known of it.

    Raises `TaskError` when it was not prepared for sandboxes that run as `user`.
    """
    try:
        record = json.loads(record_of(where).read_text())
    except FileNotFoundError:
        raise TaskError(f"image {where} was not prepared on this machine", fix=_PREPARE) from None
    folder = store(user) / record["id"]
    try:
        return folder, Image.read(folder)
    except FileNotFoundError:
        raise TaskError(f"image {where} was not prepared for sandboxes of this user", fix=_PREPARE) from None


def check_present(where: str, user: int | None) -> None:
    """`find`, and raise `TaskError` where a file of the working folder, or our repository of it, is not there any more.

    What the files contain, and those of the rest of the image, are not looked at: that takes seconds for each image.
    """
    folder, image = find(where, user)
    work = folder / "tree" / image.workdir.lstrip("/")
    try:
        manifest: dict[str, list[str]] = json.loads((folder / "manifest.json").read_text())
        lacking = next((path for path, (mode, _) in manifest.items() if _mode(work / path) != mode), "")
        if not lacking and (folder / "git/refs/heads/main").read_text().strip() == image.base:
            return
    except (OSError, ValueError) as error:
        lacking = str(error)
    raise TaskError(
        f"image {where} is not as it was unpacked: {lacking or folder / 'git'}",
        fix=f"rm -r {shlex.quote(str(folder))}, and prepare its tasks again (crrl data prepare)",
    )


def _mode(path: Path) -> str:
    """As git's."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "120000"
    return "" if not stat.S_ISREG(mode) else "100755" if mode & stat.S_IXUSR else "100644"
