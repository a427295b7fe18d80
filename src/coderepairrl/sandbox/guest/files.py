"""Files of the workspace: reading, writing, unpacking, and candidates for a diff."""

from __future__ import annotations

import os
import stat
import sys

from coderepairrl.sandbox.guest.frames import TYPE_CHECKING, decode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

READ_BYTES = 64 << 20
NO_ROOM = (27, 28, 122)  # EFBIG, ENOSPC, EDQUOT
LINKS = 40  # as many as the kernel follows


class Files:
    """Regular files inside the workspace. Paths are relative to `workdir`, or absolute."""

    def __init__(self, workdir: str) -> None:
        self.workdir = workdir

    def read(self, path: str) -> bytes:
        """Read a file. Raises OSError."""
        descriptor = os.open(self._enter_folder_of(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise PermissionError(13, "not a regular file")
            if info.st_size > READ_BYTES:
                raise OSError(27, "larger than can be read at once")
            return file.read(READ_BYTES)

    def write(self, path: str, body: bytes, follow: bool) -> None:
        """Write a file, creating its folders and keeping its mode. Raises OSError and leaves the file as it was."""
        name, old_mode = (self._enter_folder_of(path, make=True), 0) if follow else self._enter_without_links(path)
        try:
            mode = os.lstat(name).st_mode
        except FileNotFoundError:
            mode = 0
        if mode and not stat.S_ISREG(mode):
            raise IsADirectoryError(21, "is a directory") if stat.S_ISDIR(mode) else PermissionError(13, "not a file")
        is_read_only = mode and not mode & stat.S_IWUSR
        if is_read_only:
            os.chmod(name, stat.S_IMODE(mode) | stat.S_IWUSR)
        try:
            self._replace(name, body)
        except OSError:
            if not mode and os.path.lexists(name):
                os.unlink(name)
            raise
        finally:
            if is_read_only:
                os.chmod(name, stat.S_IMODE(mode))
        if old_mode:
            os.chmod(name, old_mode)

    def _replace(self, name: str, body: bytes) -> None:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        with open(descriptor, "wb") as file:
            size = os.fstat(descriptor).st_size
            if body and sys.platform == "linux":  # a write that does not fit must not destroy the old content
                try:
                    os.posix_fallocate(descriptor, 0, len(body))
                except OSError as error:
                    os.ftruncate(descriptor, size)
                    if error.errno in NO_ROOM:
                        raise
            file.write(body)
            file.truncate()

    def _enter_folder_of(self, path: str, make: bool = False) -> str:
        """Change to the folder of `path`, following links; return the file's name.

        Enters it by one call if it can: a call per folder would take minutes for the deepest paths.
        """
        for _ in range(LINKS):
            folder, name = os.path.split(os.path.join(self.workdir, path))
            if name in ("", ".", ".."):
                folder, name = os.path.join(folder, name), ""
            self._change_folder(folder, make)
            if not name:
                raise IsADirectoryError(21, "is a directory")
            try:
                path = os.path.join(os.getcwd(), os.readlink(name))
            except OSError:  # no link
                return name
        raise OSError(40, "too many links")

    def _change_folder(self, folder: str, make: bool) -> None:
        try:
            os.chdir(folder)
        except FileNotFoundError:
            os.chdir("/")
            for part in filter(None, folder.split("/")):
                try:
                    os.chdir(part)
                except FileNotFoundError:
                    self._check_inside_workspace()
                    if not make:
                        raise
                    os.mkdir(part)
                    os.chdir(part)
        self._check_inside_workspace()

    def _check_inside_workspace(self) -> None:
        if not (os.getcwd() + "/").startswith(self.workdir + "/"):
            raise PermissionError(13, "outside the workspace")

    def _enter_without_links(self, path: str) -> tuple[str, int]:
        """Change to the folder of `path`, replacing links by folders; return name and mode to restore.

        Removes the file if it is a link or has other hard links.
        """
        full = os.path.join(self.workdir, path)
        *folders, name = os.path.relpath(full, self.workdir).split("/")
        if name in ("", ".", "..") or ".." in folders or full.endswith("/"):
            raise PermissionError(13, "outside the workspace")
        os.chdir(self.workdir)
        for part in folders:
            if os.path.islink(part):
                os.unlink(part)
            if not os.path.lexists(part):
                os.mkdir(part)
            os.chdir(part)
        info = os.lstat(name) if os.path.lexists(name) else None
        if info is None or not (stat.S_ISLNK(info.st_mode) or (stat.S_ISREG(info.st_mode) and info.st_nlink > 1)):
            return name, 0
        os.unlink(name)
        return name, 0 if stat.S_ISLNK(info.st_mode) else stat.S_IMODE(info.st_mode)


def unpack(archive: int, root: str) -> None:
    """Fill folder `root` from an archive of `workspace.write_archive`; closes the descriptor."""
    folders = []
    with open(archive, "rb") as source:
        while length := source.read(4):
            entry = decode(source.read(int.from_bytes(length, "big")))
            path, mode = os.path.join(root, entry["path"]), entry["mode"]
            if "same" in entry:
                os.link(os.path.join(root, entry["same"]), path, follow_symlinks=False)
                continue
            if stat.S_ISDIR(mode):
                folders.append((path, mode, entry["time"]))
                if entry["path"]:
                    os.mkdir(path, 0o700)
                continue
            if stat.S_ISLNK(mode):
                os.symlink(entry["target"], path)
            elif stat.S_ISREG(mode):
                _unpack_file(source, path, entry["size"], stat.S_IMODE(mode))
            else:  # a pipe, or what an unprivileged process cannot make
                os.mknod(path, mode)
            os.utime(path, ns=(entry["time"], entry["time"]), follow_symlinks=False)
    for path, mode, when in reversed(folders):  # last, since writing needs access and changes the time
        os.chmod(path, stat.S_IMODE(mode))
        os.utime(path, ns=(when, when))


def _unpack_file(source: IO[bytes], path: str, size: int, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        while size:
            data = source.read(min(size, 1 << 20))
            if not data:
                raise EOFError("the archive of the workspace is cut off")
            size -= len(data)
            while data:
                data = data[file.write(data) :]
        os.fchmod(file.fileno(), mode)


LONG = 256  # characters of a path that count as one more entry
TOOL_CACHES = frozenset(("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"))


class DiffWalk:
    """Files and links under `root` for a diff, without `.git`, caches of tools and the paths that are None in `base`.

    Visits at most `strays` entries outside `base`, as agents can create too many. `left_out` lists what was skipped.
    """

    def __init__(self, root: str, base: dict[str, Any], strays: int) -> None:
        self.root, self.base, self.strays = root, base, strays
        self.left_out: list[str] = []
        self.base_folders = {""}
        for path in base:
            while path := path.rpartition("/")[0]:
                self.base_folders.add(path)

    def list_files(self) -> Iterator[tuple[str, str]]:
        """Yield each as ``(path, git mode)``."""
        root_mode = os.lstat(self.root).st_mode if os.path.lexists(self.root) else 0
        folders = [("", root_mode)] if stat.S_ISDIR(root_mode) else []
        while folders:
            deeper = []
            for path, mode in self._list_candidates(*folders.pop()):
                if stat.S_ISDIR(mode):
                    deeper.append((path, mode))
                elif git_mode := find_git_mode(mode):
                    yield path, git_mode
            folders += sorted(deeper, key=lambda each: each[0] in self.base_folders)  # base's last, to be popped next

    def _list_candidates(self, folder: str, mode: int) -> Iterator[tuple[str, int]]:
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
                if not self._is_candidate(path, entry.name):
                    continue
                try:
                    mode = os.lstat(os.path.join(self.root, path)).st_mode
                except OSError:
                    self.left_out.append(path)
                    continue
                if stat.S_ISLNK(mode) and entry.name.lower() == ".gitmodules":  # git refuses patches with such links
                    self.left_out.append(path)
                elif not (stat.S_ISDIR(mode) and entry.name in TOOL_CACHES and path not in self.base_folders):
                    yield path, mode

    def _is_candidate(self, path: str, name: str) -> bool:
        if name.lower() == ".git" or self.base.get(path, "") is None:
            return False
        if path in self.base or path in self.base_folders:
            return True
        if self.strays <= 0:
            return False
        self.strays -= 1 + len(path) // LONG  # long paths take memory
        if self.strays <= 0:
            self.left_out.append("(more files than are looked at)")
        return not name.endswith(".pyc")


def find_git_mode(mode: int) -> str:
    """Git's mode of a file or link, else empty."""
    if stat.S_ISLNK(mode):
        return "120000"
    if not stat.S_ISREG(mode):
        return ""
    return "100755" if mode & stat.S_IXUSR else "100644"


def read_git_content(path: str, mode: str, most: int) -> bytes | None:
    """Content of a file or link as git stores it; None if larger than `most` bytes or unreadable."""
    try:
        if os.lstat(path).st_size > most:
            return None
        return os.fsencode(os.readlink(path)) if mode == "120000" else _read_file_content(path)
    except OSError as error:
        if error.errno == 5:  # EIO: the disk fails
            raise
    except MemoryError:
        pass
    return None


def _read_file_content(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # for example mode 000
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
