"""The archive a guest unpacks itself, which is faster than starting a program.

A list of entries, folders first: the length of a JSON object (4 bytes, big endian), the object, and the content of a
regular file. The object has ``path`` (surrogates for bytes that are not UTF-8), ``mode`` and ``time`` (last change,
ns); regular files have ``size``, symbolic links ``target``, further hard links only ``same``, the first name. Read by
`guest.files.unpack`.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import IO, Any


def pack(folder: Path, archive: Path) -> None:
    """Write the contents of `folder` to `archive`, without owners and extended attributes. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    first_names: dict[tuple[int, int], str] = {}
    with archive.open("wb") as file:
        for parent, folders, names in os.walk(folder, onerror=fail):
            links = [name for name in folders if Path(parent, name).is_symlink()]
            for path in (Path(parent), *(Path(parent, name) for name in sorted(names + links))):
                _add(file, path, "" if path == folder else str(path.relative_to(folder)), first_names)


def _add(file: IO[bytes], path: Path, name: str, known: dict[tuple[int, int], str]) -> None:
    status = path.lstat()
    entry: dict[str, Any] = {"path": name, "mode": status.st_mode, "time": status.st_mtime_ns}
    if stat.S_ISLNK(status.st_mode):
        entry["target"] = os.readlink(path)  # noqa: PTH115 - a Path spells it another way
    elif stat.S_ISREG(status.st_mode):
        first = known.setdefault((status.st_dev, status.st_ino), name) if status.st_nlink > 1 else name
        entry |= {"size": status.st_size} if first == name else {"same": first}
    text = json.dumps(entry).encode()
    file.write(len(text).to_bytes(4) + text)
    if "size" in entry:
        with path.open("rb") as content:
            shutil.copyfileobj(content, file)
