"""Fingerprints of tasks' environments: what identifies the programs that a task runs with on this machine."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder
from coderepairrl.sandbox.rootfs import image_record_path, pin_image
from coderepairrl.types import Task


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
        return Fingerprint("image", pin_image(image), _read_record(image_record_path(image)).get("id", ""))
    kind, _, path = task.environment.partition(":")
    if kind == "venv":
        return Fingerprint("venv", path, python=_read_python_version(Path(path)))
    if kind == "python":
        folder = environment_folder(task.environment)
        record = _read_record(folder / ENVIRONMENT_RECORD)
        return Fingerprint(
            "python", folder.name, record.get("digest", ""), _read_python_version(folder), record.get("uv", "")
        )
    return Fingerprint("sandbox")


def list_fingerprints(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """List distinct environments of `tasks`, each with its number of ``tasks``."""
    by_names: dict[tuple[str, str], Fingerprint] = {}  # each is read once
    counts = Counter[Fingerprint]()
    for task in tasks:
        names = task.workspace if task.workspace.startswith("image:") else "", task.environment
        if names not in by_names:
            by_names[names] = read_fingerprint(task)
        counts[by_names[names]] += 1
    return [{**each._asdict(), "tasks": count} for each, count in sorted(counts.items())]


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return record


def _read_python_version(folder: Path) -> str:
    # `venv` and uv name the version differently
    try:
        text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    match = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return match[1] if match else ""
