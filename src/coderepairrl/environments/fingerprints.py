"""Fingerprints of tasks' environments on this machine."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder
from coderepairrl.sandbox.rootfs import pinned, record_of
from coderepairrl.types import Task


class Fingerprint(NamedTuple):
    """Environment of a task; unknown fields are empty.

    >>> fingerprint(Task("a/b", "repair it", "python", "git:https://example.org/a@" + "0" * 40, b"")).kind
    'sandbox'
    """

    kind: str
    """``image``, ``python`` (built), ``venv`` (a named folder), or ``sandbox``: the sandbox's own programs."""
    name: str = ""
    """Image with digest, environment in the cache, or folder."""
    digest: str = ""
    """SHA-256 of the image's configuration, or over all built files; empty if not prepared here."""
    python: str = ""
    uv: str = ""


def fingerprint(task: Task) -> Fingerprint:
    """Fingerprint of `task`, from records of `crrl tasks prepare`."""
    kind, _, where = task.workspace.partition(":")
    if kind == "image":
        return Fingerprint("image", pinned(where), _read_fingerprint(record_of(where)).get("id", ""))
    kind, _, where = task.environment.partition(":")
    if kind == "venv":
        return Fingerprint("venv", where, python=_python_version(Path(where)))
    if kind == "python":
        folder = environment_folder(task.environment)
        record = _read_fingerprint(folder / ENVIRONMENT_RECORD)
        return Fingerprint(
            "python", folder.name, record.get("digest", ""), _python_version(folder), record.get("uv", "")
        )
    return Fingerprint("sandbox")


def fingerprints(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Distinct environments of `tasks`, with the number of ``tasks``."""
    by_source: dict[tuple[str, str], Fingerprint] = {}
    counts = Counter[Fingerprint]()
    for task in tasks:
        by = task.workspace if task.workspace.startswith("image:") else "", task.environment
        counts[by_source[by] if by in by_source else by_source.setdefault(by, fingerprint(task))] += 1
    return [{**each._asdict(), "tasks": count} for each, count in sorted(counts.items())]


def _read_fingerprint(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return record


def _python_version(folder: Path) -> str:
    # `venv` and uv name the version differently
    try:
        text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    match = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return match[1] if match else ""
