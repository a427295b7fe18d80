"""An unpacked image as seen in a sandbox of bubblewrap.

The root is an overlay with changes in memory or, without overlays, read-only except for the working folder.
Programs run as one user id, that of ``USER``, which owns all files and has no capabilities, even as root: owners cannot
be changed, and other ids do not exist.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from coderepairrl.errors import TaskError
from coderepairrl.sandbox import contents, rootfs
from coderepairrl.sandbox.rootfs import Image
from coderepairrl.sandbox.session import ResourceLimits
from coderepairrl.sandbox.workspace import PreparedWorkspace

MOUNTED = f"/{rootfs.MOUNTED}"
"""Our only folder inside: the guest and its Python."""
ARCHIVE = f"{MOUNTED}/workspace"
"""Archive of a working folder that is copied, as seen by the guest."""


def mount_arguments(
    image: Image, prepared: PreparedWorkspace, files: Path, limits: ResourceLimits, inside: Path, binds: Sequence[str]
) -> list[str]:
    """Options of bubblewrap that mount the `files` of `image`, our folder `inside`, and the user's `binds`.

    Raises `TaskError` if a bind crosses a link in the image, or has no mount point.
    """
    size = str(limits.tmp_bytes)
    arguments = ["--ro-bind" if prepared.packed else "--bind", str(files), "/"]
    for folder in (*contents.sort_outermost_first(binds), *image.hidden):
        _check_mountable(image, prepared, folder)
    for folder in contents.sort_outermost_first(binds):
        arguments += ["--ro-bind", folder, folder]
        for _, at in contents.find_visible_answers([folder]):
            arguments += ["--size", "4096", "--tmpfs", at, "--remount-ro", at]
    for at in image.hidden:
        arguments += ["--size", "4096", "--tmpfs", at, "--remount-ro", at]
    arguments += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    arguments += ["--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    arguments += [] if prepared.in_place else ["--size", size, "--perms", "1777", "--tmpfs", "/tmp"]
    arguments += ["--ro-bind", str(inside), MOUNTED]
    if prepared.packed:
        arguments += ["--size", str(prepared.size + limits.disk_bytes), "--tmpfs", image.workdir]
        arguments += ["--ro-bind", str(prepared.archive), ARCHIVE]
    return [*arguments, "--chdir", image.workdir]


def _check_mountable(image: Image, prepared: PreparedWorkspace, folder: str) -> None:
    # bubblewrap would follow a link of the image, and resolve it on the host
    at = prepared.tree
    for part in Path(folder).parts[1:]:
        at = at / part
        try:
            kind = at.lstat().st_mode
        except FileNotFoundError:
            if prepared.packed:
                raise TaskError(
                    f"{image.name} has no folder {folder}, and none can be added to it here",
                    fix="leave out sandbox.options.copy, or use a kernel with overlays",
                ) from None
            return
        if not stat.S_ISDIR(kind):
            raise TaskError(
                f"{image.name} has a file or a link at /{at.relative_to(prepared.tree)}",
                fix=f"show {folder} at another path (sandbox.options.binds)",
            )
