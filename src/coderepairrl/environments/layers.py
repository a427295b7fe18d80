# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH108, PTH112, PTH114, PTH115, PTH123, PTH211
"""Unpacks an image layer: ``python -I layers.py FOLDER SHARES < LAYER.tar``. Prints a JSON report.

Standard library only: the sandbox user, who runs it, may not be able to read the package.

Layers are untrusted: names with ``..`` are refused, symbolic links stay inside the folder, and no entry is written
through one. Follows github.com/opencontainers/image-spec, layer.md, except what needs root: owners, devices,
set-user-id bits and extended attributes are omitted and counted, and the owner may read and write everything.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import stat
import sys
import tarfile
from collections import deque

TYPE_CHECKING = False  # instead of `typing`, which loads slowly
if TYPE_CHECKING:
    from typing import IO

HIDDEN, OPAQUE = ".wh.", ".wh..wh..opq"
LINKS = 40  # as many as the kernel follows
SMALL = 4 << 20
"""Bytes up to which a shared file is linked without being written."""
EARLIEST, LATEST = -(1 << 31), 1 << 33  # of times in seconds: from 1901 to 2242
REFUSED, NO_ROOM = 3, 4
"""Exit codes: invalid or unfit layer, full disk."""
MEMORY = 2 << 30  # bytes: a compressed header of a few MiB can ask for gigabytes
MAX_LISTED = 100  # paths named in the report, for each kind of omission


class InvalidLayer(Exception):
    """Malformed or hostile layer."""


class LayerExtraction:
    """A layer being extracted to `root`; equal files are hard links to `shares`, if given."""

    def __init__(self, root: str, shares: str) -> None:
        self.root, self.shares = root, shares
        self.files = self.bytes = self.shared = 0
        self.left_out: dict[str, list[str]] = {}
        self.counts: dict[str, int] = {}
        self._parents: dict[str, str] = {}
        self._times: dict[str, int] = {}  # set at the end, since every entry in a folder changes its time
        self._added: set[str] = set()
        """Paths from this layer, which its whiteouts do not hide."""

    def apply(self, stream: IO[bytes]) -> None:
        """Extract the tar archive `stream`. Raises `InvalidLayer`, OSError and `tarfile`'s errors."""
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20, errors="surrogateescape") as archive:
            for member in archive:
                self._extract_entry(archive, member)
                archive.members = []  # type: ignore[attr-defined]  # else it remembers all of them
        for folder, time in self._times.items():
            if os.path.isdir(folder) and not os.path.islink(folder):
                os.utime(folder, ns=(time, time))

    def report(self) -> dict[str, object]:
        """Report ``files``, ``bytes``, ``shared`` (bytes), and omissions by kind."""
        totals = {"files": self.files, "bytes": self.bytes, "shared": self.shared}
        return {**totals, "counts": self.counts, "left_out": self.left_out}

    def _extract_entry(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = split_entry_name(member.name)
        if not parts:
            if not member.isdir():
                raise InvalidLayer(f"the root folder is not a folder: {member.name!r}")
            self._extract_folder(self.root, member)
            return
        folder = self._resolve_parent(parts[:-1])
        name = parts[-1]
        if name.startswith(HIDDEN):
            self._apply_whiteout(folder, name)
            return
        self._record_omissions(member, "/".join(parts))
        target = f"{folder}/{name}"
        self._added.add(target)
        if member.isdir():
            self._extract_folder(target, member)
            return
        linked = self._resolve_hard_link(member) if member.islnk() else ""
        if member.ischr() or member.isblk() or linked == target or (member.islnk() and not linked):
            return
        self._make_room(target)
        if member.issym():
            os.symlink(member.linkname, target)
        elif linked:
            os.link(linked, target, follow_symlinks=False)
            return
        elif member.isfifo():
            os.mkfifo(target, 0o600)
            os.chmod(target, read_safe_mode(member))
        elif member.isfile():
            self._extract_file(archive, member, "/".join(parts), target)
            return
        else:
            raise InvalidLayer(f"an entry of unknown kind {member.type!r}: {member.name!r}")
        time = read_exact_time(member)
        os.utime(target, ns=(time, time), follow_symlinks=False)

    def _record_omissions(self, member: tarfile.TarInfo, path: str) -> None:
        kinds = []
        if member.ischr() or member.isblk():
            kinds.append("devices")
        elif not member.islnk() and not member.issym():
            if member.mode & 0o6000:
                kinds.append("set-id bits")
            if member.mode & 0o600 != 0o600 or (member.isdir() and not member.mode & 0o100):
                kinds.append("owner may not read and write")
        if member.uid or member.gid:
            kinds.append("owners")
        if any(key.startswith("SCHILY.xattr.") for key in member.pax_headers):
            kinds.append("extended attributes")
        for kind in kinds:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if kind != "owners" and len(named := self.left_out.setdefault(kind, [])) < MAX_LISTED:
                named.append(path)

    def _resolve_parent(self, parts: list[str]) -> str:
        # symbolic links stay inside the root
        key = "/".join(parts)
        if (cached := self._parents.get(key)) is not None:
            return cached
        current, remaining, links = self.root, deque(parts), 0
        while remaining:
            part = remaining.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                current = current if current == self.root else os.path.dirname(current)  # noqa: PTH120
                continue
            path = f"{current}/{part}"
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                os.mkdir(path, 0o755)
                os.chmod(path, 0o755)
                self._times.setdefault(path, 0)
                mode = stat.S_IFDIR
            if stat.S_ISLNK(mode):
                links += 1
                if links > LINKS:
                    raise InvalidLayer(f"too many symbolic links on the way to {key!r}")
                target = os.readlink(path)
                current = self.root if target.startswith("/") else current
                remaining.extendleft(reversed(target.split("/")))
            elif stat.S_ISDIR(mode):
                current = path
                self._added.add(path)
            else:
                raise InvalidLayer(f"{key!r} leads through a file")
        self._times.setdefault(current, os.lstat(current).st_mtime_ns)
        self._parents[key] = current
        return current

    def _extract_folder(self, target: str, member: tarfile.TarInfo) -> None:
        try:
            os.mkdir(target, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(target).st_mode):
                self._make_room(target)
                os.mkdir(target, 0o700)
        os.chmod(target, read_safe_mode(member) | 0o100)
        self._times[target] = read_exact_time(member)

    def _make_room(self, target: str) -> None:
        try:
            mode = os.lstat(target).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            shutil.rmtree(target)
        else:
            os.unlink(target)
        if not stat.S_ISREG(mode):  # a folder or link that cached paths lead through
            self._parents.clear()

    def _resolve_hard_link(self, member: tarfile.TarInfo) -> str:
        # empty if the target is a device, which was left out
        parts = split_entry_name(member.linkname)
        source = f"{self._resolve_parent(parts[:-1])}/{parts[-1]}" if parts else self.root
        try:
            mode = os.lstat(source).st_mode
        except FileNotFoundError:
            if self.counts.get("devices"):
                return ""
            raise InvalidLayer(f"{member.name!r} is a link to {member.linkname!r}, which is missing") from None
        if stat.S_ISDIR(mode):
            raise InvalidLayer(f"{member.name!r} is a hard link to a folder")
        return source

    def _apply_whiteout(self, folder: str, name: str) -> None:
        """Apply the whiteout `name` to lower layers."""
        if name == OPAQUE:
            self._empty_folder(folder)
            return
        hidden = name[len(HIDDEN) :]
        if hidden in ("", ".", ".."):
            raise InvalidLayer(f"a whiteout of nothing that can be named: {name!r}")
        if hidden.startswith(HIDDEN):  # metadata of aufs
            return
        target = f"{folder}/{hidden}"
        if target not in self._added:
            self._make_room(target)

    def _empty_folder(self, folder: str) -> None:
        remaining = [folder]
        while remaining:
            with os.scandir(remaining.pop()) as entries:
                children = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for path, is_folder in children:
                if path not in self._added:
                    self._make_room(path)
                elif is_folder:
                    remaining.append(path)

    def _extract_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, target: str) -> None:
        source = archive.extractfile(member)
        assert source is not None
        mode, time = read_safe_mode(member), read_exact_time(member)
        self.files += 1
        self.bytes += member.size
        key = hashlib.sha256(f"{mode:o} {time} {path}\0".encode(errors="surrogateescape"))
        sharing = bool(self.shares and member.size and ".git" not in path.split("/"))
        data = source.read(SMALL)
        key.update(data)
        if sharing and len(data) == member.size and self._link_to_share(key.hexdigest(), target, member.size):
            return
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            while data:
                file.write(data)
                data = source.read(SMALL)
                key.update(data)
        os.chmod(target, mode)
        os.utime(target, ns=(time, time))
        if sharing:
            self._add_share(key.hexdigest(), target, member.size)

    def _add_share(self, key: str, target: str, size: int) -> None:
        share = self._share_path(key)
        try:
            os.link(target, share)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(share), exist_ok=True)  # noqa: PTH120
            self._add_share(key, target, size)
        except OSError as error:
            if error.errno == errno.EEXIST:
                aside = f"{os.path.dirname(target)}/.{key}"  # noqa: PTH120
                if self._link_to_share(key, aside, size):
                    os.rename(aside, target)
            elif error.errno != errno.EMLINK:
                raise

    def _share_path(self, key: str) -> str:
        return f"{self.shares}/{key[:2]}/{key[2:]}"

    def _link_to_share(self, key: str, target: str, size: int) -> bool:
        """Try to link `target` to an existing share."""
        share = self._share_path(key)
        try:
            os.link(share, target)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.EMLINK:
                return False
            raise
        if os.lstat(target).st_size != size:  # cut off by a crash of the machine
            os.unlink(target)
            os.unlink(share)
            return False
        self.shared += size
        return True


def split_entry_name(name: str) -> list[str]:
    """Split an entry's name; empty for the root. Raises `InvalidLayer` for unsafe names.

    >>> split_entry_name("./usr/bin/")
    ['usr', 'bin']
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not name or "\0" in name or ".." in parts:
        raise InvalidLayer(f"an entry with the name {name!r}")
    return parts


def read_safe_mode(member: tarfile.TarInfo) -> int:
    """Permission bits, plus the sticky bit of folders."""
    return (member.mode & (0o1777 if member.isdir() else 0o777)) | 0o600


def read_exact_time(member: tarfile.TarInfo) -> int:
    """Exact modification time in nanoseconds."""
    text = member.pax_headers.get("mtime", "")
    seconds, _, fraction = text.partition(".")
    if text and seconds.isdigit() and (fraction.isdigit() or not fraction):
        epoch_seconds, part = int(seconds), int((fraction + "0" * 9)[:9])
    else:
        epoch_seconds, part = int(member.mtime), 0
    return min(max(epoch_seconds, EARLIEST), LATEST) * 10**9 + part


def main(folder: str, shares: str) -> int:
    """Apply standard input to `folder`; returns the exit code."""
    sys.setrecursionlimit(20_000)  # to remove folders as deep as paths can be
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    layer = LayerExtraction(folder, shares)
    try:
        layer.apply(sys.stdin.buffer)
        while sys.stdin.buffer.read(1 << 20):  # read past the end of the archive: padding
            pass
    except (InvalidLayer, tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    except MemoryError:
        print(f"an entry's header takes more than {MEMORY >> 30} GiB of memory", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(error, file=sys.stderr)
        return NO_ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else REFUSED
    print(json.dumps(layer.report()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
