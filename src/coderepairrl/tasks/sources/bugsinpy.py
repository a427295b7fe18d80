"""`bugsinpy`: 501 bugs of 17 Python projects (``soarsmu/BugsInPy``; the paper counts 493)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from coderepairrl.tasks.benchmark import Repositories, patch_bytes
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.sources import bugsinpy_native
from coderepairrl.types import Task

NATIVE = frozenset((resources.files(__package__) / "bugsinpy_native.txt").read_text().split())
"""Bugs whose tests fail in a native environment, and pass with the reference."""


class BugsInPy(Repositories):
    """BugsInPy: the commit before the repair, without the tests that come with it.

    `path` is a checkout, or a file of rows (``repo``, ``base_commit``, ``patch``, ``run_test``). There are no issue
    texts; a prompt has the command of the failing tests. `clone` is that of `benchmark.Repositories`; commits of pandas
    are published with 7 digits, which cannot be fetched, and keras-12 has no patch. `project` are the benchmark's names
    of some projects, between commas; all if not given.

    With `workspace` ``native`` a task has an environment that is built on this machine and the bug's own tests, which
    come from the repaired commit; of those bugs where that reproduces the benchmark (`NATIVE`; with `all_native` of
    every one whose project compiles nothing). They are read when the tasks are, and fetched the first time.
    """

    name = "bugsinpy"

    def __init__(
        self,
        path: str = "",
        *,
        clone: str = "",
        split: str = "test",
        workspace: Literal["git", "native"] = "git",
        all_native: bool = False,
        project: str | Sequence[str] = (),
    ) -> None:
        super().__init__(path, split=split, workspace="git", clone=clone)
        self.native, self.all_native = workspace == "native", all_native
        self.projects = frozenset(project.split(",") if isinstance(project, str) else project) - {""}

    def task(self, row: Row) -> Task:
        """The task of a row."""
        commands = "\n".join(row.names("run_test"))
        repository = row.text("repo")
        made = Task(
            id=row.text("instance_id"),
            prompt=f"A bug in {repository.partition('/')[2]} makes this fail, with tests that are not in the "
            f"repository yet:\n\n{commands}\n",
            language="python",
            workspace=self.place(row, repository),
            reference=patch_bytes(row.text("patch")),
            split=self.split,
            licence=row.maybe("license_upstream"),
            repository=repository,
        )
        if not self.native:
            return made
        url = self.clone.format(repository=repository)
        environment = bugsinpy_native.environment(row, url)
        return replace(made, environment=environment, checks=bugsinpy_native.checks(row, url))

    def _read(self) -> list[Row]:
        projects = self.path / "projects" if self.path is not None else None
        rows = list(_checkout(projects)) if projects is not None and projects.is_dir() else super()._read()
        return [row for row in rows if self._taken(row)]

    def _taken(self, row: Row) -> bool:
        id_ = row.text("instance_id")
        if self.projects and id_.removeprefix("bugsinpy__").rpartition("-")[0] not in self.projects:
            return False
        return not self.native or (bugsinpy_native.specified(row) if self.all_native else id_ in NATIVE)


def _checkout(projects: Path) -> Iterator[Row]:
    for info in sorted(projects.glob("*/project.info")):
        repository = re.sub(r"^.*github\.com/|(\.git)?/?$", "", _settings(info)["github_url"])
        bugs = sorted((path for path in info.parent.glob("bugs/*/bug.info")), key=lambda path: int(path.parent.name))
        for bug in bugs:
            yield Row("bugsinpy", f"{info.parent.name}-{bug.parent.name}", _values(bug.parent, repository))


def _values(folder: Path, repository: str) -> dict[str, Any]:
    known = _settings(folder / "bug.info")
    return {
        "instance_id": f"bugsinpy__{folder.parent.parent.name}-{folder.name}",
        "repo": repository,
        "base_commit": known["buggy_commit_id"],
        "fixed_commit": known["fixed_commit_id"],
        "python_version": known.get("python_version", ""),
        "test_files": known.get("test_file", "").split(";"),
        "run_test": [line.strip() for line in _text(folder / "run_test.sh").split("\n") if line.strip()],
        "setup_sh": _text(folder / "setup.sh"),
        "requirements": _text(folder / "requirements.txt").split("\n"),
        "patch": _text(folder / "bug_patch.txt"),
    }


def _settings(path: Path) -> dict[str, str]:
    return {key: value.strip() for key, value in re.findall(r'^\s*(\w+)\s*=\s*"([^"]*)"', _text(path), re.MULTILINE)}


def _text(path: Path) -> str:
    data = path.read_bytes() if path.is_file() else b""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # lists that PowerShell wrote
        data = data.decode("utf-16").encode()
    return data.decode("utf-8", "surrogateescape")
