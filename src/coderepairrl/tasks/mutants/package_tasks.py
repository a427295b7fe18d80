"""Mutants of a user's own Python package or repository: the whole tree with one bug, verified by its own tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from coderepairrl.children import run
from coderepairrl.errors import TaskError
from coderepairrl.tasks.mutants.mutations import Mutation, mutations

SKIPPED = frozenset({".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", "build", "dist", ".tox"})
SHOWN_LINES = 6
"""Lines of the failing tests' output that an issue quotes."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A verified bug in a package. `output` are the last lines that the failing tests printed."""

    path: str
    mutation: Mutation
    broken: str
    fixed: str
    output: str

    @property
    def key(self) -> str:
        """``path:function/kind-digest``."""
        digest = hashlib.sha256(f"{self.path}\0{self.fixed}\0{self.broken}".encode()).hexdigest()[:8]
        return f"{self.path}:{self.mutation.function}/{self.mutation.kind.replace(' ', '-')}-{digest}"


def read_tree(root: Path) -> dict[str, bytes]:
    """The files of a folder, or of a git repository's HEAD. Raises `TaskError`.

    A folder that is itself a package (it has an ``__init__.py``) keeps its name, so that it can be imported.
    """
    try:
        return _read_tree(root)
    except OSError as error:
        raise TaskError(f"{root} cannot be read: {error}", fix="give a folder that you may read") from error


def _read_tree(root: Path) -> dict[str, bytes]:
    if not root.is_dir():
        raise TaskError(f"{root} is not a folder", fix="give the folder of a Python package or a git repository")
    if (root / ".git").exists():
        listed = _git(root, "ls-tree", "-r", "-z", "--name-only", "HEAD")
        names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
        if _git(root, "status", "--porcelain", "--untracked-files=no"):
            raise TaskError(f"{root} has uncommitted changes", fix="commit or stash them first")
        paths = [root / name for name in names]
    else:
        paths = [path for path in root.rglob("*") if not SKIPPED & set(path.relative_to(root).parts)]
    files = sorted(path for path in paths if path.is_file() and not path.is_symlink())
    base = root.parent if (root / "__init__.py").exists() else root
    return {str(path.relative_to(base)): path.read_bytes() for path in files}


def candidates(files: Mapping[str, bytes], only: str = "*") -> list[tuple[str, str, Mutation]]:
    """Every (path, source, mutation) of code that matches the glob `only` and is not a test. Raises `TaskError`."""
    found: list[tuple[str, str, Mutation]] = []
    broken: list[str] = []
    for path, data in files.items():
        if path.endswith(".py") and fnmatch(path, only) and not _is_test(path):
            try:
                source = data.decode("utf-8")
                found += [(path, source, mutation) for mutation in mutations(source)]
            except (SyntaxError, ValueError) as error:
                broken.append(f"{path}: {error}")
    if not found:
        why = f"; unreadable: {'; '.join(broken[:3])}" if broken else ""
        raise TaskError(
            f"no mutable function in {len(files)} files (only={only!r}){why}", fix="point path at Python code"
        )
    return found


def bugs(
    files: Mapping[str, bytes], command: Sequence[str], *, only: str, seed: int, timeout: float, attempts: int
) -> Iterator[Bug]:
    """Verified bugs in random order: `command` passes on `files` and fails, in time, with the bug.

    The command runs on this machine, in a temporary copy. At most `attempts` mutations are tried. Raises `TaskError`
    when the tests already fail without any bug, and when nothing at all makes them fail.
    """
    with tempfile.TemporaryDirectory(prefix="crrl-mutants-") as scratch:
        tree = Path(scratch) / "tree"
        write_tree(tree, files)
        passed, output = _run(command, tree, timeout)
        if passed is None:
            raise TaskError(
                f"the tests did not end in {timeout:g} s: {' '.join(command)}", fix="raise the option timeout"
            )
        if not passed:
            raise TaskError(
                f"the tests fail before any bug is injected: {' '.join(command)}\n{output}",
                fix="give the command that passes, here and in the sandbox: the option command (docs/tasks.md)",
            )
        pool = candidates(files, only)
        Random(seed).shuffle(pool)
        found = 0
        for path, source, mutation in pool[:attempts]:
            broken = mutation.apply(source)
            (tree / path).write_bytes(broken.encode())
            passed, output = _run(command, tree, timeout)
            (tree / path).write_bytes(files[path])
            if passed is False:
                found += 1
                yield Bug(path, mutation, broken, source, output)
        if not found:
            tried = min(attempts, len(pool))
            raise TaskError(
                f"the tests notice none of {tried} injected bugs: {' '.join(command)}",
                fix="give the command that runs them (the option command), or choose a package with better tests",
            )


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` below `folder`."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _run(command: Sequence[str], tree: Path, timeout: float) -> tuple[bool | None, str]:
    """Whether the tests pass (None: they did not end in time), and the end of what they print."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    try:
        done = run(command, stdout=subprocess.PIPE, timeout=timeout, cwd=tree, env=environment)
    except subprocess.TimeoutExpired:
        return None, ""
    except OSError as error:
        raise TaskError(
            f"{' '.join(command)} cannot be run: {error}", fix="name a program in the option command"
        ) from error
    lines = done.stdout.decode("utf-8", "replace").replace(f"{tree}/", "").strip().splitlines()
    return done.returncode == 0, "\n".join(lines[-SHOWN_LINES:])


def _git(root: Path, *arguments: str) -> bytes:
    git = shutil.which("git")
    if git is None:
        raise TaskError("git is not installed", fix="sudo apt-get install git")
    done = subprocess.run([git, "-C", str(root), *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        raise TaskError(f"{root}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _is_test(path: str) -> bool:
    parts = path.split("/")
    name = parts[-1]
    return (
        name.startswith(("test_", "check_"))
        or name.endswith("_test.py")
        or name in ("conftest.py", "setup.py")
        or bool({"tests", "test", "docs", "examples"} & set(parts[:-1]))
    )
