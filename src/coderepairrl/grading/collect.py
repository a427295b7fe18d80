"""Files of an attempt, for checks that run in a sandbox of another workspace (`Checks.collect`)."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from pathlib import PurePosixPath

from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks

# limit of a path's archive, and of its files together
_MAX_BYTES = 64 << 20
TIMEOUT_SECONDS = 600.0
"""Limit of all archives together, since attempts can delay the programs that pack them."""
# exit code of a shell that does not find a program
_NO_PROGRAM = 127
# unpacks an archive into folder $1 in place of its entry $2: a file, or a folder's content with hidden files
_REPLACE_BY_ARCHIVE = """mkdir -p -- "$1" && cd -- "$1" || exit 1
if [ -d "$2" ] && [ ! -L "$2" ]; then rm -rf -- "$2"/..?* "$2"/.[!.]* "$2"/*; else rm -rf -- "$2"; fi
tar -xof -"""


async def copy_collected_files(sandbox: Sandbox, fresh: Sandbox, checks: Checks) -> str:
    """Copy the paths of `checks.collect` from `sandbox` to `fresh`; return why that is impossible, or "".

    A path that `sandbox` lacks stays as it is in `fresh`.
    """
    end = time.monotonic() + TIMEOUT_SECONDS
    for path, script in checks.collect.items():
        parent, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
        packed = await sandbox.exec(
            ["sh", "-c", script], timeout=max(end - time.monotonic(), 0.0), max_bytes=_MAX_BYTES
        )
        if packed.timed_out or packed.truncated:
            return f"{path} could not be collected: more than {TIMEOUT_SECONDS:g} s, or {_MAX_BYTES >> 20} MiB"
        if packed.exit_code == _NO_PROGRAM:  # or an image without tar would look like an attempt without files
            return f"{path} could not be collected: the image has no tar"
        try:
            archive = await asyncio.to_thread(_sanitize_archive, packed.output, name)
        except (tarfile.TarError, KeyError, OSError, ValueError, OverflowError, RecursionError) as error:
            return f"{path} could not be collected: {error}"
        if archive:
            put = ["sh", "-c", _REPLACE_BY_ARCHIVE, "sh", parent, name]
            done = await fresh.exec(put, stdin=archive, timeout=max(end - time.monotonic(), 0.0))
            if not done.ok:
                return f"{path} does not fit into the checks' sandbox: {done.output[-200:].decode(errors='replace')}"
    return ""


def _sanitize_archive(archive: bytes, name: str) -> bytes:
    """Rewrite an untrusted tar archive: only the entry `name`, with files, folders, and links that lead downwards.

    Returns b"" without such entries. Raises TarError, KeyError, OSError, OverflowError, RecursionError, and ValueError
    for more than `_MAX_BYTES`.
    """
    if not archive:
        return b""
    safe, total = io.BytesIO(), 0
    originals: dict[str, tarfile.TarInfo] = {}  # the member with the content of each file: a hard link has none
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as source, tarfile.open(fileobj=safe, mode="w") as target:
        for member in source:
            path, link = PurePosixPath(member.name), PurePosixPath(member.linkname)
            is_link = member.issym() and len(path.parts) > 1 and not link.is_absolute() and ".." not in link.parts
            is_file = member.isreg() or member.islnk()
            if path.parts[:1] != (name,) or ".." in path.parts or not (is_file or is_link or member.isdir()):
                continue
            entry = tarfile.TarInfo(member.name)
            entry.linkname = member.linkname if is_link else ""
            entry.mode = member.mode & 0o777
            original = originals[member.linkname] if member.islnk() else member
            originals[member.name] = original
            entry.size = original.size if is_file else 0
            total += entry.size
            if total > _MAX_BYTES:
                raise ValueError(f"its files have more than {_MAX_BYTES >> 20} MiB")
            entry.type = tarfile.REGTYPE if is_file else member.type  # a hard link becomes a file
            target.addfile(entry, source.extractfile(original) if is_file else None)
        is_empty = not target.getmembers()
    return b"" if is_empty else safe.getvalue()
