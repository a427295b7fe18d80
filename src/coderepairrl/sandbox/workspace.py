"""From `Task.workspace` to a prepared tree for sandboxes to copy.

A workspace becomes *one commit of exact bytes* (`contents`), from which come:

- ``tree/``: the files, with a decoy ``.git`` (a repository of that commit) for the agent;
- ``git/``: the private bare repository for diffs (`patch`), hidden from every sandbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coderepairrl.errors import SandboxFault
from coderepairrl.printable import without_login
from coderepairrl.processes.hostgit import BARE_CONFIG, bare, git
from coderepairrl.sandbox import packing
from coderepairrl.sandbox.contents import Entry, Images, entries_of
from coderepairrl.sandbox.environment import built_for
from coderepairrl.sandbox.rootfs import Image, find

Unpacked = Callable[[str, Path], "Prepared"]
"""Creates, in a folder, the workspace of an unpacked image, by its name."""
_Key = tuple[str, Path | None]
"""A workspace and its environment."""

# Copies have new inodes and change times; the decoy's index must still recognise its files.
_DECOY_CONFIG = (
    BARE_CONFIG.replace("bare = true", "bare = false")
    + "\ttrustctime = false\n\tcheckStat = minimal\n[user]\n\tname = agent\n\temail = agent@sandbox\n[gc]\n\tauto = 0\n"
)


def quoted(path: str) -> bytes:
    """`path` C-quoted for fast-import."""
    raw = os.fsencode(path)
    return b'"' + raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


def commit_stream(ref: str, entries: Iterable[Entry], *, base: str = "", deleted: Iterable[str] = ()) -> bytes:
    """A fast-import stream with one commit of `entries` on `base`, independent of clock and user."""
    head = f"feature done\ncommit {ref}\ncommitter crrl <crrl@localhost> 946684800 +0000\ndata 8\nbaseline\n"
    parts = [head.encode()]
    if base:
        parts.append(f"from {base}\n".encode())
    parts += [b"D " + quoted(path) + b"\n" for path in deleted]
    for path, mode, data in entries:
        parts.append(b"M %s inline %s\ndata %d\n" % (mode.encode(), quoted(path), len(data)))
        parts += [data, b"\n"]
    return b"".join([*parts, b"done\n"])


@dataclass
class Prepared:
    """A workspace ready to copy. `users` counts its open sandboxes."""

    root: Path
    base: str
    """Id of its one commit."""
    manifest: bytes
    """JSON ``{path: [git mode, blob id]}``."""
    workspace: str = ""
    """The workspace name."""
    size: int = 0
    """Bytes that a file system of 4 KiB pages needs for the files."""
    packed: bool = False
    """Whether `archive` exists instead of `tree`."""
    image: Image | None = None
    """The unpacked image whose files are in `tree`; the workspace is its working folder."""
    in_place: bool = False
    """Whether commands change `tree` itself, to build an image."""
    users: int = field(default=0, compare=False)
    diffs: dict[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)
    """Diffs by SHA-256 of the change (`patch.compose`)."""

    @property
    def tree(self) -> Path:
        """The files, with the decoy."""
        return self.root / "tree"

    @property
    def archive(self) -> Path:
        """The files packed (`packing`), instead of `tree`."""
        return self.root / "packed"

    @property
    def git(self) -> Path:
        """The private repository."""
        return self.root / "git"

    @property
    def attempts(self) -> Path:
        """A reused repository for commits of diffs: creating one costs more than a diff."""
        return self.root / "attempts"


class Workspaces:
    """Prepares each workspace once under `root` and keeps the `keep` last used. Thread-safe.

    `owner` is the user and group id of the files, None for ours; up to `pack_up_to` bytes are packed; `images` reads
    image files, or `unpacked` provides unpacked ones.
    """

    def __init__(
        self,
        root: Path,
        *,
        owner: int | None = None,
        pack_up_to: int = 0,
        images: Images | None = None,
        unpacked: Unpacked | None = None,
        keep: int = 64,
    ) -> None:
        self._root, self._owner, self._pack_up_to, self._images, self._keep = root, owner, pack_up_to, images, keep
        self._unpacked = unpacked
        self._known: OrderedDict[_Key, Prepared] = OrderedDict()
        self._busy: dict[_Key, threading.Lock] = {}
        self._lock = threading.Lock()
        self._count = 0

    def ready(self, workspace: str, environment: Path | None = None) -> Prepared | None:
        """`acquire` without blocking: None if the workspace is not prepared."""
        with self._lock:
            prepared = self._known.get((workspace, environment))
            if prepared is not None:
                prepared.users += 1
                self._known.move_to_end((workspace, environment))
            return prepared

    def acquire(self, workspace: str, environment: Path | None = None) -> Prepared:
        """Prepare `workspace` with the build files of its `environment`; `release` it afterwards.

        Raises `TaskError`, `SandboxFault`.
        """
        with self._lock:
            turn = self._busy.setdefault((workspace, environment), threading.Lock())
        with turn:
            if (prepared := self.ready(workspace, environment)) is not None:
                return prepared
            with self._lock:
                self._count += 1
                root = self._root / f"task-{self._count}"
            try:
                if workspace.startswith("image:") and self._unpacked is not None:
                    prepared = self._unpacked(workspace.removeprefix("image:"), root)
                    prepared.workspace = workspace
                else:
                    added = built_for(environment)
                    prepared = prepare(workspace, root, owner=self._owner, images=self._images, added=added)
                    if prepared.size <= self._pack_up_to:
                        pack(prepared, prepared.tree)
                        shutil.rmtree(prepared.tree)
            except OSError as error:  # the task's own files raise TaskError: this is our disk
                shutil.rmtree(root, ignore_errors=True)
                raise SandboxFault(
                    f"cannot prepare {without_login(workspace)}: {error}", fix="free some disk space"
                ) from error
            except BaseException:
                shutil.rmtree(root, ignore_errors=True)
                raise
            with self._lock:
                self._known[workspace, environment] = prepared
                prepared.users = 1
                idle = [name for name, entry in self._known.items() if entry.users == 0]
                for name in idle[: max(len(self._known) - self._keep, 0)]:
                    shutil.rmtree(self._known.pop(name).root, ignore_errors=True)
            return prepared

    def release(self, prepared: Prepared) -> None:
        """Report the end of a sandbox on `prepared`."""
        with self._lock:
            prepared.users -= 1


def prepare(
    workspace: str,
    root: Path,
    *,
    owner: int | None = None,
    images: Images | None = None,
    added: Iterable[Entry] = (),
) -> Prepared:
    """Build ``root/tree`` and ``root/git`` from ``dir:PATH``, ``git:URL@SHA`` or, with `images`, ``image:NAME``.

    `added` are further files, overridden by those of the workspace. Raises as `entries_of`.
    """
    files = {path: (path, mode, data) for path, mode, data in (*added, *entries_of(workspace, images))}
    entries = sorted(files.values())
    prepared_git = bare(root / "git")
    tree = root / "tree"
    tree.mkdir()
    # Links last: no file is then ever written through one, whatever a hostile tree object says.
    for path, mode, data in sorted(entries, key=lambda entry: entry[1] == "120000"):
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if mode == "120000":
            target.symlink_to(os.fsdecode(data))
        else:
            target.write_bytes(data)
            target.chmod(0o755 if mode == "100755" else 0o644)
    git("fast-import", "--quiet", folder=prepared_git, stdin=commit_stream("refs/heads/main", entries))
    base = (prepared_git / "refs" / "heads" / "main").read_text().strip()
    decoy(tree, prepared_git)
    bare(root / "attempts")
    hand_over(root, owner)
    manifest = {path: (mode, blob_id(data)) for path, mode, data in entries}
    return Prepared(root, base, json.dumps(manifest).encode(), workspace, size=_size(tree))


def prepare_image(where: str, root: Path, user: int | None, *, packed: bool) -> Prepared:
    """Link the workspace of an unpacked image into `root`; `packed` copies its working folder.

    Raises `TaskError`.
    """
    folder, image = find(where, user)
    root.mkdir()
    bare(root / "attempts")
    hand_over(root, user)
    for name in ("tree", "git"):
        (root / name).symlink_to(folder / name)
    prepared = Prepared(root, image.base, (folder / "manifest.json").read_bytes(), size=image.size, image=image)
    if packed:
        pack(prepared, folder / "tree" / image.workdir.lstrip("/"))
    return prepared


def hand_over(root: Path, owner: int | None) -> None:
    """Let `owner` read everything, and own everything except ``git``."""
    for folder, folders, files in os.walk(root):
        Path(folder).chmod(0o755)
        for path in (Path(folder, name) for name in files):
            if stat.S_ISREG(mode := path.lstat().st_mode):
                path.chmod(stat.S_IMODE(mode) | 0o444)
        if owner is not None and Path(folder) != root and not Path(folder).is_relative_to(root / "git"):
            for name in (".", *folders, *files):
                os.chown(Path(folder, name), owner, owner, follow_symlinks=False)


def pack(prepared: Prepared, files: Path) -> None:
    """Write the archive of folder `files`, readable by all."""
    packing.pack(files, prepared.archive)
    prepared.archive.chmod(0o644)
    prepared.packed = True


def _size(tree: Path) -> int:
    paths = (Path(folder, name) for folder, folders, files in os.walk(tree) for name in (*folders, *files))
    return sum(4096 * (2 + path.lstat().st_size // 4096) for path in paths)


def blob_id(data: bytes) -> str:
    """Git blob id of the content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def decoy(tree: Path, source: Path) -> None:
    """Create a repository in `tree` with the one commit of `source`."""
    decoy = bare(tree / ".git")
    (decoy / "config").write_text(_DECOY_CONFIG)
    shutil.copy(source / "refs" / "heads" / "main", decoy / "refs" / "heads" / "main")
    for pack in (source / "objects" / "pack").iterdir():
        shutil.copy(pack, decoy / "objects" / "pack")
    git("read-tree", "HEAD", folder=decoy)
    git(f"--work-tree={tree}", "update-index", "-q", "--refresh", folder=decoy)
