"""Unpacked images and their records, created by `coderepairrl.environments`.

In the image cache:

- ``names/KEY.json``: the image for a name or digest;
- ``trees-USER/ID/``: an image for sandboxes of that user, complete or absent: its files (``tree``), our repository with
  the working folder as its one commit (``git``, ``manifest.json``), and the `Image` (``image.json``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import images_cache
from coderepairrl.sandbox.guest.files import find_git_mode

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
IMAGE_RECORD = "image.json"
"""Record of an unpacked image; written last, so an image without it is incomplete."""
SHARES = "shares"
"""Folder of files shared by the unpacked images next to it."""
MOUNTED = "run/crrl"
"""Folder in an image where sandboxes mount their files."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Default ``PATH`` for images that set none."""
_PREPARE = "crrl tasks prepare with the task's source, on a machine with a network: it fetches and unpacks images"


@dataclass(frozen=True)
class Image:
    """An unpacked image, stored as ``image.json``. Paths are inside it."""

    name: str
    id: str
    """SHA-256 of its configuration, in hex; equal for the same layers and settings."""
    workdir: str
    """Working folder: the task's repository."""
    env: Mapping[str, str]
    user: int
    group: int
    """User and group of its programs."""
    home: str
    base: str
    """Id of the one commit in ``git``."""
    size: int
    """Bytes that a file system of 4 KiB pages needs for the working folder."""
    head: str = ""
    """HEAD of the image's own repository, which has no later commits; empty without one."""
    hidden: tuple[str, ...] = ()
    """Folders with answers to the shipped tasks."""
    report: Mapping[str, Any] | None = None
    """Report of the build: counts, omissions, digests."""
    digest: str = ""
    """SHA-256 in hex over all its files and those of ``git``; empty for images unpacked before digests existed."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the image in `folder`. Raises FileNotFoundError if it is missing or incomplete."""
        values = json.loads((folder / IMAGE_RECORD).read_text())
        return cls(**values | {"hidden": tuple(values["hidden"])})


def images_folder(user: int | None) -> Path:
    """Folder of the images of sandboxes that run as `user` (None: as we do)."""
    return images_cache() / f"trees-{os.getuid() if user is None else user}"


def image_record_path(where: str) -> Path:
    """Record file of image `where` (``NAME`` or ``NAME@DIGEST``)."""
    name, _, digest = where.rpartition("@")
    key = digest.replace(":", "-") if name and DIGEST.fullmatch(digest) else hashlib.sha256(where.encode()).hexdigest()
    return images_cache() / "names" / f"{key}.json"


def pin_image(where: str) -> str:
    """Add the digest recorded at preparation to `where`, if any."""
    if DIGEST.fullmatch(where.rpartition("@")[2]):
        return where
    try:
        return str(json.loads(image_record_path(where).read_text())["pinned"])
    except FileNotFoundError:
        return where


def find_image(where: str, user: int | None) -> tuple[Path, Image]:
    """Folder and record of the unpacked image `where`. Raises `TaskError` if not prepared for `user`."""
    try:
        record = json.loads(image_record_path(where).read_text())
    except FileNotFoundError:
        raise TaskError(f"image {where} was not prepared on this machine", fix=_PREPARE) from None
    folder = images_folder(user) / record["id"]
    try:
        return folder, Image.read(folder)
    except FileNotFoundError:
        raise TaskError(f"image {where} was not prepared for sandboxes of this user", fix=_PREPARE) from None


def check_image_complete(where: str, user: int | None) -> None:
    """Raise `TaskError` unless the image's working folder and our repository are complete; ignores contents."""
    folder, image = find_image(where, user)
    work = folder / "tree" / image.workdir.lstrip("/")
    try:
        manifest: dict[str, list[str]] = json.loads((folder / "manifest.json").read_text())
        modes = ((path, mode, find_git_mode((work / path).lstat().st_mode)) for path, (mode, _) in manifest.items())
        changed = next((path for path, mode, present in modes if present != mode), "")
        if not changed and (folder / "git/refs/heads/main").read_text().strip() == image.base:
            return
    except (OSError, ValueError) as error:
        changed = str(error)
    raise TaskError(
        f"image {where} is not as it was unpacked: {changed or folder / 'git'}",
        fix=f"rm -r {shlex.quote(str(folder))}, and prepare its tasks again (crrl tasks prepare)",
    )


LINKS = 40
"""Most links followed, as in Linux."""


def resolve_inside(tree: Path, path: str, base: str = "") -> str | None:
    """Resolve `path`, from `base` unless absolute, to a link-free path relative to `tree`; None if missing."""
    resolved: list[str] = []
    remaining, links = deque([*("" if path.startswith("/") else base).split("/"), *path.split("/")]), 0
    while remaining:
        part = remaining.popleft()
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
            remaining.extendleft(reversed(target.split("/")))
        elif remaining and not stat.S_ISDIR(kind):
            return None
        else:
            resolved.append(part)
    return "/".join(resolved)


def read_text_inside(tree: Path, path: str, longest: int = 1 << 20) -> str:
    """Read up to `longest` bytes of a regular file; empty without one."""
    resolved = resolve_inside(tree, path)
    if not resolved or not stat.S_ISREG((tree / resolved).lstat().st_mode):
        return ""
    with (tree / resolved).open("rb") as file:
        return os.fsdecode(file.read(longest))
