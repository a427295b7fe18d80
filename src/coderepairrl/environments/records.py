"""Records of environments and images, their differences, and fingerprints of tasks' environments."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.environments.verify import content_of, kind_of
from coderepairrl.errors import TaskError, UsageError
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder, environments_cache
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.privileges import SANDBOX_USER
from coderepairrl.sandbox.rootfs import pinned, record_of
from coderepairrl.types import Task

_DPKG = "var/lib/dpkg"
_SHOWN = 12


class Difference(NamedTuple):
    """A difference of two environments; empty if missing.

    >>> Difference("package six", "1.16.0", "1.17.0").fact
    'package six'
    """

    fact: str
    first: str
    second: str


def record(name: str) -> dict[str, Any]:
    """Record of an environment or image, by folder or name. Raises `UsageError`."""
    folder = Path(name) if "/" in name else environments_cache() / name
    try:
        if not (folder / ENVIRONMENT_RECORD).is_file():
            if not (folder / rootfs.IMAGE_RECORD).is_file():
                user = SANDBOX_USER if os.geteuid() == 0 else None
                folder, _ = rootfs.find(name.removeprefix("image:"), user)
            image_values: dict[str, Any] = json.loads((folder / rootfs.IMAGE_RECORD).read_text(encoding="utf-8"))
            return image_values | {"tree": str(folder / "tree")}
        values: dict[str, Any] = json.loads((folder / ENVIRONMENT_RECORD).read_text(encoding="utf-8"))
        assert {"packages", "digest", "specification"} <= values.keys()
    except (OSError, ValueError, AssertionError, TaskError) as error:
        raise UsageError(
            f"{name} is no environment that was built to its end, and no image that was unpacked",
            fix="crrl env verify SOURCE names those of a source's tasks",
        ) from error
    return values


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    """Differing facts of two records: packages, and files of images outside differing packages."""
    one, other = _facts(first), _facts(second)
    changes = _unequal(one, other)
    if "tree" in first and "tree" in second and first["digest"] != second["digest"]:
        trees = [Path(each["tree"]) for each in (first, second)]
        changed = {each.fact for each in changes}
        explained = {path for tree in trees for fact, path in _belongings(tree, changed)}
        files = [_files(*trees), _files(*reversed(trees))]
        changes += [each for each in _unequal(*files) if each.fact.removeprefix("file ") not in explained]
    return changes


def _unequal(one: Mapping[str, str], other: Mapping[str, str]) -> list[Difference]:
    names = sorted(one.keys() | other.keys())
    compared = (Difference(name, one.get(name, ""), other.get(name, "")) for name in names)
    return [each for each in compared if each.first != each.second]


def _facts(about: dict[str, Any]) -> dict[str, str]:
    if "tree" in about:
        return _image_facts(about)
    packages = {f"package {name}": version for name, version in about["packages"].items()}
    specification = {f"specification {name}": _text(value) for name, value in about["specification"].items()}
    return {"python": about["python"], "uv": about["uv"], "files": about["digest"], **packages, **specification}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- images


def _image_facts(about: dict[str, Any]) -> dict[str, str]:
    tree = Path(about["tree"])
    facts = {name: about[name] for name in ("id", "workdir", "head", "home")}
    facts |= {"files": about["digest"], "user": f"{about['user']}:{about['group']}"}
    facts |= {f"variable {name}": value for name, value in about["env"].items()}
    facts |= {_name(name, where): version for name, version, where in _distributions(tree)}
    status = rootfs.text_inside(tree, f"{_DPKG}/status", longest=1 << 26)
    for row in status.split("\n\n"):
        name, version = (
            re.search(r"^Package: *(.+)", row, re.MULTILINE),
            re.search(r"^Version: *(.+)", row, re.MULTILINE),
        )
        if name and version and re.search(r"^Status: .* installed$", row, re.MULTILINE):
            facts[f"package {name[1]} of dpkg"] = version[1]
    return facts


def _name(name: str, where: str) -> str:
    return f"package {name} in /{where}"


def _distributions(tree: Path) -> Iterator[tuple[str, str, str]]:
    for parent, folders, _ in os.walk(tree):
        for each in folders:
            if each.endswith(".dist-info") and not Path(parent, each).is_symlink():
                name, _, version = each.removesuffix(".dist-info").partition("-")
                yield name, version, str(Path(parent).relative_to(tree))


def _belongings(tree: Path, facts: set[str]) -> Iterator[tuple[str, str]]:
    for name, version, where in _distributions(tree):
        if (fact := _name(name, where)) in facts:
            listed = rootfs.text_inside(tree, f"{where}/{name}-{version}.dist-info/RECORD", longest=1 << 26)
            for row in csv.reader(listed.splitlines()):
                if row:
                    yield fact, os.path.normpath(f"{where}/{row[0]}" if row[0][:1] != "/" else row[0][1:])
    debian = {fact for fact in facts if fact.endswith(" of dpkg")}
    for fact in debian:
        yield fact, f"{_DPKG}/status"
    for info in (tree / _DPKG / "info").glob("*"):
        fact = f"package {info.stem.partition(':')[0]} of dpkg"
        if fact in debian:
            yield fact, str(info.relative_to(tree))
            if info.suffix == ".list":
                for line in rootfs.text_inside(tree, str(info.relative_to(tree)), longest=1 << 26).splitlines():
                    yield fact, line.lstrip("/")


def _files(tree: Path, other: Path) -> dict[str, str]:
    contents = {}
    for parent, folders, files in os.walk(tree):
        for name in (*files, *(name for name in folders if Path(parent, name).is_symlink())):
            path = Path(parent, name)
            where, status = path.relative_to(tree), path.lstat()
            if os.path.lexists(other / where) and os.path.samestat(status, (other / where).lstat()):
                continue
            contents[f"file {where}"] = f"{kind_of(status)} {content_of(path, status)[:_SHOWN]}".strip()
    return contents


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
    """Fingerprint of `task`, from records of `crrl data prepare`."""
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
    """Distinct environments of `tasks`, with the number of ``tasks``."""
    by_source: dict[tuple[str, str], Fingerprint] = {}
    counts = Counter[Fingerprint]()
    for task in tasks:
        by = task.workspace if task.workspace.startswith("image:") else "", task.environment
        counts[by_source[by] if by in by_source else by_source.setdefault(by, fingerprint(task))] += 1
    return [{**each._asdict(), "tasks": count} for each, count in sorted(counts.items())]


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return record


def _python(folder: Path) -> str:
    # `venv` and uv name the version differently
    try:
        text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    match = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return match[1] if match else ""
