"""Exact files of a workspace: from a folder, a commit or an image, never through a checkout.

No line ending conversion, filters or hooks. Untrusted task files may not name private folders of the host, since agents
see a workspace as a whole.

Folders with answers (references, unbroken originals, other runs' tasks) are hidden from sandboxes, which would see them
where a copy of the package lies below a shown folder, such as ``/usr``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.printable import remove_login
from coderepairrl.processes import caches, hostgit
from coderepairrl.processes.hostgit import git
from coderepairrl.sandbox.commits import fetch_commits, find_commit_cache, select_cached_commits
from coderepairrl.sandbox.guest.files import find_git_mode
from coderepairrl.sandbox.privileges import sandbox_user
from coderepairrl.sandbox.rootfs import find_image

_SYSTEM = ("/etc", "/proc", "/sys", "/dev", "/boot", "/run/secrets")
"""Closed to agents, with everything below."""
_CLOSED_ALONE = ("/bin", "/home", "/lib", "/mnt", "/opt", "/root", "/run", "/sbin", "/srv", "/tmp", "/usr", "/var")
"""Closed themselves; a project may lie below."""
_CLOSED_IN_HOMES = (
    ".aws",
    ".azure",
    ".cache/huggingface",
    ".config",
    ".docker",
    ".gnupg",
    ".kube",
    ".local/share/keyrings",
    ".password-store",
    ".ssh",
)
"""Below a home: closed, with everything below."""
_PERIOD_SECONDS = 60


def check_may_be_shown(folder: Path) -> None:
    """Raise `TaskError` unless an agent may see `folder`.

    It must not be or contain the home, one of our caches or a system folder, nor lie in a folder with secrets: system
    folders, keys and settings in the home, fetched repositories.
    """
    place = folder.resolve()
    home: Path | None = None
    with contextlib.suppress(RuntimeError):  # no home
        home = Path.home()
    cache_folders: tuple[Path, ...] = ()
    with contextlib.suppress(PrerequisiteError):  # no cache
        cache_folders = (caches.git_cache(), *caches.list_cache_folders())
    around, closed = _find_private_folders(home, cache_folders, int(time.monotonic() // _PERIOD_SECONDS))
    if match := around.get(place):
        each, private_path = match
        raise _private_error(folder, f"contains {each}" if private_path != place else f"is {each}")
    for parent in (place, *place.parents):
        if parent in closed:
            raise _private_error(folder, f"lies in {closed[parent]}")


@functools.lru_cache(1)
def _find_private_folders(
    home: Path | None, cache_folders: tuple[Path, ...], period: int
) -> tuple[dict[Path, tuple[Path, Path]], dict[Path, Path]]:
    """Map folders that are or contain a private one to its (name, path), and closed folders to their name.

    Cached during a `period`: a plan checks a thousand folders, but links may change later.
    """
    # the first of `cache_folders`, fetched repositories, is closed with everything below
    homes = [Path(user.pw_dir) for user in pwd.getpwall() if user.pw_dir.startswith(("/home/", "/root"))]
    homes += [home] if home else []
    closed_alone = [*map(Path, _CLOSED_ALONE), *([home] if home else []), *cache_folders[1:]]
    closed_below = [*map(Path, _SYSTEM), *(each / name for each in homes for name in _CLOSED_IN_HOMES)]
    closed_below += cache_folders[:1]
    around: dict[Path, tuple[Path, Path]] = {}
    closed: dict[Path, Path] = {}
    for folders, is_below_closed in ((closed_alone, False), (closed_below, True)):
        for each in folders:
            resolved = each.resolve()
            for outer in (resolved, *resolved.parents):
                around.setdefault(outer, (each, resolved))
            if is_below_closed:
                closed.setdefault(resolved, each)
    return around, closed


def _private_error(folder: Path, how: str) -> TaskError:
    return TaskError(
        f"workspace {folder} {how}, which agents are not shown",
        fix="name the folder of one project, outside of the system's folders and of your keys and settings",
    )


Images = Callable[[str], Iterable["Entry"]]
"""Reader of the files of an image, by its name."""
Entry = tuple[str, str, bytes]
"""Path (surrogate-escaped), git mode (``100644``, ``100755``, ``120000``), content."""


def read_workspace_entries(workspace: str, images: Images | None) -> Iterable[Entry]:
    """Files of ``dir:PATH``, ``git:URL@SHA`` or, with `images`, ``image:NAME``.

    Raises `TaskError` (missing, unreadable, dirty, no such commit, unsupported kind) and `SandboxFault` (the fetch
    failed for possibly transient reasons).
    """
    kind, _, where = workspace.partition(":")
    if kind == "dir" and where:
        return _read_folder_or_head(workspace)
    if kind == "git" and "@" in where:
        url, _, commit = where.rpartition("@")
        if (local := url.removeprefix("file://")).startswith("/"):
            check_may_be_shown(Path(local))
        return _fetch_entries(url, commit)
    if kind == "image" and where and images is not None:
        return images(where)
    if kind == "image":
        raise make_no_images_error(workspace)
    raise TaskError(f"workspace {remove_login(workspace)!r} is not dir:PATH, git:URL@SHA or image:NAME@DIGEST")


def make_no_images_error(workspace: str) -> TaskError:
    """Error for a sandbox without image support."""
    return TaskError(f"this sandbox cannot open {workspace!r}: it has no images", fix="sandbox=bwrap, docker or podman")


def read_local_files(workspace: str, paths: Iterable[str]) -> dict[str, bytes | None]:
    """Read those of `paths` in `workspace` that are available locally; None for a missing file.

    Omits paths that lead outside; empty if the image or commit is not cached, or the folder is missing or dirty.
    """
    kind, _, where = workspace.partition(":")
    safe = [path for path in paths if "\n" not in path and not {"", ".", ".."} & set(path.split("/"))]
    try:
        with open_local_base(workspace) as base:
            if base is not None:
                return _read_commit_files(*base, safe)
        if kind == "dir":
            folder = Path(where).expanduser()
            inside = [path for path in safe if (folder / path).resolve() == folder.resolve() / path]
            return {path: (folder / path).read_bytes() if (folder / path).is_file() else None for path in inside}
    except (TaskError, OSError, subprocess.SubprocessError):
        pass
    return {}


@contextmanager
def open_local_base(workspace: str) -> Iterator[tuple[Path, str] | None]:
    """A local git directory with the files of `workspace`, and their commit; None if not available.

    Raises `TaskError` for a folder that is missing, dirty or an unusable repository, and for an image not unpacked.
    """
    kind, _, where = workspace.partition(":")
    url, _, commit = where.rpartition("@")
    if kind == "git" and select_cached_commits(url, [commit]):
        yield find_commit_cache(url), commit
    elif kind == "image":
        folder, image = find_image(where, sandbox_user())
        yield folder / "git", image.base
    elif kind == "dir" and _is_repository(folder := Path(where).expanduser()):
        with hostgit.open_view(hostgit.find_repository(folder)) as view:
            commit = view.head()
            if changes := view.changes():
                raise TaskError(
                    f"workspace {folder} is dirty: {', '.join(changes[:3])}",
                    fix="commit or stash the changes, then run the command again",
                )
            yield view.folder, commit
    else:
        yield None


def _read_commit_files(home: Path, commit: str, paths: Sequence[str]) -> dict[str, bytes | None]:
    files: dict[str, bytes | None] = {}
    for path in paths:
        query = os.fsencode(f"{commit}:{path}\n")
        head, _, content = git("cat-file", "--batch", folder=home, stdin=query).partition(b"\n")
        files[path] = content[:-1] if head.split()[1:2] == [b"blob"] else None
    return files


def check_workspace(workspace: str, check_image: Callable[[str], None] = lambda _: None) -> None:
    """Raise `TaskError` for a ``dir:`` workspace that is missing, dirty or an unusable repository.

    For images calls `check_image`. Fetches and copies nothing, so other errors appear only on opening.
    """
    kind, _, where = workspace.partition(":")
    if kind == "image":
        check_image(where)
    if kind == "dir":
        with open_local_base(workspace):
            pass


def _read_folder_or_head(workspace: str) -> Iterator[Entry]:
    folder = Path(workspace.removeprefix("dir:")).expanduser()
    try:
        with open_local_base(workspace) as base:
            yield from read_folder_entries(folder) if base is None else _read_commit_entries(*base)
    except OSError as error:
        raise TaskError(f"workspace {folder} cannot be read: {error}", fix="check its permissions") from error


def read_folder_entries(folder: Path) -> Iterator[Entry]:
    """Files of a folder that is not a repository."""

    def stop(error: OSError) -> None:
        raise error

    for parent, subfolders, files in os.walk(folder, onerror=stop):
        links = [name for name in subfolders if Path(parent, name).is_symlink()]
        subfolders[:] = sorted(name for name in subfolders if name not in links and name.lower() != ".git")
        for name in files + links:
            path = Path(parent, name)
            mode = find_git_mode(path.lstat().st_mode)
            if mode == "120000":
                yield str(path.relative_to(folder)), mode, os.fsencode(os.readlink(path))  # noqa: PTH115 - a Path would normalize it
            elif mode and name.lower() != ".git":
                yield str(path.relative_to(folder)), mode, path.read_bytes()


def _is_repository(folder: Path) -> bool:
    """Whether `folder` is a git repository. Raises `TaskError` unless it is a folder that agents may see."""
    try:
        if folder.is_dir():
            check_may_be_shown(folder)
            return (folder / ".git").exists()
    except OSError as error:
        raise TaskError(f"workspace {folder} cannot be read: {error}", fix="check its permissions") from error
    raise TaskError(
        f"workspace {folder} is {'not a folder' if folder.exists() else 'missing'}", fix="name a folder that exists"
    )


def _fetch_entries(url: str, commit: str) -> Iterator[Entry]:
    # a generator: the fetch blocks the thread that reads the entries, not the caller's
    yield from _read_commit_entries(fetch_commits(url, [commit]), commit)


def _read_commit_entries(home: Path, commit: str) -> Iterator[Entry]:
    # no submodules: they belong to other repositories
    listing = git("ls-tree", "-r", "-z", "--full-tree", commit, folder=home).split(b"\0")
    # each line: mode, type and id, then a tab and the path
    rows = [(line.partition(b"\t")[0].split(), line.partition(b"\t")[2]) for line in listing if line]
    blobs = [(os.fsdecode(path), meta[0].decode(), meta[2]) for meta, path in rows if meta[1] == b"blob"]
    answer = git("cat-file", "--batch", folder=home, stdin=b"".join(blob + b"\n" for _, _, blob in blobs))
    at = 0
    for path, mode, _ in blobs:
        check_path(path, f"commit {commit}")
        end = answer.index(b"\n", at)
        if answer.endswith(b" missing", at, end):
            raise TaskError(f"commit {commit} lacks the content of {path}", fix="clone its repository without a filter")
        size = int(answer[at:end].split()[2])
        content = end + 1
        # 100664 is a mode of old commits
        yield path, "100644" if mode == "100664" else mode, answer[content : content + size]
        at = content + size + 1


def check_path(path: str, source: str) -> None:
    """Raise `TaskError` if `path` in `source` leads outside the workspace or into ``.git``."""
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in path.split("/")):
        raise TaskError(f"{source} has a path that is not allowed in a repository: {path!r}")


_PACKAGE = Path(__file__).resolve().parents[1]
_DEPTH = 3
"""Levels below a shown folder searched for environments; deeper below one of `_ENVIRONMENTS`."""
_ENVIRONMENTS = ("envs", "pipx", "venvs", "uv", "tools")

IN_IMAGES = tuple(
    f"{prefix}/lib*/python3*/*-packages/coderepairrl"
    for prefix in ("", "/*", "/usr/*", "/opt/*", "/opt/*/*", "/opt/*/*/*", "/root/*", "/home/*/*", "/srv/*")
)
"""Glob patterns of this package in container images: it holds references of tasks."""


def list_answer_folders() -> tuple[Path, ...]:
    """Folders with references of tasks, which no sandbox may see: this package, its checkout and its caches."""
    checkout = _PACKAGE.parents[1]
    checkouts = [checkout] if _PACKAGE.parent.name == "src" and (checkout / "pyproject.toml").is_file() else []
    return (*checkouts, _PACKAGE, *caches.list_cache_folders())


def sort_outermost_first(folders: Iterable[str]) -> list[str]:
    """Sort in mounting order: an outer mount would cover an inner one made before it."""
    return sorted(folders, key=lambda folder: len(Path(folder).parts))


def find_visible_answers(shown: Iterable[str]) -> list[tuple[str, str]]:
    """Pair each host path in `shown` with the paths to hide below it: those of `list_answer_folders`."""
    pairs: list[tuple[str, str]] = []
    for path in dict.fromkeys(shown):
        real = Path(path).resolve()
        for folder in (*list_answer_folders(), *find_installed_packages(real)):
            if folder.is_dir() and folder.resolve().is_relative_to(real):
                seen = Path(path) / folder.resolve().relative_to(real)
                if not any(seen.is_relative_to(outer) for _, outer in pairs):
                    pairs.append((path, str(seen)))
    return pairs


@cache
def find_installed_packages(shown: Path) -> tuple[Path, ...]:
    """Copies of the package below `shown` in places used by pip, conda, pipx and uv. Takes 0.1 s."""
    copies = [
        shown / "coderepairrl",
        *shown.glob("*-packages/coderepairrl"),
        *shown.glob("python3*/*-packages/coderepairrl"),
    ]
    level = [shown]
    for depth in range(2 * _DEPTH):
        deeper = [folder for folder in level if depth < _DEPTH or set(_ENVIRONMENTS) & set(folder.parts[-2:])]
        level = [Path(path) for folder in deeper for path in _list_subfolders(folder)]
        for folder in level:
            if folder.name.startswith("lib"):
                copies += folder.glob("python3*/*-packages/coderepairrl")
    return tuple(folder for folder in copies if (folder / "tasks").is_dir())


def _list_subfolders(folder: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # what we may not read, a sandbox may not either
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
