"""What was recorded of built environments, and in what two of them differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environments_cache


class Difference(NamedTuple):
    """A fact that two environments do not share; empty on the side that lacks it.

    >>> Difference("package six", "1.16.0", "1.17.0").fact
    'package six'
    """

    fact: str
    first: str
    second: str


def record(name: str) -> dict[str, Any]:
    """The record of an environment, by its folder or by its name in the cache. Raises `UsageError`."""
    folder = Path(name) if "/" in name else environments_cache() / name
    try:
        found: dict[str, Any] = json.loads((folder / ENVIRONMENT_RECORD).read_text(encoding="utf-8"))
        assert {"packages", "digest", "specification"} <= found.keys()
    except (OSError, ValueError, AssertionError) as error:
        raise UsageError(
            f"{folder} is no environment that was built to its end",
            fix="crrl env verify SOURCE names those of a source's tasks",
        ) from error
    return found


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    """Every fact of two records that is not the same, packages one by one."""
    one, other = _facts(first), _facts(second)
    names = sorted(one.keys() | other.keys())
    there = (Difference(name, one.get(name, ""), other.get(name, "")) for name in names)
    return [each for each in there if each.first != each.second]


def _facts(about: dict[str, Any]) -> dict[str, str]:
    packages = {f"package {name}": version for name, version in about["packages"].items()}
    asked = {f"specification {name}": _text(value) for name, value in about["specification"].items()}
    return {"python": about["python"], "uv": about["uv"], "files": about["digest"], **packages, **asked}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
