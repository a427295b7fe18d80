"""A cache for each test, and layers with this machine's programs."""

from __future__ import annotations

import hashlib
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.environments import dockerfile
from coderepairrl.environments.images import ReadyImage, prepare_images
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.privileges import sandbox_user
from coderepairrl.sandbox.rootfs import find_image
from sandbox.images import own_podman, root_file_system

from .made import pack_folder


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that the user of sandboxes can enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="crrl-images-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        subprocess.run(["/bin/rm", "-rf", folder], check=True)


@contextmanager
def open_overlays(**limits: Any) -> Iterator[Bubblewrap]:
    """Open bubblewrap; skip where it must copy images."""
    made = Bubblewrap(**limits)
    made.require()
    if not limits.get("copy") and "no overlay" in made.describe_workspaces():
        pytest.skip(made.describe_workspaces())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder in which images are kept."""
    with open_folder() as folder:
        monkeypatch.setenv("CRRL_CACHE", str(folder))
        yield folder


HISTORY = """
git init -q -b main && git config user.name n && git config user.email e@e
echo 0 > app.py && git add -A && git commit -qm zero && git tag -a v0 -m zero
git checkout -qb side && echo side > side.py && git add -A && git commit -qm side && git checkout -q main
git merge -q --no-ff -m merge side && echo 'return a - b' > app.py && git commit -qam base && git tag base-tag
echo 'THE FIX' > app.py && git commit -qam fix && git tag later && git tag -a later-too -m later
git checkout -qb other && echo 'THE FIX again' > app.py && git commit -qam again && git checkout -q main
echo 'THE FIX stashed' > app.py && git stash -q && git replace HEAD~1 HEAD
git update-ref refs/notes/x HEAD && git repack -qad && touch $(ls .git/objects/pack/*.pack | sed s/pack$/promisor/)
git update-ref refs/remotes/origin/main HEAD && git config remote.origin.url http://fix.example/repo
printf '#!/bin/sh\\necho THE FIX\\n' > .git/hooks/post-checkout && chmod +x .git/hooks/post-checkout
git -c core.hooksPath=/dev/null reset -q --hard HEAD~1 2>/dev/null || true
git replace -d $(git replace) && git -c core.hooksPath=/dev/null checkout -q -f base-tag && git replace later base-tag
git branch -f main base-tag && git symbolic-ref HEAD refs/heads/main && git reset -q --hard
"""
"""Script for a repository at a commit with a bug, with the repair in every place where git can keep it."""


def make_repository(folder: Path, script: str = HISTORY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A layer with the programs that tests run inside."""
    root = tmp_path_factory.mktemp("image") / "root"
    root_file_system(root)
    return pack_folder(root)


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A layer with a shell and basic programs, without git and Python: a tenth of the size of `programs`."""
    root = tmp_path_factory.mktemp("image") / "root"
    root_file_system(root, "bash sh env cat ls cp mv rm mkdir rmdir ln touch chmod id sleep mkfifo tail true")
    return pack_folder(root)


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A layer with a repository in ``/testbed``."""
    root = tmp_path_factory.mktemp("repository")
    make_repository(root / "testbed")
    (root / "testbed/built.so").write_bytes(b"not in git")
    return pack_folder(root)


@pytest.fixture(scope="module")
def podman() -> Iterator[list[str]]:
    with own_podman() as command:
        yield command


def tree_of(ready: ReadyImage) -> Path:
    """Folder with the files of a prepared image."""
    folder, _ = find_image(ready.pinned, sandbox_user())
    return folder / "tree"


def build_dockerfile(context: Path, text: str, offered: Path) -> tuple[ReadyImage, list[str]]:
    """Build a Dockerfile from the base images in `offered`; return the image and the printed lines."""
    (context / "Dockerfile").write_text(text)
    lines: list[str] = []
    [ready] = prepare_images([dockerfile.dockerfile_image_name(context)], offered=offered, say=lines.append)
    return ready, lines


Listed = dict[str, tuple[int, int, str, int, tuple[str, ...]]]


def list_tree(root: Path) -> Listed:
    """Kind, permissions, content, time and other names of each file, by path."""
    found: dict[str, tuple[int, int, str, int, int]] = {}
    names: dict[int, list[str]] = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        name = str(path.relative_to(root))
        if stat.S_ISREG(about.st_mode):
            names.setdefault(about.st_ino, []).append(name)
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            what = str(path.readlink()) if path.is_symlink() else ""
        time = 0 if stat.S_ISDIR(about.st_mode) else int(about.st_mtime)
        found[name] = (stat.S_IFMT(about.st_mode), stat.S_IMODE(about.st_mode), what, time, about.st_ino)
    return {name: (*row[:4], tuple(names.get(row[4], ()))) for name, row in found.items()}


def give_to_one_user(files: Listed) -> tuple[Listed, list[str]]:
    """Files of an image after all are given to one user, and the names of those that change or are dropped."""
    kept, differing = {}, []
    for name, (kind, mode, *rest) in files.items():
        allowed = (mode & ~0o6000) | (0o700 if stat.S_ISDIR(kind) else 0 if stat.S_ISLNK(kind) else 0o600)
        if mode != allowed or stat.S_ISCHR(kind):
            differing.append(name)
        if not stat.S_ISCHR(kind):
            kept[name] = (kind, allowed, *rest)
    return kept, differing
