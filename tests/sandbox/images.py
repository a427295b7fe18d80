"""An image for containers, made of this machine's own files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = """bash sh env cat ls cp mv rm mkdir rmdir ln touch chmod stat head tail wc tr cut sleep yes date true false
    printf echo test sed awk grep find xargs tee tar git python3 ps kill renice nice id flock mkfifo mknod uname unshare
    dirname basename readlink nohup setsid timeout"""
UNUSED = """curses dbm distutils ensurepip idlelib lib2to3 pydoc_data sqlite3 tkinter turtledemo venv wsgiref xmlrpc"""
"""Modules of Python that no test imports inside: images are unpacked, copied and hashed hundreds of times."""
UNUSED_EXTENSIONS = ("_sqlite3", "_dbm", "_gdbm", "_curses", "_tkinter", "readline", "_test", "_xxtest", "_codecs_")
"""Extensions that no test imports; some come with large libraries."""


def root_file_system(root: Path, programs: str = PROGRAMS) -> None:
    """Copy programs and the libraries that they load, git and Python with their files, and make the usual folders."""
    libraries: set[str] = set()

    def note(file: Path) -> None:
        words = subprocess.run(["ldd", file], capture_output=True, text=True).stdout.split()
        libraries.update(word for word in words if word.startswith("/"))

    (root / "usr/bin").mkdir(parents=True)
    for name in programs.split():
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found is not None, f"no {name} here"
        shutil.copy(Path(found).resolve(), root / "usr/bin" / name)
        note(Path(found))
    if "python3" in programs.split():
        for module in _python(root):
            note(module)
    if "git" in programs.split():
        _git(root)
    for library in libraries:
        target = root / ("usr" + library if not library.startswith("/usr/") else library[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(library).resolve(), target)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "etc", "proc", "sys", "dev", "run", "testbed"):
        (root / name).mkdir()


def _python(root: Path) -> list[Path]:
    """Copy Python's library; return its extensions."""
    python = subprocess.run(
        ["/usr/bin/python3", "-c", "import os; print(os.path.dirname(os.__file__))"], capture_output=True, text=True
    ).stdout.strip()
    skipped = shutil.ignore_patterns("__pycache__", "test", "*.a", "config-*", "pydoc.py", "turtle.py", *UNUSED.split())
    shutil.copytree(python, root / python[1:], symlinks=True, ignore=skipped)
    extensions = list((root / python[1:] / "lib-dynload").glob("*.so"))
    for extension in extensions:
        if extension.name.startswith(UNUSED_EXTENSIONS):
            extension.unlink()
    return [extension for extension in extensions if extension.exists()]


def _git(root: Path) -> None:
    """Copy git's commands that are scripts; others are built into git, or only needed for servers."""
    (root / "usr/lib/git-core").mkdir(parents=True)
    for command in Path("/usr/lib/git-core").iterdir():
        if command.is_file() and not command.is_symlink() and command.stat().st_size < 1 << 18:
            shutil.copy(command, root / "usr/lib/git-core")
    (root / "usr/lib/git-core/git").symlink_to("../../bin/git")
    (root / "usr/bin/git-upload-pack").symlink_to("git")


def write_repository(folder: Path) -> None:
    """Write the working folder of a benchmark's image, with a later fix that must not be found."""
    (folder / "app.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "run").write_text("#!/bin/sh\necho run\n")
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("app.py")
    (folder / "again.py").hardlink_to(folder / "app.py")
    for name in (".git", "__pycache__", "deep"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("the fix\n")


def import_image(command: list[str], root: Path, name: str = "crrl-test:1") -> None:
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as archive:
        subprocess.run(
            [*command, "import", "--change", "WORKDIR /testbed", "-", name],
            stdin=archive.stdout,
            check=True,
            capture_output=True,
        )


@contextmanager
def own_podman(*more: str) -> Iterator[list[str]]:
    """Podman's command with a storage of its own, which is removed at the end."""
    if os.geteuid() != 0 or shutil.which("podman") is None:
        pytest.skip("needs root and Podman (sudo apt-get install podman)")
    home = Path(tempfile.mkdtemp(prefix="crrl-podman-"))
    flags = [f"--root={home}/root", f"--runroot={home}/run", f"--tmpdir={home}/tmp", "--cgroup-manager=cgroupfs"]
    command = ["podman", *flags, "--events-backend=file", *more]
    try:
        yield command
    finally:
        subprocess.run([*command, "rm", "--all", "--force"], capture_output=True)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (point := line.split()[1]).startswith(f"{home}/"):  # as root it mounts its storage upon itself
                subprocess.run(["umount", "--lazy", point], capture_output=True)
        shutil.rmtree(home)  # fails if a mount is left
