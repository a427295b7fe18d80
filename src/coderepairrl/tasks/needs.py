"""Declared test needs of a Python project, read without running code."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from coderepairrl.errors import TaskError

PYTEST = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=")
"""Test command that ignores the project's `addopts` (their plugins may be missing) and runs all tests (no ``-x``)."""
GROUPS = ("test", "tests", "testing", "dev")
"""Names of a test extra or dependency group; the first present counts."""
_FILES = re.compile(
    r"(test|tests|testing|dev)[-_]requirements\.txt|requirements[-_](test|tests|testing|dev)\.txt"
    r"|requirements/(test|tests|testing|dev)\.txt|tests?/requirements\.txt"
)


class Needs(NamedTuple):
    """Installation needs: whether to build the project, and further pip arguments."""

    project: bool
    requirements: tuple[str, ...]
    files: tuple[str, ...]

    def __str__(self) -> str:
        declared = ("what the project declares",) if self.project else ()
        return ", ".join((*declared, *self.requirements, *self.files))


def needs_of(files: Mapping[str, bytes], command: Sequence[str], requirements: Sequence[str]) -> Needs:
    """Needs of the tests that `command` runs in the project `files` (contents by path).

    They are the project, its test dependency group and requirement files, `requirements`, and pytest if `command` names
    it. Raises `TaskError` for an unreadable ``pyproject.toml`` or ``setup.cfg``.
    """
    project = _pyproject(files)
    declared = bool({"project", "build-system"} & set(project)) or "poetry" in project.get("tool", {})
    pytest = ["pytest"] if any(PurePosixPath(word).name in ("pytest", "py.test") for word in command) else []
    groups = project.get("dependency-groups", {})
    name = next((name for name in GROUPS if name in groups), "")
    requirement_files = [path for path in files if _FILES.fullmatch(path)]
    if len(requirement_files) > 1:  # linters stand beside them
        requirement_files = [path for path in requirement_files if "dev" not in path] or requirement_files
    return Needs(
        declared or "setup.py" in files or _has_metadata(files),
        tuple(dict.fromkeys([*pytest, *(_group(groups, name) if name else ()), *requirements])),
        tuple(sorted(requirement_files)),
    )


def extra_of(files: Mapping[str, bytes]) -> str:
    r"""Test extra in ``pyproject.toml``, in brackets; else empty.

    >>> extra_of({"pyproject.toml": b"[project.optional-dependencies]\ntests = []"}), extra_of({})
    ('[tests]', '')
    """
    extras = _pyproject(files).get("project", {}).get("optional-dependencies", {})
    extra = next((name for name in GROUPS if name in extras), "")
    return f"[{extra}]" if extra else ""


def _pyproject(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        return tomllib.loads(files.get("pyproject.toml", b"").decode("utf-8"))
    except ValueError as error:
        raise TaskError(f"pyproject.toml cannot be read: {error}", fix="repair it, or environment=false") from error


def _has_metadata(files: Mapping[str, bytes]) -> bool:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(files.get("setup.cfg", b"").decode("utf-8", "replace"))
    except ConfigParserError as error:
        raise TaskError(f"setup.cfg cannot be read: {error}", fix="repair it, or environment=false") from error
    return parser.has_section("metadata")


def _group(groups: Mapping[str, Any], name: str, around: tuple[str, ...] = ()) -> Iterator[str]:
    """Requirements of a dependency group and the groups it includes (PEP 735).

    >>> list(_group({"test": ["pytest", {"include-group": "more"}], "more": ["six"]}, "test"))
    ['pytest', 'six']
    """
    for entry in groups.get(name, ()):
        if isinstance(entry, str):
            yield entry
        elif (included := entry.get("include-group", "")) not in (*around, name):
            yield from _group(groups, included, (*around, name))
