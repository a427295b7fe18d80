"""Git on the host, without a repository's own programs.

A repository's settings can name programs (filters, hooks, ssh commands, submodules and more), so git never reads them.
`open_view` makes a temporary git directory that links objects, refs and index, with safe settings. The user's global
ignore rules apply.

Repositories must belong to the user or be declared safe (``safe.directory``) and self-contained: no ``.git`` file whose
git directory does not point back, no foreign ``core.worktree``, no alternates.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.processes.scratch import scratch

_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_ASKPASS": "",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
}
_HARDENED = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.protectNTFS=false",
    "fastimport.unpackLimit=0",
    "gc.auto=0",
)
BYTES_AS_THEY_ARE = "* -text -ident !eol !filter !diff !merge !working-tree-encoding\n"
"""Content of ``info/attributes``, which overrides every ``.gitattributes``."""
BARE_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"

DIFF = (
    "diff-tree", "-r", "-p", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv",
    "--no-renames", "--unified=3", "--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip
"""Command that compares two commits, without renames, with full blob ids."""

_APPEARANCE = ("filemode", "symlinks", "ignorecase", "precomposeunicode", "autocrlf", "eol", "trustctime", "checkstat")
"""Settings in ``core`` without which unchanged files could look modified."""
_FORMATS = ("objectformat", "refstorage")
# a value of a copied setting; others could add lines to our configuration
_WORD = re.compile(r"[A-Za-z0-9-]*")
# size of a file that git's own ones never reach
_MAX_BYTES = 1 << 20
_TREE_SETTINGS = {".gitignore", ".gitattributes"}
"""Files that git reads in any folder of a working tree."""
_COMMIT_FIX = "commit its files (git add -A; git commit), or remove its .git to take the files as they are"


def git(
    *args: str,
    then: Sequence[str] = (),
    folder: Path | None = None,
    tree: Path | None = None,
    stdin: bytes = b"",
    prefix: Sequence[str] = (),
    env: dict[str, str] | None = None,
    timeout: float = 120.0,
    lock: int | None = None,
) -> bytes:
    """Run git on a repository *of ours*, without configuration, hooks or filters; returns its output.

    `folder` is a git directory, `tree` its working tree, `then` a second command, `prefix` a command line that drops
    root, `lock` a descriptor that git inherits. Raises CalledProcessError, TimeoutExpired, and `PrerequisiteError`
    without git.
    """
    options = [part for setting in _HARDENED for part in ("-c", setting)]
    where = [f"--git-dir={folder}"] if folder is not None else []
    where += [f"--work-tree={tree}"] if tree is not None else []
    program = [_find_git(), *options, *where]
    command = [*program, *args]
    if then:
        command = ["/bin/sh", "-c", f"{shlex.join(command)} && exec {shlex.join([*program, *then])}"]
    return subprocess.run(
        [*prefix, *command],
        input=stdin,
        capture_output=True,
        check=True,
        env=_ENV | (env or {}),
        timeout=timeout,
        cwd=tree or "/",
        pass_fds=[] if lock is None else [lock],
    ).stdout


def read_git_version() -> str | None:
    """Version of git; None if not installed."""
    if shutil.which("git") is None:
        return None
    return git("--version").decode().strip().removeprefix("git version ")


def explain_git_error(error: subprocess.CalledProcessError) -> str:
    """First ``fatal`` line of git's stderr, else the last line."""
    lines = bytes(error.stderr or b"").decode(errors="replace").strip().splitlines()
    if lines:
        return next((line for line in lines if line.startswith("fatal: ")), lines[-1])
    return f"exit code {error.returncode}"


def create_bare_repository(folder: Path) -> Path:
    """Create an empty bare repository without starting git."""
    for name in ("objects/info", "objects/pack", "refs/heads", "refs/tags", "info"):
        (folder / name).mkdir(parents=True)
    (folder / "info" / "attributes").write_text(BYTES_AS_THEY_ARE)
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "config").write_text(BARE_CONFIG)
    return folder


# -- repositories of others


@dataclass(frozen=True, slots=True)
class Repository:
    """Working tree (None if bare), git directory, and main git directory of a repository."""

    root: Path | None
    home: Path
    common: Path

    @property
    def name(self) -> Path:
        """Path for messages."""
        return self.root or self.home


def find_repository(path: Path, *, around: bool = False) -> Repository:
    """Find the repository at `path`, or, with `around`, the innermost one that contains it.

    Raises `TaskError` if it is missing, another user's, or not self-contained.
    """
    path = path.resolve()
    places = [path]
    if around:
        places += [parent for parent in path.parents if parent.stat().st_dev == path.stat().st_dev]
    for root in places:
        git_path = root / ".git"
        if git_path.is_file() or _is_git_directory(git_path):
            return _check_repository(root, git_path)
    if not path.exists():
        _reject_repository(path, "there is no such folder", fix="name the folder of a git repository")
    _reject_repository(
        path,
        "it has no git directory",
        fix=f"git -C {path} init && git -C {path} add -A && git -C {path} commit -m 'Before the repair'",
    )


def find_local_repository(url: str) -> Repository | None:
    """Find the repository at `url`; None if not a local path. Raises `TaskError`."""
    if url.startswith("file://"):
        path = Path(unquote(url.removeprefix("file://")))
    elif re.match(r"[^/]*:", url):  # a scheme, or a host as in host:path
        return None
    else:
        path = Path(url)
    if not _is_git_directory(path) or _is_git_directory(path / ".git"):
        return find_repository(path)
    home = path.resolve()
    _check_owner(home, (home,))
    _check_self_contained(home, home)
    return Repository(None, home, home)


def _check_repository(root: Path, git_path: Path) -> Repository:
    try:
        home = git_path.resolve()
        if git_path.is_file():
            link = _read_git_file(git_path, root)
            if not link.startswith("gitdir: "):
                _reject_repository(root, ".git is a file that names no git directory")
            home = (root / link.removeprefix("gitdir: ").rstrip("\r\n")).resolve()
            if not _is_git_directory(home):
                _reject_repository(root, f".git names {home}, which is not a git directory")
        common = (home / _read_git_file(home / "commondir", root).rstrip("\r\n")).resolve()
        _check_owner(root, (root, git_path, home, common))
        _check_git_directory(root, home, common)
        _check_self_contained(root, common)
    except OSError as error:
        raise TaskError(f"{root} cannot be read: {error}", fix="check its permissions") from error
    return Repository(root, home, common)


def _is_git_directory(folder: Path) -> bool:
    head = folder / "HEAD"
    is_linked = (folder / "commondir").exists()
    return (head.exists() or head.is_symlink()) and (
        is_linked or all((folder / name).is_dir() for name in ("objects", "refs"))
    )


def _check_owner(root: Path, paths: Sequence[Path]) -> None:
    # git's rule: the user's, under sudo also the calling user's, or declared safe
    owners = {os.geteuid()}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        owners.add(int(os.environ["SUDO_UID"]))
    foreign = [path for path in paths if path.lstat().st_uid not in owners]
    if foreign and not _is_declared_safe(root):
        _reject_repository(
            root,
            f"{foreign[0]} belongs to another user (id {foreign[0].lstat().st_uid})",
            fix=f"if you trust it: git config --global --add safe.directory {shlex.quote(str(root))}",
        )


def _is_declared_safe(root: Path) -> bool:
    safe = False
    for value in map(os.fsdecode, _read_user_settings("--type=path", "--get-all", "safe.directory").split(b"\0")[:-1]):
        if not value:  # an empty value resets the list
            safe = False
        elif value == "*":
            safe = True
        elif Path(value).is_absolute():
            folder = Path(value.removesuffix("/*")).resolve()
            safe = safe or (root.is_relative_to(folder) if value.endswith("/*") else root == folder)
    return safe


def _read_user_settings(*options: str) -> bytes:
    # the user's and the system's settings, without any repository's
    local = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_CONFIG")
    env = {name: value for name, value in os.environ.items() if name not in local} | {"LC_ALL": "C"}
    command = [_find_git(), "--git-dir=/dev/null", "config", "--null", *options]
    return subprocess.run(command, env=env, capture_output=True, cwd="/", timeout=60).stdout


def _read_global_ignores(settings: dict[str, str]) -> str:
    home = os.environ.get("HOME", "")
    default = f"{os.environ.get('XDG_CONFIG_HOME') or f'{home}/.config'}/git/ignore"
    path = Path(re.sub(r"^~(?=/)", lambda _: home, settings.get("core.excludesfile", default)))
    return _read_git_file(path, path) if path.is_absolute() and path.is_file() and os.access(path, os.R_OK) else ""


def _parse_settings(listed: bytes) -> dict[str, str]:
    # output of `git config --null --list`: a NUL ends an entry, a newline its key, and a key alone is true
    rows = (os.fsdecode(row).partition("\n") for row in listed.split(b"\0") if row)
    return {key: value if newline else "true" for key, newline, value in rows}


def _check_git_directory(root: Path, home: Path, common: Path) -> None:
    # `home` lies in `root`, or points to it (linked working tree, submodule)
    settings = _git_settings(common / "config", root)
    if home == root / ".git":
        is_own = common == home
    elif home.parent == common / "worktrees":
        is_own = Path(_read_git_file(home / "gitdir", root).rstrip("\r\n")).resolve() == root / ".git"
    else:
        is_own = common == home and "core.worktree" in settings
    work_tree = settings.get("core.worktree") if common == home else None
    if work_tree is not None:
        is_own = is_own and (home / work_tree).resolve() == root
    if not is_own:
        _reject_repository(
            root,
            f"its git directory {home} belongs to another folder, or does not say to which",
            fix="git worktree repair, if it is a working tree that was moved; git config core.worktree "
            f"{shlex.quote(str(root))} there, if it was made with --separate-git-dir; else clone it and name the clone",
        )


def _check_self_contained(root: Path, common: Path) -> None:
    for name in ("objects", "objects/info", "objects/pack", "refs", "packed-refs", "reftable"):
        if (common / name).is_symlink():
            _reject_repository(root, f"its {name} is a symbolic link", fix="clone it, and name the clone")
    alternates = common / "objects" / "info" / "alternates"
    if _read_git_file(alternates, root).strip():
        _reject_repository(
            root,
            f"it borrows objects from elsewhere ({alternates})",
            fix=f"git -C {shlex.quote(str(root))} repack -a -d && rm {shlex.quote(str(alternates))}",
        )


def _check_regular_files(root: Path, paths: Sequence[Path]) -> None:
    # git would read a pipe or a device without end
    for path in (below for each in paths for below in (each, *each.rglob("*"))):
        if path.exists() and not (path.is_file() or path.is_dir()):
            _reject_repository(root, f"{path} is not a file")


def _git_settings(config: Path, root: Path) -> dict[str, str]:
    if not _read_git_file(config, root):
        return {}
    try:
        listed = git("config", "--file", str(config), "--no-includes", "--null", "--list", folder=Path("/dev/null"))
    except subprocess.CalledProcessError as error:
        _reject_repository(root, explain_git_error(error))
    return _parse_settings(listed)


def _read_git_file(path: Path, root: Path) -> str:
    try:
        kind = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if not stat.S_ISREG(kind.st_mode) or kind.st_size > _MAX_BYTES:
        _reject_repository(root, f"{path} is not a regular file of at most {_MAX_BYTES >> 20} MiB")
    return os.fsdecode(path.read_bytes())


def _reject_repository(root: Path, why: str, *, fix: str = _COMMIT_FIX) -> NoReturn:
    raise TaskError(f"{root} is not a usable git repository: {why}", fix=fix)


@dataclass(frozen=True, slots=True)
class RepositoryView:
    """`repository` seen through our temporary git directory `folder`."""

    repository: Repository
    folder: Path

    def head(self) -> str:
        """Checked-out commit. Raises `TaskError` without any."""
        args = ("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        return self._run_git(*args, otherwise="it has no commit yet").decode().strip()

    def changes(self, *, untracked: bool = True, within: str = "") -> list[str]:
        """Paths that differ from HEAD, without submodules."""
        root = self.repository.root
        if root is not None:
            top = root / within
            above = [folder / name for folder in top.parents if folder.is_relative_to(root) for name in _TREE_SETTINGS]
            below = [Path(at, name) for at, _, names in os.walk(top) for name in _TREE_SETTINGS.intersection(names)]
            _check_regular_files(root, [*above, *below])
        which = "normal" if untracked else "no"
        args = ("status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=all", f"--untracked-files={which}")
        rows = self._run_git(*args, "--", *([f":(top,literal){within}"] if within else [])).split(b"\0")
        return [os.fsdecode(row[3:]) for row in rows if row]

    def files(self, commit: str, within: str = "") -> list[str]:
        """Files of `commit` below `within`."""
        listed = self._run_git(
            "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, "--", *filter(None, [within])
        )
        return [os.fsdecode(name) for name in listed.split(b"\0") if name]

    def apply(self, patch: bytes) -> None:
        """Apply `patch` to the working tree, all or nothing. Raises CalledProcessError."""
        git("apply", "--whitespace=nowarn", "-", folder=self.folder, tree=self.repository.root, stdin=patch)

    def _run_git(self, *args: str, otherwise: str = "") -> bytes:
        try:
            return git(*args, folder=self.folder, tree=self.repository.root)
        except subprocess.CalledProcessError as error:
            _reject_repository(self.repository.name, otherwise or explain_git_error(error))
        except subprocess.TimeoutExpired as error:
            _reject_repository(self.repository.name, f"git took more than {error.timeout:.0f} s")


@contextmanager
def open_view(repository: Repository) -> Iterator[RepositoryView]:
    """Open `repository` without its settings. Raises `TaskError`."""
    home, common, root = repository.home, repository.common, repository.name
    user_settings, settings = _parse_settings(_read_user_settings("--list")), _git_settings(common / "config", root)
    with scratch("git") as folder:
        (folder / "info").mkdir()
        (folder / "HEAD").write_bytes(os.fsencode(_read_git_file(home / "HEAD", root)))
        appearance = {key: value for key, value in user_settings.items() if key.startswith("core.")}
        (folder / "config").write_text(_format_safe_config({**appearance, **settings}, root))
        # later lines take precedence
        excluded = f"{_read_global_ignores(user_settings)}\n{_read_git_file(common / 'info/exclude', root)}"
        (folder / "info" / "exclude").write_bytes(os.fsencode(excluded))
        (folder / "info" / "attributes").write_bytes(os.fsencode(_read_git_file(common / "info/attributes", root)))
        linked = [common / name for name in ("objects", "refs", "packed-refs", "reftable")]
        linked += [home / "index", *home.glob("sharedindex.*")]
        _check_regular_files(root, linked[1:])
        for path in linked:
            if path.exists():
                (folder / path.name).symlink_to(path)
        yield RepositoryView(repository, folder)


def _format_safe_config(settings: dict[str, str], root: Path) -> str:
    formats = [(name, settings[f"extensions.{name}"]) for name in _FORMATS if f"extensions.{name}" in settings]
    core = [(name, settings[f"core.{name}"]) for name in _APPEARANCE if f"core.{name}" in settings]
    for name, value in (*formats, *core):
        if not _WORD.fullmatch(value):
            _reject_repository(root, f"its setting {name} is {value!r}")
    lines = [
        "[core]",
        f"repositoryformatversion = {int(bool(formats))}",
        *(f"{name} = {value}" for name, value in core),
    ]
    return "\n".join([*lines, "[extensions]", *(f"{name} = {value}" for name, value in formats)]) + "\n"


def _find_git() -> str:
    path = shutil.which("git")
    if path is None:
        raise PrerequisiteError("git is not installed", fix="install the package git")
    return path
