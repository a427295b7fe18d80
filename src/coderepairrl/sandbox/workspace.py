"""Preparation of `Task.workspace` for sandboxes to copy, with its environment, and the canonical diff.

A workspace becomes *one commit of exact bytes* (`contents`), the source of:

- ``tree/``: the files, with a decoy ``.git`` (a repository of that commit) for the agent;
- ``git/``: the private bare repository for diffs, hidden from every sandbox;
- an archive that a guest unpacks itself, which is faster than starting a program. A list of entries, folders first: the
  length of a JSON object (4 bytes, big endian), the object, and the content of a regular file. The object has ``path``
  (surrogates for bytes that are not UTF-8), ``mode`` and ``time`` (last change, ns); regular files have ``size``,
  symbolic links ``target``, further hard links only ``same``, the first name. Read by `guest.files.unpack`.

Git never sees the tree an agent worked in, so nothing left there (hooks, filters, nested repositories) can run or hide
anything. The guest lists the files that differ from the task's commit; they become a temporary commit, and
``git diff-tree`` compares both.

All files count, ignored ones too, except what the environment's build makes and untracked caches of tools
(``__pycache__``, ``.pytest_cache``, ...). Renames are deletion and creation; full object ids; binary patches; three
lines of context.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from coderepairrl.errors import SandboxFault, TaskError
from coderepairrl.printable import remove_login
from coderepairrl.processes.caches import BUILT, ENVIRONMENT_RECORD, environment_folder, environments_cache
from coderepairrl.processes.hostgit import BARE_CONFIG, DIFF, create_bare_repository, explain_git_error, git
from coderepairrl.sandbox.contents import Entry, Images, read_folder_entries, read_workspace_entries
from coderepairrl.sandbox.guest.files import blob_id
from coderepairrl.sandbox.privileges import command_as
from coderepairrl.sandbox.rootfs import Image, find_image
from coderepairrl.types import Task


def write_archive(folder: Path, archive: Path) -> None:
    """Write the contents of `folder` to `archive`, without owners and extended attributes. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    first_names: dict[tuple[int, int], str] = {}
    with archive.open("wb") as file:
        for parent, folders, names in os.walk(folder, onerror=fail):
            links = [name for name in folders if Path(parent, name).is_symlink()]
            for path in (Path(parent), *(Path(parent, name) for name in sorted(names + links))):
                _write_archive_entry(file, path, "" if path == folder else str(path.relative_to(folder)), first_names)


def _write_archive_entry(file: IO[bytes], path: Path, name: str, first_names: dict[tuple[int, int], str]) -> None:
    status = path.lstat()
    entry: dict[str, Any] = {"path": name, "mode": status.st_mode, "time": status.st_mtime_ns}
    if stat.S_ISLNK(status.st_mode):
        entry["target"] = os.readlink(path)  # noqa: PTH115 - a Path would normalize it
    elif stat.S_ISREG(status.st_mode):
        first = first_names.setdefault((status.st_dev, status.st_ino), name) if status.st_nlink > 1 else name
        entry |= {"size": status.st_size} if first == name else {"same": first}
    text = json.dumps(entry).encode()
    file.write(len(text).to_bytes(4) + text)
    if "size" in entry:
        with path.open("rb") as content:
            shutil.copyfileobj(content, file)


def find_environment(task: Task) -> Path | None:
    """Virtual environment named by the task, if any. Raises `TaskError` if it is missing.

    A ``bin`` folder is not enough: homes may have one, and a task file could expose them to an agent.
    """
    kind, _, where = task.environment.partition(":")
    if kind == "python":
        folder = environment_folder(task.environment)
        if not (folder / ENVIRONMENT_RECORD).is_file():
            raise TaskError(
                f"task {task.id}: its environment is not built on this machine",
                fix="prepare its source (crrl tasks prepare), on a machine with a network",
            )
        return folder
    if kind != "venv":
        return None
    if not (Path(where) / "bin").is_dir():
        raise TaskError(
            f"task {task.id}: its environment {where} is not there",
            fix="prepare its source again (crrl tasks prepare), or export it again on this machine",
        )
    if not where.startswith("/") or not (Path(where) / "pyvenv.cfg").is_file():
        raise TaskError(
            f"task {task.id}: its environment {where} is not a virtual environment",
            fix="name one (python -m venv) by its absolute path: sandboxes can read all of it",
        )
    return Path(where)


def find_cached_interpreter(environment: Path) -> Path | None:
    """Python installation of `environment` if it is in the cache; a task file could name any other folder."""
    match = re.search(r"^home\s*=\s*(.*)/bin\s*$", (environment / "pyvenv.cfg").read_text("utf-8"), re.MULTILINE)
    folder = Path(match[1]) if match else None
    # pathlib keeps "..", which would make the folder the whole cache
    in_cache = folder is not None and folder.parent == environments_cache() / "pythons" and folder.name != ".."
    return folder if in_cache else None


def read_built_files(environment: Path | None) -> Iterator[Entry]:
    """Files generated by the project's build (``_version.py``, extensions), in every workspace of the environment.

    They are not in its commit, so that no diff has them when an agent builds the project again.
    """
    folder = environment / BUILT if environment else None
    if folder is not None and folder.is_dir():
        yield from read_folder_entries(folder)


def _read_generated_paths(environment: Path | None) -> list[str]:
    record = environment / ENVIRONMENT_RECORD if environment else None
    return list(json.loads(record.read_text("utf-8")).get("made", ())) if record and record.is_file() else []


def _is_tracked(path: str, tracked: Collection[str]) -> bool:
    # the environment may be built from another commit
    return path in tracked or any(each.startswith(f"{path}/") for each in tracked)


_Key = tuple[str, Path | None]
"""A workspace and its environment."""

# Copies have new inodes and change times; the decoy's index must still recognise its files.
_DECOY_CONFIG = (
    BARE_CONFIG.replace("bare = true", "bare = false")
    + "\ttrustctime = false\n\tcheckStat = minimal\n[user]\n\tname = agent\n\temail = agent@sandbox\n[gc]\n\tauto = 0\n"
)


def quote_path(path: str) -> bytes:
    """`path` C-quoted for fast-import."""
    raw = os.fsencode(path)
    return b'"' + raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


def borrow_objects(*folders: Path) -> dict[str, str]:
    """Variables that let git read the objects in `folders`, too."""
    return {"GIT_ALTERNATE_OBJECT_DIRECTORIES": ":".join(os.fsdecode(quote_path(str(folder))) for folder in folders)}


def format_commit_stream(ref: str, entries: Iterable[Entry], *, base: str = "", deleted: Iterable[str] = ()) -> bytes:
    """A fast-import stream with one commit of `entries` on `base`, independent of clock and user."""
    # the time is 2000-01-01
    head = f"feature done\ncommit {ref}\ncommitter crrl <crrl@localhost> 946684800 +0000\ndata 8\nbaseline\n"
    parts = [head.encode()]
    if base:
        parts.append(f"from {base}\n".encode())
    parts += [b"D " + quote_path(path) + b"\n" for path in deleted]
    for path, mode, data in entries:
        parts.append(b"M %s inline %s\ndata %d\n" % (mode.encode(), quote_path(path), len(data)))
        parts += [data, b"\n"]
    return b"".join([*parts, b"done\n"])


def commit_entries(folder: Path, entries: Iterable[Entry], *options: str, timeout: float = 120.0) -> str:
    """Create a bare repository with `entries` as its one commit, on ``main``, with git's `options`; return its id."""
    stream = format_commit_stream("refs/heads/main", entries)
    git(*options, "fast-import", "--quiet", folder=create_bare_repository(folder), stdin=stream, timeout=timeout)
    return (folder / "refs/heads/main").read_text().strip()


@dataclass
class PreparedWorkspace:
    """A workspace ready to copy. `users` counts its open sandboxes."""

    root: Path
    base: str
    """Id of its one commit."""
    manifest: bytes
    """JSON ``{path: [git mode, blob id]}``; null for generated paths, which diffs leave out."""
    workspace: str = ""
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
    """Diffs by SHA-256 of the change (`compose_diff`)."""

    @property
    def tree(self) -> Path:
        """The files, with the decoy."""
        return self.root / "tree"

    @property
    def archive(self) -> Path:
        """The files packed (`write_archive`), instead of `tree`."""
        return self.root / "packed"

    @property
    def git(self) -> Path:
        """The private repository."""
        return self.root / "git"

    @property
    def diff_repository(self) -> Path:
        """Repository for the temporary commits of all diffs: creating one costs more than a diff."""
        return self.root / "diff-repository"


class WorkspaceCache:
    """Prepares each workspace once under `root` and keeps the `keep` last used. Thread-safe.

    `prepare` prepares a workspace in a new folder, with its environment.
    """

    def __init__(
        self, root: Path, prepare: Callable[[str, Path, Path | None], PreparedWorkspace], *, keep: int = 64
    ) -> None:
        self._root, self._prepare, self._keep = root, prepare, keep
        self._prepared: OrderedDict[_Key, PreparedWorkspace] = OrderedDict()
        self._busy: dict[_Key, threading.Lock] = {}
        self._lock = threading.Lock()
        self._count = 0

    def ready(self, workspace: str, environment: Path | None = None) -> PreparedWorkspace | None:
        """`acquire` without blocking: None if the workspace is not prepared."""
        with self._lock:
            prepared = self._prepared.get((workspace, environment))
            if prepared is not None:
                prepared.users += 1
                self._prepared.move_to_end((workspace, environment))
            return prepared

    def acquire(self, workspace: str, environment: Path | None = None) -> PreparedWorkspace:
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
                prepared = self._prepare(workspace, root, environment)
            except BaseException as error:
                shutil.rmtree(root, ignore_errors=True)
                # our disk failed or git was too slow: unreadable files of the task raise TaskError
                if isinstance(error, OSError | subprocess.TimeoutExpired):
                    message = f"cannot prepare {remove_login(workspace)}: {error}"
                    raise SandboxFault(message, fix="free some disk space, or run less at a time") from error
                raise
            with self._lock:
                self._prepared[workspace, environment] = prepared
                prepared.users = 1
                idle = [key for key, entry in self._prepared.items() if entry.users == 0]
                removed = [self._prepared.pop(key) for key in idle[: max(len(self._prepared) - self._keep, 0)]]
            for each in removed:  # without the lock, for which the event loop would wait
                shutil.rmtree(each.root, ignore_errors=True)
            return prepared

    def release(self, prepared: PreparedWorkspace) -> None:
        """Report the end of a sandbox on `prepared`."""
        with self._lock:
            prepared.users -= 1


def prepare_workspace(
    workspace: str,
    root: Path,
    *,
    owner: int | None = None,
    images: Images | None = None,
    environment: Path | None = None,
) -> PreparedWorkspace:
    """Build ``root/tree`` and ``root/git`` from ``dir:PATH``, ``git:URL@SHA`` or, with `images`, ``image:NAME``.

    ``tree`` also has the files that the build of `environment` generated. Raises as `read_workspace_entries`.
    """
    entries = sorted(read_workspace_entries(workspace, images))
    tracked = {path for path, _, _ in entries}
    built = [entry for entry in read_built_files(environment) if entry[0] not in tracked]
    generated = {path for path in _read_generated_paths(environment) if not _is_tracked(path, tracked)}
    generated |= {path for path, _, _ in built}
    base = commit_entries(root / "git", entries)
    tree = root / "tree"
    tree.mkdir()
    # links last, so that no file is written through one, even if a tree object is hostile
    for path, mode, data in sorted((*entries, *built), key=lambda entry: entry[1] == "120000"):
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if mode == "120000":
            target.symlink_to(os.fsdecode(data))
        else:
            target.write_bytes(data)
            target.chmod(0o755 if mode == "100755" else 0o644)
    create_decoy(tree, root / "git", generated)
    create_bare_repository(root / "diff-repository")
    hand_over(root, owner)
    manifest = dict.fromkeys(generated) | {path: (mode, blob_id(data)) for path, mode, data in entries}
    return PreparedWorkspace(root, base, json.dumps(manifest).encode(), workspace, size=measure_tree(tree))


def prepare_image(workspace: str, root: Path, user: int | None, *, packed: bool) -> PreparedWorkspace:
    """Link the `workspace` of an unpacked image into `root`; `packed` copies its working folder.

    Raises `TaskError`.
    """
    folder, image = find_image(workspace.removeprefix("image:"), user)
    root.mkdir()
    create_bare_repository(root / "diff-repository")
    hand_over(root, user)
    for name in ("tree", "git"):
        (root / name).symlink_to(folder / name)
    manifest = (folder / "manifest.json").read_bytes()
    prepared = PreparedWorkspace(root, image.base, manifest, workspace, size=image.size, image=image)
    if packed:
        pack_prepared(prepared, folder / "tree" / image.workdir.lstrip("/"))
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


def pack_prepared(prepared: PreparedWorkspace, files: Path) -> None:
    """Write the archive of folder `files`, readable by all."""
    write_archive(files, prepared.archive)
    prepared.archive.chmod(0o644)
    prepared.packed = True


def measure_tree(tree: Path) -> int:
    """Bytes that a file system of 4 KiB pages needs for `tree`."""
    paths = (Path(folder, name) for folder, folders, files in os.walk(tree) for name in (*folders, *files))
    # a page for the entry itself, and those of the content, the last of them partly full
    return sum(4096 * (2 + path.lstat().st_size // 4096) for path in paths)


def create_decoy(tree: Path, source: Path, ignored: Iterable[str] = ()) -> None:
    """Create a repository in `tree` that has the one commit of `source` and ignores the paths `ignored`."""
    decoy = create_bare_repository(tree / ".git")
    patterns = sorted("/" + re.sub(r"([\\*?\[ ])", r"\\\1", path) for path in ignored if "\n" not in path)
    (decoy / "info/exclude").write_bytes(os.fsencode("".join(f"{each}\n" for each in patterns)))
    (decoy / "config").write_text(_DECOY_CONFIG)
    shutil.copy(source / "refs" / "heads" / "main", decoy / "refs" / "heads" / "main")
    for each in (source / "objects" / "pack").iterdir():
        shutil.copy(each, decoy / "objects" / "pack")
    git("read-tree", "HEAD", folder=decoy)
    git(f"--work-tree={tree}", "update-index", "-q", "--refresh", folder=decoy)


_CACHED_DIFFS, _CACHED_BYTES = 256, 1 << 16
"""Number and largest size (bytes) of cached diffs per workspace: attempts often end in the same change."""


def compose_diff(
    prepared: PreparedWorkspace,
    changed: Sequence[Entry],
    deleted: Sequence[str],
    scratch: Path,
    *,
    user: int | None = None,
) -> bytes:
    """Return the diff that adds `changed` files to `prepared`'s commit and removes `deleted` ones.

    Blocks for two git commands, unless nothing changed or the diff is cached. `scratch` is a unique temporary path.
    Raises `SandboxFault`.
    """
    if not changed and not deleted:
        return b""
    ref = f"refs/heads/{scratch.parent.name}-{scratch.name}"
    stream = format_commit_stream(ref, changed, base=prepared.base, deleted=deleted)
    # without the first lines, one of which names this diff's branch
    change = hashlib.sha256(memoryview(stream)[stream.index(b"\ncommitter") :]).digest()
    if (diff := prepared.diffs.get(change)) is None:
        diff = _diff_commits(prepared, ref, stream, scratch, user)
        if len(prepared.diffs) < _CACHED_DIFFS and len(diff) < _CACHED_BYTES:
            prepared.diffs[change] = diff
    return diff


def _diff_commits(prepared: PreparedWorkspace, ref: str, stream: bytes, scratch: Path, user: int | None) -> bytes:
    objects = {"GIT_OBJECT_DIRECTORY": str(scratch), **borrow_objects(prepared.git / "objects")}
    try:
        scratch.mkdir()
        if user is not None:
            os.chown(scratch, user, user)
        return git(
            "fast-import",
            "--quiet",
            then=(*DIFF, prepared.base, ref),
            folder=prepared.diff_repository,
            stdin=stream,
            prefix=command_as(user, []),
            env=objects,
        )
    except subprocess.CalledProcessError as error:
        raise SandboxFault(f"git could not take the diff: {explain_git_error(error)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxFault(f"cannot take the diff: {error}", fix="check the disk's free space") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        (prepared.diff_repository / ref).unlink(missing_ok=True)
