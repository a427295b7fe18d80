"""From `Task.workspace` to a prepared tree that a sandbox copies.

A workspace becomes *one commit of exact bytes*: files are taken from the folder or from git's object store, never
through a checkout, so no line ending is converted, no filter and no hook runs, and no later commit, remote or
reference patch can be reached. Two things come out of it:

- ``tree/``: the files, with a decoy ``.git`` (a plain repository of that one commit) for the agent to use;
- ``git/``: the private bare repository that `patch` diffs against. No sandbox ever sees it.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from coderepairrl.errors import PrerequisiteError, SandboxFault, TaskError
from coderepairrl.printable import without_login
from coderepairrl.processes import hostgit
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder, environments_cache, git_cache
from coderepairrl.processes.hostgit import BARE_CONFIG, bare, git, reason
from coderepairrl.sandbox import packing
from coderepairrl.sandbox.private import check_shown
from coderepairrl.types import Task

if TYPE_CHECKING:
    from coderepairrl.sandbox.rootfs import Image

Images = Callable[[str], Iterable["Entry"]]
"""What reads the files of an image by its name."""
Unpacked = Callable[[str, Path], "Prepared"]
"""What makes a workspace, in a folder, of an image (by its name) that was unpacked before."""
Entry = tuple[str, str, bytes]
"""Path (surrogate-escaped), git mode (``100644``, ``100755``, ``120000``), content."""

BUILT = "built"
"""The folder of an environment with what only the project's build makes."""
_Key = tuple[str, Path | None]
"""A workspace and the environment that it is opened with."""

# Copies have new inodes and change times; the decoy's index must still recognise its files.
_DECOY_CONFIG = (
    BARE_CONFIG.replace("bare = true", "bare = false")
    + "\ttrustctime = false\n\tcheckStat = minimal\n[user]\n\tname = agent\n\temail = agent@sandbox\n[gc]\n\tauto = 0\n"
)


def quoted(path: str) -> bytes:
    """`path` as fast-import reads it: raw bytes, C-quoted so that newlines and quotes survive."""
    raw = os.fsencode(path)
    return b'"' + raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


def commit_stream(ref: str, entries: Iterable[Entry], *, base: str = "", deleted: Iterable[str] = ()) -> bytes:
    """A fast-import stream with one commit of `entries` on `base`; nothing in it depends on clock or user."""
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
    """A workspace ready to be copied. `users` counts the sandboxes that are open on it."""

    root: Path
    base: str
    """Id of its one commit."""
    manifest: bytes
    """JSON ``{path: [git mode, blob id]}``."""
    workspace: str = ""
    """What it was prepared from."""
    size: int = 0
    """Bytes that a file system of 4 KiB pages needs for the files."""
    packed: bool = False
    """Whether there is an `archive` instead of `tree`."""
    image: Image | None = None
    """The unpacked image whose files `tree` are, all of them; the workspace is its working folder."""
    in_place: bool = False
    """Whether commands change `tree` itself: an image is being made of it."""
    users: int = field(default=0, compare=False)
    diffs: dict[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)
    """By the SHA-256 of what was changed (`patch.compose`)."""

    @property
    def tree(self) -> Path:
        """The files, with the decoy."""
        return self.root / "tree"

    @property
    def archive(self) -> Path:
        """The files in one (`packing`): what file systems in memory are filled from, instead of `tree`."""
        return self.root / "packed"

    @property
    def git(self) -> Path:
        """The private repository."""
        return self.root / "git"

    @property
    def attempts(self) -> Path:
        """A repository for the commits of diffs, without objects of its own: making one costs more than a diff."""
        return self.root / "attempts"


class Workspaces:
    """Prepares workspaces under `root`, each once, and keeps the `keep` last used. Safe to call from threads.

    `owner` is the user (and group) id that the files shall belong to, None to leave them ours; those of up to
    `pack_up_to` bytes are put into an archive; `images` reads those of an image, or `unpacked` has them, where there
    are images.
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
        """Like `acquire`, but only if nothing has to be prepared: never blocks for long."""
        with self._lock:
            prepared = self._known.get((workspace, environment))
            if prepared is not None:
                prepared.users += 1
                self._known.move_to_end((workspace, environment))
            return prepared

    def acquire(self, workspace: str, environment: Path | None = None) -> Prepared:
        """The prepared `workspace` with what the build of its `environment` adds; give it back with `release`.

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
        """A sandbox on `prepared` is gone."""
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

    `added` are further files; those of the workspace win over them.
    Raises `TaskError` (missing, unreadable, dirty, no such commit, a kind that copies cannot serve) and
    `SandboxFault` (the fetch failed for reasons that may pass).
    """
    files = {path: (path, mode, data) for path, mode, data in (*added, *_entries(workspace, images))}
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


def hand_over(root: Path, owner: int | None) -> None:
    """Let `owner` read all of it, whatever our umask, and have what is written to or copied."""
    for folder, folders, files in os.walk(root):
        Path(folder).chmod(0o755)
        for path in (Path(folder, name) for name in files):
            if stat.S_ISREG(mode := path.lstat().st_mode):
                path.chmod(stat.S_IMODE(mode) | 0o444)
        if owner is not None and Path(folder) != root and not Path(folder).is_relative_to(root / "git"):
            for name in (".", *folders, *files):
                os.chown(Path(folder, name), owner, owner, follow_symlinks=False)


def pack(prepared: Prepared, files: Path) -> None:
    """Make the archive, of the folder `files`, which anybody may read who gets to it."""
    packing.pack(files, prepared.archive)
    prepared.archive.chmod(0o644)
    prepared.packed = True


def _size(tree: Path) -> int:
    paths = (Path(folder, name) for folder, folders, files in os.walk(tree) for name in (*folders, *files))
    return sum(4096 * (2 + path.lstat().st_size // 4096) for path in paths)


def blob_id(data: bytes) -> str:
    """Git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def decoy(tree: Path, source: Path) -> None:
    """Make a repository in `tree` with the one commit of `source`."""
    decoy = bare(tree / ".git")
    (decoy / "config").write_text(_DECOY_CONFIG)
    shutil.copy(source / "refs" / "heads" / "main", decoy / "refs" / "heads" / "main")
    for pack in (source / "objects" / "pack").iterdir():
        shutil.copy(pack, decoy / "objects" / "pack")
    git("read-tree", "HEAD", folder=decoy)
    git(f"--work-tree={tree}", "update-index", "-q", "--refresh", folder=decoy)


# -- where files come from

_COMMIT = re.compile(r"[0-9a-fA-F]{40}([0-9a-fA-F]{24})?")
_ELSEWHERE = "free some disk space there, or set CRRL_CACHE to a folder that can be written"
_NOT_THERE = ("not our ref", "couldn't find remote ref", "does not exist", "not found", "unadvertised object")
"""How git and servers say that they have not got a commit, or hand it out to nobody."""
_LATER = "run it again, where that host can be reached: what was fetched is kept"
_LOGIN = re.compile(r"(?P<scheme>https?://)(?P<login>[^/?#@]+)@", re.IGNORECASE)


def files_at_hand(workspace: str, paths: Iterable[str]) -> dict[str, bytes | None]:
    """Those of `paths` in `workspace` that can be read on this machine as it is, None for a file that is not there.

    Nothing is fetched or unpacked: of an image, of a commit that is not in the cache, of a folder that is gone or
    dirty, and of paths that lead out of it, nothing is at hand.
    """
    kind, _, where = workspace.partition(":")
    safe = [path for path in paths if "\n" not in path and not {"", ".", ".."} & set(path.split("/"))]
    url, _, commit = where.rpartition("@")
    try:
        if kind == "git" and commits_at_hand(url, [commit]):
            return _of_commit(_cache_of(url), commit, safe)
        if kind == "dir" and _is_repository(folder := Path(where).expanduser()):
            with _clean(folder) as (home, head):
                return _of_commit(home, head, safe)
        if kind == "dir":
            inside = [path for path in safe if (folder / path).resolve() == folder.resolve() / path]
            return {path: (folder / path).read_bytes() if (folder / path).is_file() else None for path in inside}
    except (TaskError, OSError, subprocess.SubprocessError):
        pass
    return {}


def _of_commit(home: Path, commit: str, paths: Sequence[str]) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for path in paths:
        asked = os.fsencode(f"{commit}:{path}\n")
        head, _, content = git("cat-file", "--batch", folder=home, stdin=asked).partition(b"\n")
        found[path] = content[:-1] if head.split()[1:2] == [b"blob"] else None
    return found


def _entries(workspace: str, images: Images | None) -> Iterable[Entry]:
    kind, _, where = workspace.partition(":")
    if kind == "dir" and where:
        return _from_folder(Path(where).expanduser())
    if kind == "git" and "@" in where:
        url, _, commit = where.rpartition("@")
        if (local := url.removeprefix("file://")).startswith("/"):
            check_shown(Path(local))
        return _from_url(url, commit)
    if kind == "image" and where and images is not None:
        return images(where)
    if kind == "image":
        raise no_images(workspace)
    raise TaskError(f"workspace {without_login(workspace)!r} is none of dir:PATH, git:URL@SHA, image:NAME@DIGEST")


def no_images(workspace: str) -> TaskError:
    """What a sandbox without images raises for one."""
    return TaskError(f"this sandbox cannot open {workspace!r}: it has no images", fix="sandbox=bwrap, or a container's")


def _from_folder(folder: Path) -> Iterator[Entry]:
    try:
        if _is_repository(folder):
            with _clean(folder) as (home, commit):
                yield from _from_commit(home, commit)
        else:
            yield from _plain(folder)
    except OSError as error:
        raise TaskError(f"workspace {folder} cannot be read: {error}", fix="check its permissions") from error


def _plain(folder: Path) -> Iterator[Entry]:
    def stop(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=stop):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in links and name.lower() != ".git")
        for name in files + links:
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                yield str(path.relative_to(folder)), "120000", os.fsencode(path.readlink())
            elif stat.S_ISREG(mode) and name.lower() != ".git":
                git_mode = "100755" if mode & stat.S_IXUSR else "100644"
                yield str(path.relative_to(folder)), git_mode, path.read_bytes()


def environment_of(task: Task) -> Path | None:
    """The virtual environment that the task's commands need, if it names one. Raises `TaskError` where it is not.

    A folder with a ``bin`` is not enough: a file of tasks from elsewhere could show an agent the home of its user.
    """
    kind, _, where = task.environment.partition(":")
    if kind == "python":
        folder = environment_folder(task.environment)
        if not (folder / ENVIRONMENT_RECORD).is_file():
            raise TaskError(
                f"task {task.id}: its environment is not built on this machine",
                fix="prepare its source (crrl data prepare), on a machine with a network",
            )
        return folder
    if kind != "venv":
        return None
    if not (Path(where) / "bin").is_dir():
        raise TaskError(
            f"task {task.id}: its environment {where} is not there",
            fix="prepare its source again (crrl data prepare), or export it again on this machine",
        )
    if not where.startswith("/") or not (Path(where) / "pyvenv.cfg").is_file():
        raise TaskError(
            f"task {task.id}: its environment {where} is no virtual environment",
            fix="name one by its whole path (python -m venv): sandboxes are shown all of it",
        )
    return Path(where)


def interpreter_of(environment: Path) -> Path | None:
    """The installation of Python that `environment` was made from, where that is in the cache; sandboxes see ``/usr``.

    Another one is not shown: a file of tasks from elsewhere could name any folder.
    """
    found = re.search(r"^home\s*=\s*(.*)/bin\s*$", (environment / "pyvenv.cfg").read_text("utf-8"), re.MULTILINE)
    folder = Path(found[1]) if found else None
    shown = folder is not None and folder.parent == environments_cache() / "pythons" and folder.name != ".."
    return folder if shown else None


def built_for(environment: Path | None) -> Iterator[Entry]:
    """Files that only the project's build makes (``_version.py``): they are in every workspace of the environment."""
    folder = environment / BUILT if environment else None
    if folder is not None and folder.is_dir():
        yield from _plain(folder)


def check_workspace(workspace: str, check_image: Callable[[str], None] = lambda _: None) -> None:
    """Raise `TaskError`, before anything runs, for a ``dir:`` workspace that is missing, dirty or no usable repository,
    and what the sandbox has against an image (`SandboxBackend.check_image`).

    Nothing is fetched or copied: what else can be wrong with other kinds shows when they are opened.
    """
    kind, _, where = workspace.partition(":")
    if kind == "image":
        check_image(where)
    folder = Path(where).expanduser()
    if kind == "dir" and _is_repository(folder):
        with _clean(folder):
            pass


def _is_repository(folder: Path) -> bool:
    """Whether `folder` is a git repository rather than plain files.

    Raises `TaskError` unless it is a folder, and one that agents may be shown (`check_shown`).
    """
    try:
        if folder.is_dir():
            check_shown(folder)
            return (folder / ".git").exists()
    except OSError as error:
        raise TaskError(f"workspace {folder} cannot be read: {error}", fix="check its permissions") from error
    raise TaskError(
        f"workspace {folder} is {'not a folder' if folder.exists() else 'missing'}", fix="name a folder that exists"
    )


@contextmanager
def _clean(folder: Path) -> Iterator[tuple[Path, str]]:
    """A git directory of the repository at `folder`, and its HEAD. Raises `TaskError` if it is dirty or broken."""
    with hostgit.view(hostgit.find(folder)) as view:
        commit = view.head()
        if changes := view.changes():
            raise TaskError(
                f"workspace {folder} is dirty: {', '.join(changes[:3])}",
                fix="commit or stash the changes, then run the command again",
            )
        yield view.folder, commit


def _from_url(url: str, commit: str) -> Iterator[Entry]:
    with commit_folder(url, commit) as folder:
        yield from _from_commit(folder, commit)


@contextmanager
def commit_folder(url: str, commit: str) -> Iterator[Path]:
    """A git directory in the cache that has `commit` of `url`, fetched unless it is there already.

    Raises `TaskError` for a commit that there is not, `SandboxFault` where fetching failed for reasons that may pass,
    and `PrerequisiteError` where the cache cannot be written or is full.
    """
    fetch_commits(url, [commit])
    yield _cache_of(url)


def fetch_commits(url: str, commits: Sequence[str]) -> None:
    """Bring `commits` of `url` to the cache, those that are not there in one fetch: all of them or none.

    Raises as `commit_folder`; a `TaskError` may be about any of them.
    """
    named = without_login(url)
    for commit in commits:
        if not _COMMIT.fullmatch(commit):
            raise TaskError(f"{commit!r} of {named} is no commit", fix="write all digits of its id: git:URL@SHA")
    if len(commits_at_hand(url, commits)) == len(commits):
        return
    cache = _cache_of(url)
    try:
        _fetch_alone(url, commits, cache)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(named) from error
        raise PrerequisiteError(f"cannot write to {cache.parent}: {error.strerror}", fix=_ELSEWHERE) from error


def _fetch_alone(url: str, commits: Sequence[str], cache: Path) -> None:
    """Fetch `commits`, but those that another process just did, on top of what one that was killed left."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.with_suffix(".lock").open("w") as lock:  # other controllers fetch too
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cache.exists():
            partial = cache.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            bare(partial).rename(cache)
        here = commits_at_hand(url, commits)
        if not (lacking := [commit for commit in commits if commit not in here]):
            return
        # only who has the lock runs git there, which no longer runs: these are nobody's
        for left in (*cache.glob("*.lock"), *cache.glob("objects/pack/tmp_*"), *cache.glob("objects/??/tmp_*")):
            left.unlink()
        _fetch_once(url, lacking, cache, lock.fileno())


def commits_at_hand(url: str, commits: Sequence[str]) -> list[str]:
    """Which of `commits` of `url` the cache has, so that opening them needs no network.

    None is ever taken away, so nobody has to be kept out meanwhile.
    """
    cache = _cache_of(url)
    if not cache.exists():
        return []
    asked = "".join(f"{commit}^{{tree}}\n" for commit in commits)
    answers = git("cat-file", "--batch-check=%(objecttype)", folder=cache, stdin=asked.encode()).splitlines()
    return [commit for commit, answer in zip(commits, answers, strict=True) if answer == b"tree"]


def _cache_of(url: str) -> Path:
    return git_cache() / hashlib.sha256(url.encode()).hexdigest()[:20]


def _no_room(named: str) -> PrerequisiteError:
    return PrerequisiteError(f"no room to fetch a commit of {named} to {git_cache()}", fix=_ELSEWHERE)


def _fetch_once(url: str, commits: Sequence[str], cache: Path, lock: int) -> None:
    named, some = without_login(url), ", ".join(commits)
    try:
        _fetch(url, commits, cache, lock)
    except subprocess.CalledProcessError as error:
        printed, why = error.stderr.decode(errors="replace"), without_login(reason(error))
        if "No space left" in printed or "Disk quota" in printed:
            raise _no_room(named) from None
        if any(sign in printed for sign in _NOT_THERE):
            raise TaskError(  # from None: its command line has the login
                f"{named} has no commit {some}: {why}",
                fix="it may have been pushed away: name a clone that has it (clone=FOLDER/{repository}), or leave the "
                "task out",
            ) from None
        fix = "compare this machine's clock with another one (date)" if "certificate" in printed else _LATER
        raise SandboxFault(f"cannot fetch {some} of {named}: {why}", fix=fix) from None
    except subprocess.TimeoutExpired as error:
        raise SandboxFault(f"fetching {some} of {named} took more than {error.timeout:.0f} s", fix=_LATER) from None


def _fetch(url: str, commits: Sequence[str], cache: Path, lock: int) -> None:
    """Bring `commits` from `url` to `cache`, whose `lock` we hold. Raises `TaskError` and what `git` raises."""

    def fetch(place: str, env: dict[str, str]) -> None:
        # in a pack, which is there at once: of loose objects, a commit is there before its files
        command = ("-c", "fetch.unpackLimit=1", "fetch", "--quiet", "--depth=1", "--no-tags", "--", place, *commits)
        git(*command, folder=cache, env=env, timeout=1800, lock=lock)

    if (local := hostgit.find_local(url)) is not None:
        with hostgit.view(local) as view:
            return fetch(str(view.folder), {})
    # The user's own environment: proxies, certificates, ssh keys. None of the task's code runs here.
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "LC_"))}
    login = _LOGIN.match(url)
    if login is None:
        return fetch(url, mine)
    # A command line is for everybody to read (ps), the environment is not.
    place = f"{login['scheme']}{url[login.end() :]}"
    user, _, password = login["login"].partition(":")
    basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    header = {"GIT_CONFIG_KEY_0": f"http.{place}.extraHeader", "GIT_CONFIG_VALUE_0": f"Authorization: Basic {basic}"}
    return fetch(place, mine | header | {"GIT_CONFIG_COUNT": "1"})


def check_path(path: str, source: str) -> None:
    """Raise `TaskError` if a `path` in `source` would lead out of the workspace, or into its ``.git``."""
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in path.split("/")):
        raise TaskError(f"{source} holds a path that no repository may have: {path!r}")


def _from_commit(home: Path, commit: str) -> Iterator[Entry]:
    """Every file of `commit`, byte for byte. Submodules are left out: they are not this repository's files."""
    listing = git("ls-tree", "-r", "-z", "--full-tree", commit, folder=home).split(b"\0")
    rows = [(line.partition(b"\t")[0].split(), line.partition(b"\t")[2]) for line in listing if line]
    wanted = [(os.fsdecode(path), meta[0].decode(), meta[2]) for meta, path in rows if meta[1] == b"blob"]
    answer = git("cat-file", "--batch", folder=home, stdin=b"".join(blob + b"\n" for _, _, blob in wanted))
    at = 0
    for path, mode, _ in wanted:
        check_path(path, f"commit {commit}")
        end = answer.index(b"\n", at)
        if answer.endswith(b" missing", at, end):
            raise TaskError(f"commit {commit} lacks the content of {path}", fix="clone its repository without a filter")
        size = int(answer[at:end].split()[2])
        yield path, "100644" if mode == "100664" else mode, answer[end + 1 : end + 1 + size]
        at = end + 1 + size + 1
