"""Fingerprints of environments and images on this machine, and their verification by digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder
from coderepairrl.sandbox.privileges import sandbox_user
from coderepairrl.sandbox.rootfs import IMAGE_RECORD, SHARES, find_image, image_record_path, pin_image
from coderepairrl.types import Task

_MIN_SHARED_BYTES = 512


def digest_tree(
    folder: Path, hashes: dict[tuple[int, int], str] | None = None, record: str = ENVIRONMENT_RECORD
) -> str:
    """Compute SHA-256 in hex over path, kind and content of all files in `folder`, without `record`.

    `hashes` caches hashes of contents by device and inode.
    """
    digest, hashes = hashlib.sha256(), {} if hashes is None else hashes
    for parent, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted((*files, *links)):
            path = Path(parent, name)
            if path == folder / record:
                continue
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                kind = "program" if status.st_mode & stat.S_IXUSR else "file"
                if (inode := (status.st_dev, status.st_ino)) not in hashes:
                    with path.open("rb") as file:
                        hashes[inode] = hashlib.file_digest(file, "sha256").hexdigest()
                content = hashes[inode]
            elif stat.S_ISLNK(status.st_mode):
                kind, content = "link", hashlib.sha256(os.fsencode(path.readlink())).hexdigest()
            else:
                kind, content = "pipe", ""
            line = f"{path.relative_to(folder)}\0{kind}\0{content}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def share_equal_files(folder: Path) -> dict[tuple[int, int], str]:
    """Replace files of `folder` by hard links to equal ones in a pool; return hashes for `digest_tree`.

    Environments of a project for different commits are almost equal.
    """
    pool = folder.parent / "files"
    temporary_link = folder / ENVIRONMENT_RECORD  # the record is written later
    pool.mkdir(mode=0o755, exist_ok=True)
    hashes: dict[tuple[int, int], str] = {}
    for parent, _, files in os.walk(folder):
        for path in (Path(parent, name) for name in files):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size < _MIN_SHARED_BYTES:
                continue
            kind = "x" if status.st_mode & stat.S_IXUSR else ""
            content = path.read_bytes()
            hashed = hashlib.sha256(content).hexdigest()
            pooled = pool / f"{hashed}{kind}"
            try:
                pooled.hardlink_to(path)
            except FileExistsError:
                temporary_link.hardlink_to(pooled)
                if temporary_link.read_bytes() == content:
                    status = temporary_link.lstat()
                    temporary_link.replace(path)
                    temporary_link.unlink(missing_ok=True)  # renaming between two names of the same file does nothing
                else:  # the pooled file was damaged; digests of environments that link it differ
                    temporary_link.unlink()
                    temporary_link.hardlink_to(path)
                    temporary_link.replace(pooled)
            hashes[status.st_dev, status.st_ino] = hashed
    return hashes


def check_unchanged(*folders: Path) -> None:
    """Raise `TaskError` if an environment has changed."""
    hashes: dict[tuple[int, int], str] = {}
    for folder in folders:
        try:
            recorded = json.loads((folder / ENVIRONMENT_RECORD).read_text(encoding="utf-8"))["digest"]
        except (OSError, ValueError, KeyError) as error:
            raise TaskError(
                f"{folder} is not a complete environment",
                fix="prepare its tasks again (crrl tasks prepare)",
            ) from error
        if digest_tree(folder, hashes) != recorded:
            raise TaskError(
                f"the environment {folder} has changed since it was built",
                fix="delete that folder, and prepare its tasks again (crrl tasks prepare)",
            )


def check_environments(tasks: Iterable[Task]) -> None:
    """Check local environments of `tasks`. Raises `TaskError`."""
    needed = {environment_folder(task.environment) for task in tasks if task.environment.startswith("python:")}
    check_unchanged(*sorted(folder for folder in needed if folder.is_dir()))


class EnvironmentState(NamedTuple):
    """State: ``as built``, ``changed``, ``missing``, or ``unknown`` (an image unpacked before digests existed)."""

    name: str
    state: str
    tasks: int
    fix: str = ""


def verify_states(tasks: Sequence[Task]) -> list[EnvironmentState]:
    """Verify the environments and images of `tasks`."""
    hashes: dict[tuple[int, int], str] = {}
    needed = Counter(task.environment for task in tasks if task.environment.startswith("python:"))
    workspaces = (workspace for task in tasks for workspace in dict.fromkeys((task.workspace, task.checks.workspace)))
    images = Counter(workspace for workspace in workspaces if workspace.startswith("image:"))
    results = []
    for environment, count in needed.items():
        folder = environment_folder(environment)
        try:
            check_unchanged(folder)
            results.append(EnvironmentState(folder.name, "as built", count))
        except TaskError as error:
            state = "changed" if (folder / ENVIRONMENT_RECORD).is_file() else "missing"
            results.append(EnvironmentState(folder.name, state, count, error.fix))
    for workspace, count in images.items():
        name = workspace.removeprefix("image:")
        try:
            folder, image = find_image(name, sandbox_user())
            is_same = digest_tree(folder, hashes, IMAGE_RECORD) == image.digest
            state = "as built" if is_same else "changed" if image.digest else "unknown"
            # with the shared files: a damaged one would be linked into the image again
            command = shlex.join(["rm", "-r", str(folder), str(folder.parent / SHARES)])
            fix = "" if is_same else f"{command}, and prepare its tasks again (crrl tasks prepare)"
            results.append(EnvironmentState(pin_image(name), state, count, fix))
        except TaskError as error:
            results.append(EnvironmentState(name, "missing", count, error.fix))
    return results


class Fingerprint(NamedTuple):
    """Identity of a task's environment; unknown fields are empty.

    >>> read_fingerprint(Task("a/b", "repair it", "python", "git:https://example.org/a@" + "0" * 40, b"")).kind
    'sandbox'
    """

    kind: str
    """``image``, ``python`` (built by us), ``venv`` (a user's folder), or ``sandbox``: the programs of the sandbox."""
    name: str = ""
    """Image name with digest, name of the environment in the cache, or path of the folder."""
    digest: str = ""
    """SHA-256 of the image's configuration, or over all built files; empty if not prepared here."""
    python: str = ""
    """Python version."""
    uv: str = ""
    """Version of uv that built it."""


def read_fingerprint(task: Task) -> Fingerprint:
    """Read the fingerprint of `task` from the records of `crrl tasks prepare`."""
    kind, _, image = task.workspace.partition(":")
    if kind == "image":
        return Fingerprint("image", pin_image(image), _read_json_record(image_record_path(image)).get("id", ""))
    kind, _, path = task.environment.partition(":")
    if kind == "venv":
        return Fingerprint("venv", path, python=_read_python_version(Path(path)))
    if kind == "python":
        folder = environment_folder(task.environment)
        record = _read_json_record(folder / ENVIRONMENT_RECORD)
        return Fingerprint(
            "python", folder.name, record.get("digest", ""), _read_python_version(folder), record.get("uv", "")
        )
    return Fingerprint("sandbox")


def list_fingerprints(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """List distinct environments of `tasks`, each with its number of ``tasks``."""
    by_names: dict[tuple[str, str], Fingerprint] = {}  # by image and environment: each is read once
    counts = Counter[Fingerprint]()
    for task in tasks:
        names = task.workspace if task.workspace.startswith("image:") else "", task.environment
        if names not in by_names:
            by_names[names] = read_fingerprint(task)
        counts[by_names[names]] += 1
    return [{**each._asdict(), "tasks": count} for each, count in sorted(counts.items())]


def _read_json_record(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _read_python_version(folder: Path) -> str:
    # `venv` and uv name the version differently
    try:
        text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    match = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return match[1] if match else ""
