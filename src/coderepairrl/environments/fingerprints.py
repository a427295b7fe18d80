"""Which environment a task has on this machine: of what kind, and a digest by which two of them are told apart."""

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
    """The environment of a task. A field that does not apply, or that nothing on this machine says, is empty.

    >>> fingerprint(Task("a/b", "repair it", "python", "git:https://example.org/a@" + "0" * 40, b"")).kind
    'sandbox'
    """

    kind: str
    """``image``, ``python`` (built from a specification), ``venv`` (named by its folder), or ``sandbox``: the programs
    that the sandbox itself has."""
    name: str = ""
    """The image's with its digest, the environment's in the cache, or its folder."""
    digest: str = ""
    """SHA-256 of the image's configuration, which names its layers, or over all files that were built; empty for what
    was not prepared here, and for what nobody builds."""
    python: str = ""
    uv: str = ""
    """Version of the program that resolved and installed its packages."""


def fingerprint(task: Task) -> Fingerprint:
    """That of `task`, by what `crrl data prepare` recorded. No file of an environment is read."""
    kind, _, where = task.workspace.partition(":")
    if kind == "image":
        return Fingerprint("image", pinned(where), _read(record_of(where)).get("id", ""))
    kind, _, where = task.environment.partition(":")
    if kind == "venv":
        return Fingerprint("venv", where, python=_python(Path(where)))
    if kind == "python":
        folder = environment_folder(task.environment)
        record = _read(folder / ENVIRONMENT_RECORD)
        return Fingerprint("python", folder.name, record.get("digest", ""), _python(folder), record.get("uv", ""))
    return Fingerprint("sandbox")


def fingerprints(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """The environments of `tasks` as plain data, each once, with how many ``tasks`` have it."""
    known: dict[tuple[str, str], Fingerprint] = {}
    counts = Counter[Fingerprint]()
    for task in tasks:
        by = task.workspace if task.workspace.startswith("image:") else "", task.environment
        counts[known[by] if by in known else known.setdefault(by, fingerprint(task))] += 1
    return [{**each._asdict(), "tasks": count} for each, count in sorted(counts.items())]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def _python(folder: Path) -> str:
    """The version in ``pyvenv.cfg``, which `venv` and uv name differently."""
    try:
        text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return found[1] if found else ""
