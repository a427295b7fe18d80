"""Real repositories, real diffs, and real processes."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coderepairrl import sandbox as sandboxes
from coderepairrl.grading import Verdict, grade_patch
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.types import Checks, Task
from needs import need

DATA = Path(__file__).parents[3] / "shared" / "data"
Files = Mapping[str, bytes | str | None]
"""Contents by path; None deletes the file."""


def git(folder: Path, *args: str, stdin: bytes = b"") -> bytes:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false")
    done = subprocess.run(["git", *identity, *args], cwd=folder, input=stdin, capture_output=True, check=True)
    return done.stdout


class Repository:
    """A git repository whose edits become diffs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        git(folder, "init", "-q")

    def commit(self, files: Files) -> None:
        self.put(files)
        git(self.folder, "add", "-A")
        git(self.folder, "commit", "-qm", "base", "--allow-empty")

    def put(self, files: Files) -> None:
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)

    def diff(self, *options: str) -> bytes:
        """Return git's diff against the commit, and reset the working tree to it."""
        git(self.folder, "add", "-A")
        patch = git(self.folder, "diff", "--cached", *options)
        git(self.folder, "reset", "-q", "--hard")
        return patch

    def edit(self, files: Files, *options: str) -> bytes:
        self.put(files)
        return self.diff(*options)

    def task(self, files: Files, repair: Files, checks: Checks = Checks(), name: str = "t") -> Task:  # noqa: B008
        """Commit `files`; return a task whose reference changes them to `repair`."""
        self.commit(files)
        return Task(name, "Repair it.", "python", f"dir:{self.folder}", self.edit(repair), checks)


class Local(SandboxBackend):
    """The backend `unsafe-local`, which works everywhere. `opened` are its sandboxes; `wrap` may replace them."""

    name = "unsafe-local"

    def __init__(self, wrap: Callable[[Any], Any] = lambda sandbox: sandbox) -> None:
        self.opened: list[Sandbox] = []
        self._wrap = wrap
        self._backend = sandboxes.make_backend("unsafe-local")

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Any]:
        async with self._backend.open(task) as inner:
            self.opened.append(inner)
            yield self._wrap(inner)


async def grade_in_sandbox(task: Task, patch: bytes, backend: SandboxBackend | None = None) -> Verdict:
    """Grade `patch` in a fresh sandbox, by default `unsafe-local`."""
    async with (backend or Local()).open(task) as fresh:
        return await grade_patch(fresh, task, patch)


def bwrap(**options: Any) -> SandboxBackend:
    """The real sandbox; skip, or in CI fail, without bubblewrap."""
    need(shutil.which("bwrap"), "bubblewrap is not installed")
    return sandboxes.make_backend("bwrap", **options)


def read_data_rows(name: str) -> Iterator[dict[str, Any]]:
    """Rows of a real data set; skip, or in CI fail, without it."""
    need((DATA / name).exists(), f"{DATA / name} is missing")
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)
