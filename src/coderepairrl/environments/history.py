"""Reduction of an image's repository to its past.

Benchmark images are clones with later branches, tags and packs, where policies look for the repair. A new repository
gets only objects reachable from the checked out commit, and tags of its ancestors (``git describe``); related
repositories, bundles, and caches of pip and uv are deleted. Git runs as the sandbox user (`hostgit`).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coderepairrl.errors import TaskError
from coderepairrl.processes.hostgit import BARE_CONFIG, create_bare_repository, explain_git_error, git
from coderepairrl.sandbox.privileges import command_as
from coderepairrl.sandbox.rootfs import read_text_inside, resolve_inside
from coderepairrl.sandbox.workspace import borrow_objects

_ID = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_GIT_SECONDS = 3600.0
_CACHES = ("/.cache/pip", "/.cache/uv")
"""Caches of package managers, perhaps with later versions of the project."""
_MAX_BORROWING_DEPTH = 5
"""Longest chain of borrowing repositories, as in git."""


class ReducedHistory(NamedTuple):
    """Checked out commit (empty: none) and removed paths."""

    head: str
    removed: tuple[str, ...]


def reduce_to_past(tree: Path, where: str, work: Path, user: int | None) -> ReducedHistory:
    """Reduce the repository in folder `where` of `tree` to the past of its commit. Raises `TaskError`."""
    repository = _ImageRepository(tree, where, work, command_as(user, []))
    git_dir = resolve_inside(tree, ".git", where)
    if git_dir is None:
        return ReducedHistory("", ())
    if (pointer := read_text_inside(tree, git_dir)).startswith("gitdir: "):
        git_dir = resolve_inside(tree, pointer.removeprefix("gitdir: ").rstrip("\r\n"), where)
    common = git_dir and resolve_inside(tree, read_text_inside(tree, f"{git_dir}/commondir").strip() or ".", git_dir)
    if not git_dir or not common or not (tree / git_dir).is_dir() or not (tree / common).is_dir():
        raise TaskError(f"the repository in /{where} has no git directory in the image")
    try:
        _fill_view(repository, git_dir, common)
        borrowed = _find_borrowed(repository, common)
        head = _rebuild_repository(repository, git_dir, common, borrowed)
    except subprocess.CalledProcessError as error:
        raise TaskError(f"the repository in /{where} cannot be read: {explain_git_error(error)}") from error
    except subprocess.TimeoutExpired as error:
        raise TaskError(f"the repository in /{where} takes git more than {error.timeout:.0f} s") from error
    # the folders that lent objects, or their whole repository if HEAD lies beside them
    lenders = [name for name in borrowed if name.endswith("objects")]
    lenders = [name.removesuffix("/objects") if (tree / name).with_name("HEAD").is_file() else name for name in lenders]
    old = dict.fromkeys((git_dir, common, *lenders))
    removed = [name for name in old if not f"{name}/".startswith(f"{where}/.git/")]
    for name in removed:
        shutil.rmtree(tree / name, ignore_errors=True)
    if not head:
        return ReducedHistory("", tuple(removed))
    return ReducedHistory(head, tuple(sorted({*removed, *_delete_other_sources(repository)})))


class _ImageRepository(NamedTuple):
    tree: Path
    where: str
    work: Path
    git_prefix: list[str]

    @property
    def view(self) -> Path:
        """Temporary git directory that borrows the image's objects."""
        return self.work / "view"

    @property
    def new(self) -> Path:
        """The new repository."""
        return self.work / "new"

    def git(self, *args: str, folder: Path, stdin: bytes = b"", env: dict[str, str] | None = None) -> bytes:
        return git(*args, folder=folder, prefix=self.git_prefix, stdin=stdin, env=env, timeout=_GIT_SECONDS)


def _fill_view(repository: _ImageRepository, git_dir: str, common: str) -> None:
    # copies refs after removing links, which could lead anywhere
    view = create_bare_repository(repository.view)
    (view / "info" / "attributes").unlink()
    old = repository.tree / common
    _remove_links(old)
    _remove_links(repository.tree / git_dir)
    (view / "HEAD").write_text(read_text_inside(repository.tree, f"{git_dir}/HEAD"))
    image_config = read_text_inside(repository.tree, f"{common}/config").encode(errors="surrogateescape")
    settings = repository.git("config", "--file", "-", "--null", "--list", folder=Path("/dev/null"), stdin=image_config)
    # git prints SECTION.NAME, a newline and the value of each setting, and then a NUL
    formats = re.findall(r"(?:^|\0)extensions\.(objectformat|refstorage)\n([^\0\n]*)", os.fsdecode(settings))
    if formats:
        lines = [f"\t{name} = {value}\n" for name, value in formats]
        # extensions need version 1 of the format
        config = BARE_CONFIG.replace("= 0", "= 1") + "[extensions]\n" + "".join(lines)
        (view / "config").write_text(config)
    for name in ("packed-refs", "shallow"):
        if content := read_text_inside(repository.tree, f"{common}/{name}", longest=1 << 28):
            (view / name).write_text(content, errors="surrogateescape")
    for name in ("refs", "reftable"):
        if (old / name).is_dir():
            shutil.copytree(old / name, view / name, symlinks=True, dirs_exist_ok=True)


def _remove_links(folder: Path) -> None:
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if not stat.S_ISREG(kind := path.lstat().st_mode) and not stat.S_ISDIR(kind):
                path.unlink()


def _find_borrowed(repository: _ImageRepository, common: str) -> list[str]:
    # lists all folders of objects, and deletes the files that let them borrow from each other
    folders, pending = [], [(f"{common}/objects", 0)]
    while pending:
        folder, depth = pending.pop()
        real = resolve_inside(repository.tree, folder)
        if real is None or real in folders or depth > _MAX_BORROWING_DEPTH:
            continue
        folders.append(real)
        for line in read_text_inside(repository.tree, f"{real}/info/alternates").splitlines():
            if line and not line.startswith("#"):
                pending.append((line if line.startswith("/") else f"{real}/{line}", depth + 1))
        _remove_links(repository.tree / real)
        (repository.tree / real / "info" / "alternates").unlink(missing_ok=True)
    return folders


def _rebuild_repository(repository: _ImageRepository, git_dir: str, common: str, objects: list[str]) -> str:
    """Replace the repository; returns the commit id."""
    env = borrow_objects(*(repository.tree / folder for folder in objects))

    def run_git(*args: str, stdin: bytes = b"") -> str:
        return os.fsdecode(repository.git(*args, folder=repository.view, stdin=stdin, env=env))

    give_same_owner(repository.tree, repository.view)
    try:
        head = run_git("rev-parse", "--verify", "--quiet", "HEAD^{commit}").strip()
    except subprocess.CalledProcessError:
        remove_repository(repository.tree / repository.where)  # nothing is checked out
        return ""
    listed = run_git("for-each-ref", "--merged=HEAD", "--format=%(objectname) %(refname)", "refs/tags")
    tags = [line.split(" ", 1) for line in listed.splitlines()]
    new = create_bare_repository(repository.new)
    (new / "info" / "attributes").unlink()
    (new / "config").write_text(_format_image_config(repository))
    checked_out = (repository.tree / git_dir / "HEAD").read_text().strip()
    branch = checked_out.removeprefix("ref: ") if checked_out.startswith("ref: refs/heads/") else ""
    (new / "HEAD").write_text(f"ref: {branch}\n" if branch else f"{head}\n")
    rows = sorted((name, id_) for id_, name in [*tags, *([[head, branch]] if branch else [])])
    (new / "packed-refs").write_text("".join(f"{id_} {name}\n" for name, id_ in rows), errors="surrogateescape")
    shallow = [
        line
        for line in read_text_inside(repository.tree, f"{common}/shallow", longest=1 << 28).split()
        if _ID.fullmatch(line)
    ]
    if shallow:
        ancestors = set(run_git("rev-list", "HEAD").split())
        (new / "shallow").write_text("".join(f"{line}\n" for line in shallow if line in ancestors))
    if excluded := read_text_inside(repository.tree, f"{common}/info/exclude"):
        (new / "info" / "exclude").write_text(excluded, errors="surrogateescape")
    give_same_owner(repository.tree, new)
    revisions = "".join(f"{id_}\n" for id_ in [head, *(id_ for id_, _ in tags)]).encode()
    pack = ("pack-objects", "--revs", "--quiet", str(new / "objects" / "pack" / "pack"))
    try:
        run_git(*pack, stdin=revisions)
    except subprocess.CalledProcessError:  # a clone with a filter lacks objects
        run_git(*pack[:2], "--missing=allow-any", *pack[2:], stdin=revisions)
    repository.git("read-tree", "HEAD", folder=new)
    if (modules := repository.tree / common / "modules").is_dir():  # without them, git fails in a tree with submodules
        modules.rename(new / "modules")
    work_tree = repository.tree / repository.where
    remove_repository(work_tree)
    new.rename(work_tree / ".git")
    repository.git(f"--work-tree={work_tree}", "update-index", "-q", "--refresh", folder=work_tree / ".git")
    return head


def _format_image_config(repository: _ImageRepository) -> str:
    # in the sandbox, files have other inodes and change times
    config = (repository.view / "config").read_text().replace("bare = true", "bare = false")
    core, _, rest = config.partition("[extensions]")
    core += "\ttrustctime = false\n\tcheckStat = minimal\n"
    user = "[user]\n\tname = agent\n\temail = agent@sandbox\n[gc]\n\tauto = 0\n"
    return core + (f"[extensions]{rest}" if rest else "") + user


def give_same_owner(model: Path, folder: Path) -> None:
    """Make `folder` readable to all, and owned like `model`."""
    status = model.stat()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.chown(path, status.st_uid, status.st_gid)


def remove_repository(folder: Path) -> None:
    """Remove the repository of `folder`, or the link or file that names it, if any."""
    git_folder = folder / ".git"
    if git_folder.is_dir() and not git_folder.is_symlink():
        shutil.rmtree(git_folder)
    else:
        git_folder.unlink(missing_ok=True)


def _delete_other_sources(repository: _ImageRepository) -> Iterator[str]:
    """Delete other sources of later commits; yields their paths."""
    git_folder = repository.tree / repository.where / ".git"
    related = os.fsdecode(repository.git("rev-list", "--max-parents=0", "HEAD", folder=git_folder)).split()
    for parent, folders, files in os.walk(repository.tree):
        current = Path(parent)
        if current == git_folder:
            folders[:] = [name for name in folders if name == "modules"]
            continue
        name = str(current.relative_to(repository.tree))
        if name.endswith(_CACHES) and not name.startswith(f"{repository.where}/"):
            shutil.rmtree(current)
            folders.clear()
            yield name
            continue
        if "HEAD" in files and "objects" in folders and _has_any_commit(repository, current, related):
            shutil.rmtree(current)
            folders.clear()
            yield name
            continue
        for file in files:
            header = read_text_inside(repository.tree, f"{name}/{file}", longest=15) if file.endswith(".bundle") else ""
            if header.endswith("git bundle"):  # "# v2 git bundle"
                (current / file).unlink()
                yield str((current / file).relative_to(repository.tree))


def _has_any_commit(repository: _ImageRepository, other: Path, commits: list[str]) -> bool:
    query = "".join(f"{commit}\n" for commit in commits).encode()
    env = borrow_objects(other / "objects")
    answers = repository.git("cat-file", "--batch-check", folder=repository.view, stdin=query, env=env).splitlines()
    return not all(line.endswith(b" missing") for line in answers)
