"""Published benchmarks: each row becomes a task."""

from __future__ import annotations

import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from coderepairrl.environments import dockerfile
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.processes.caches import user_cache
from coderepairrl.sandbox.rootfs import pin_image
from coderepairrl.tasks.base import LoadedSource, store_folder
from coderepairrl.tasks.patches import detect_language, list_changed_paths
from coderepairrl.tasks.rows import Row, read_hub_rows, read_rows
from coderepairrl.types import Checks, Task

Workspace = Literal["git", "image"]
GITHUB = "https://github.com/{repository}.git"


class TaskImages(NamedTuple):
    """Workspaces of one task, built from a published image."""

    agent: str
    """Workspace of the agent, without files that it must not see."""
    checks: str = ""
    """Workspace of the checks, if different."""


class Benchmark(LoadedSource):
    """Tasks from published rows: of the file or folder `path`, else of the hub's data set `hub`."""

    def __init__(self, path: str, *, hub: str = "", split: str = "", revision: str = "") -> None:
        self.path = Path(path).expanduser() if path else None
        self.hub, self.split, self.revision = hub, split, revision
        self._rows: tuple[Row, ...] | None = None

    def rows(self) -> Sequence[Row]:
        """Published rows. Raises `TaskError` and `PrerequisiteError`."""
        if self._rows is None:
            self._rows = tuple(self._read_rows())
            if not self._rows:
                raise TaskError(
                    f"{self.name}: {self.path or self.hub} has no rows", fix="name another file, or other options"
                )
        return self._rows

    def describe_tasks(self) -> list[Task]:
        """Tasks of all rows, before images are built (`attach_images`). Raises as `rows`."""
        return [task for task, _ in self._described.values()]

    @cached_property
    def _described(self) -> dict[str, tuple[Task, Row]]:
        """Task and row by task id."""
        by_id: dict[str, tuple[Task, Row]] = {}
        for row in self.rows():
            try:
                task = self.make_task(row)
            except OSError as error:
                raise self._make_write_error(error) from error
            except (LookupError, TypeError, AttributeError, ValueError) as error:  # malformed values in its columns
                raise row.make_error(f"its values cannot be read: {type(error).__name__}: {error}") from error
            if task.id in by_id:
                raise TaskError(
                    f"{self.name}, {row.where}: {task.id} is also in {by_id[task.id][1].where}",
                    fix="name one file of the folder: path=FILE",
                )
            by_id[task.id] = task, row
        return by_id

    def attach_images(self, tasks: Sequence[Task]) -> list[Task]:
        """Build images as workspaces of `describe_tasks`' tasks, possibly changed. Raises `TaskError`."""
        try:
            task_images = [self.make_images(self._described[task.id][1]) for task in tasks]
        except OSError as error:
            raise self._make_write_error(error) from error
        return [
            replace(task, workspace=images.agent, checks=replace(task.checks, workspace=images.checks))
            if images
            else task
            for task, images in zip(tasks, task_images, strict=True)
        ]

    def make_images(self, row: Row) -> TaskImages | None:
        """Build a row's images, if any; called for selected tasks only."""
        return None

    def _make_write_error(self, error: OSError) -> TaskError:
        return TaskError(f"{self.name}: the tasks cannot be written: {error}", fix="set CRRL_CACHE")

    def load(self) -> list[Task]:
        """Read rows and write workspaces. Raises as `rows`."""
        return self.attach_images(self.describe_tasks())

    def row(self, task_id: str) -> Mapping[str, Any]:
        """Row of a task, including columns without a field in `Task`. Raises KeyError."""
        return self._described[task_id][1].values

    @abstractmethod
    def make_task(self, row: Row) -> Task:
        """Convert a row. Raises `TaskError` that names row and column."""

    def _read_rows(self) -> list[Row]:
        if self.path is not None:
            return read_rows(self.name, self.path, self.split)
        if not self.hub:
            raise ConfigError(
                f"the task source {self.name} needs its data, which does not ship with the package",
                fix="download it and give path=FOLDER (docs/guides/benchmarks.md says which folder)",
            )
        return read_hub_rows(self.name, self.hub, self.split, self.revision)

    def _read_checkout(self, folder: str, read: Callable[[Path], Iterable[Row]]) -> list[Row]:
        """Rows that `read` makes of `path`, if it is a checkout with `folder`, else published rows."""
        if self.path is not None and (self.path / folder).is_dir():
            return list(read(self.path))
        return Benchmark._read_rows(self)  # not of the subclass, which calls this method


class RepositoryBenchmark(Benchmark):
    """Tasks from the history of public repositories.

    `workspace` ``git`` is a commit of `clone`, a URL with ``{repository}`` for ``OWNER/NAME``; ``native`` adds an
    environment built here; ``image`` is the benchmark's image.
    """

    def __init__(
        self,
        path: str,
        *,
        hub: str = "",
        split: str = "",
        revision: str = "",
        workspace: Workspace | Literal["native"],
        clone: str = "",
    ) -> None:
        super().__init__(path, hub=hub, split=split, revision=revision)
        self.workspace, self.clone = workspace, clone or GITHUB
        self.native = workspace == "native"
        self.task_split = split or "train"

    def make_task(self, row: Row) -> Task:
        """Convert a row with SWE-bench's columns."""
        reference = encode_patch(row.text("patch"))
        repository = row.text("repo")
        return Task(
            id=row.text("instance_id"),
            prompt=row.text("problem_statement"),
            language=detect_language(reference, detect_language(encode_patch(row.text_or_empty("test_patch")))),
            workspace=self.make_workspace(row, repository),
            reference=reference,
            split=self.task_split,
            licence=row.text_or_empty("license"),
            repository=repository,
            created=row.day("created_at"),
        )

    def make_workspace(self, row: Row, repository: str) -> str:
        """The workspace of a row."""
        if self.workspace == "image":
            return pin_image_workspace(self.format_image_name(row))
        return f"git:{self.clone.format(repository=repository)}@{row.text('base_commit')}"

    def format_image_name(self, row: Row) -> str:
        """Name of the row's image."""
        return row.text("image", "image_name", "docker_image")


class FileBenchmark(Benchmark):
    """Tasks whose workspaces are the rows' files, stored in `cache` (default: the user's)."""

    def __init__(self, path: str, *, hub: str = "", split: str = "", revision: str = "", cache: str = "") -> None:
        super().__init__(path, hub=hub, split=split, revision=revision)
        self.cache = Path(cache).expanduser() if cache else None

    def store_workspace(self, files: Mapping[str, str]) -> str:
        """Store `files` (texts by path, with surrogate escapes for non-UTF-8 bytes); return the workspace."""
        encoded = {name: content.encode("utf-8", "surrogateescape") for name, content in files.items()}
        return f"dir:{store_folder((self.cache or user_cache()) / 'benchmarks' / 'workspaces', encoded)}"

    def make_file_task(
        self, row: Row, files: Mapping[str, str], reference: bytes, checks: Checks, **fields: Any
    ) -> Task:
        """Make the task of the workspace `files`, from a row with ``instance_id`` and ``problem_statement``."""
        # without `repository`: exercises of one repository are independent observations
        return Task(
            id=row.text("instance_id"),
            workspace=self.store_workspace(files),
            reference=reference,
            checks=checks,
            split="test",
            **{"prompt": row.text_or_empty("problem_statement"), **fields},
        )


def pin_image_workspace(name: str) -> str:
    """Workspace of an image, named by its digest once prepared, else by its tag."""
    return f"image:{pin_image(name)}"


def derive_image(name: str, *steps: str, files: Mapping[str, bytes] | None = None) -> str:
    """Workspace of image `name` after Dockerfile `steps`, with build context `files`. Raises OSError."""
    return copy_build_context("\n".join([f"FROM {name}", *steps]) + "\n", files=files)


def copy_build_context(text: str, folder: Path | None = None, files: Mapping[str, bytes] | None = None) -> str:
    """Store a build context of `folder`, `files` and Dockerfile `text`; return its workspace.

    Raises OSError, and `TaskError` for an unsupported Dockerfile.
    """
    home = user_cache() / "benchmarks/images"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".making-") as scratch:
        partial = Path(scratch) / "environment"
        if folder:
            shutil.copytree(folder, partial, symlinks=True)
        else:
            partial.mkdir()
        for name, content in (files or {}).items():
            (partial / name).write_bytes(content)
        (partial / dockerfile.NAME).write_text(text, encoding="utf-8", errors="surrogateescape")
        dockerfile.Recipe(partial)  # raises unless it can be built
        image_folder = home / dockerfile.dockerfile_image_name(partial).rpartition(":")[2]
        if not image_folder.exists():
            partial.rename(image_folder)
    return pin_image_workspace(dockerfile.dockerfile_image_name(image_folder))


TESTS_FOLDER = ".crrl-tests"
"""Workspace folder of `prepend_tests`' files."""
# moves the files to $d; restores the paths of tests.patch from HEAD, since the image may have the patch uncommitted;
# applies tests.patch, unless HEAD has it
_APPLY_TESTS = f"""
d=$(mktemp -d) && mv {TESTS_FOLDER}/* "$d" && rm -rf {TESTS_FOLDER} || exit 1
while IFS= read -r path; do git checkout -q HEAD -- "$path" 2>"$d/log" || rm -rf -- "$path"; done <"$d/paths"
if [ -s "$d/tests.patch" ] && ! git apply --whitespace=nowarn "$d/tests.patch"; then
  git apply --check --reverse "$d/tests.patch" || exit 1
fi
"""


def prepend_tests(script: str, *patches: str, **files: str) -> tuple[str, dict[str, str]]:
    """Make a script that first applies test `patches`; return it and its files. `files`, by name, are in ``$d``."""
    combined = b"".join(map(encode_patch, patches))
    paths = "".join(f"{path}\n" for path in list_changed_paths(combined))
    needed = {"tests.patch": combined.decode("utf-8", "surrogateescape"), "paths": paths, **files}
    return _APPLY_TESTS + script, {f"{TESTS_FOLDER}/{name}": content for name, content in needed.items()}


def encode_patch(patch: str) -> bytes:
    """Encode a patch, with the final line end that git requires."""
    return (patch if patch.endswith("\n") or not patch else f"{patch}\n").encode("utf-8", "surrogateescape")
