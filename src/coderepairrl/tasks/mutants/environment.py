"""What the tests of a Python project need, beside its files: a virtual environment, built once by pip.

It holds what the project declares for its tests, and the project's own metadata without its modules: those are imported
from the workspace, which is where the bug is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.processes.caches import environments_cache
from coderepairrl.processes.children import run
from coderepairrl.processes.installs import alone, check_reachable, make_venv, pip, python
from coderepairrl.processes.scratch import scratch
from coderepairrl.tasks.folders import write_tree
from coderepairrl.tasks.needs import GROUPS, Needs, needs_of

_DONE = "environment.json"
_ITSELF = re.compile(rb"^[ \t]*((-e|--editable)[ \t=]+)?\.(\[.*\])?[ \t]*$", re.MULTILINE)
"""A line of a requirement file that is the project itself."""
_OFFLINE = re.compile(r"Failed to establish a new connection|name resolution|ConnectTimeoutError|ProxyError")
_UNVERSIONED = {"SETUPTOOLS_SCM_PRETEND_VERSION": "0"}
"""For the build of a tree without git, from which setuptools-scm and hatch-vcs would take the version."""
_SHOWN = 400


class Environment(NamedTuple):
    """A virtual environment for the tests of a project, and how the project lies in its tree."""

    folder: Path
    imports: str
    """The folder of the tree that modules are imported from (``src``); empty for the tree itself."""
    modules: frozenset[str]
    """Python files of the tree that the project installs; empty if that is not known."""
    built: dict[str, bytes]
    """Files that only the project's build makes (``_version.py``, compiled modules), by their path in the tree."""


def build(files: Mapping[str, bytes], command: Sequence[str], requirements: Sequence[str]) -> Environment | None:
    """The environment of the project `files` (contents by path) for the tests that `command` runs; None without needs.

    It has what the project depends on, its extra and its dependency group for tests, its requirement files for tests,
    pytest if `command` names it, and `requirements`. It lies in the cache (`environments_cache`), and is built again
    when a file changes that is not Python code. Raises `TaskError` where pip cannot build or install, and
    `PrerequisiteError` where it reaches no package index or no environment can be made.
    """
    needs = needs_of(files, command, requirements)
    if not (needs.project or needs.requirements or needs.files):
        return None
    target = environments_cache() / _digest(files, needs)
    with alone(target):
        if not (target / _DONE).exists():
            shutil.rmtree(target, ignore_errors=True)  # what an interrupted build left
            target.mkdir(mode=0o755)
            check_reachable(target)
            record = _build(target, files, needs)
            (target / _DONE).write_text(json.dumps(record), encoding="utf-8")
    record = json.loads((target / _DONE).read_text(encoding="utf-8"))
    built = {path: (target / "built" / path).read_bytes() for path in record["built"]}
    return Environment(target, record["imports"], frozenset(record["modules"]), built)


def source_folder(files: Mapping[str, bytes]) -> str:
    """``src`` where the modules of a project that declares nothing lie there, else nothing.

    >>> source_folder({"src/a.py": b"", "tests/test_a.py": b""}), source_folder({"a.py": b""})
    ('src', '')
    """
    found = any(path.startswith("src/") and path.endswith(".py") for path in files)
    return "src" if found and "src/__init__.py" not in files else ""


def _digest(files: Mapping[str, bytes], needs: Needs) -> str:
    """Changes with everything that the build reads, which is all but the content of modules."""
    matter = {
        path: "" if path.endswith(".py") and path != "setup.py" else hashlib.sha256(data).hexdigest()
        for path, data in sorted(files.items())
    }
    return hashlib.sha256(json.dumps([str(python()), needs, matter]).encode()).hexdigest()[:16]


def _build(target: Path, files: Mapping[str, bytes], needs: Needs) -> dict[str, Any]:
    """Make the environment at `target`; its record for `_DONE`, as plain data."""
    inside = make_venv(target, stdout=subprocess.DEVNULL)
    with scratch("environment") as work:
        tree, wheels = work / "tree", work / "wheels"
        tree.mkdir()
        write_tree(tree, {**files, **{path: _ITSELF.sub(b"", files[path]) for path in needs.files}})
        wheel: Path | None = None
        if needs.project:
            versioned = {} if "PKG-INFO" in files else _UNVERSIONED
            _pip(inside, needs, "wheel", "--no-deps", "--use-pep517", "-w", str(wheels), str(tree), versioned=versioned)
            [wheel] = wheels.iterdir()
        # not compiled: what is removed below would leave its bytecode, and with it a folder that can be imported
        asked = [*needs.requirements, *(word for path in needs.files for word in ("-r", path))]
        if wheel is not None:
            asked.append(f"{wheel}{_extra(wheel)}")
        _pip(inside, needs, "install", "--no-compile", *asked, cwd=tree)
        record: dict[str, Any] = {"imports": source_folder(files), "modules": [], "built": []}
        if wheel is not None:
            record |= _own_modules(target, wheel, files)
    run([str(inside), "-I", "-m", "compileall", "-q", str(target / "lib")], stdout=subprocess.DEVNULL)
    return record


def _pip(inside: Path, needs: Needs, *arguments: str, versioned: Mapping[str, str] = {}, **options: Any) -> None:
    done = pip(inside, *arguments, "--retries=2", stdout=subprocess.PIPE, env={**os.environ, **versioned}, **options)
    if done.returncode == 0:
        return
    output = done.stdout.decode("utf-8", "replace")
    if _OFFLINE.search(output):
        raise PrerequisiteError(
            f"pip reaches no package index, and the tests need an environment ({needs})",
            fix="connect this machine for the first time only, or name a folder of wheels (PIP_NO_INDEX=1 "
            "PIP_FIND_LINKS=FOLDER), or run the tests with what the sandbox's python3 has: environment=false",
        )
    errors = [line.strip() for line in output.splitlines() if re.search(r"error", line, re.IGNORECASE)]
    raise TaskError(
        f"pip cannot {'build the project' if arguments[0] == 'wheel' else f'install what its tests need ({needs})'}: "
        f"{' / '.join(errors)[-_SHOWN:] or output[-_SHOWN:]}",
        fix="make `pip install` of it work, or run the tests with what the sandbox's python3 has: environment=false",
    )


def _extra(wheel: Path) -> str:
    """The extra that tests need, in brackets, or nothing."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        there = Parser().parsestr(archive.read(name).decode("utf-8")).get_all("Provides-Extra", [])
    found = next((name for name in GROUPS if name in there), "")
    return f"[{found}]" if found else ""


def _own_modules(target: Path, wheel: Path, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Take the project's modules out of the environment, and keep those that its tree has not."""
    [packages] = target.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        own = [
            name for name in archive.namelist() if not re.match(r"[^/]+\.(dist-info|data)/", name) and name[-1] != "/"
        ]
        for name in own:
            (packages / name).unlink(missing_ok=True)
            for parent in PurePosixPath(name).parents[:-1]:
                if (packages / parent).is_dir() and not any((packages / parent).iterdir()):
                    (packages / parent).rmdir()
        places = {name: place for name in own if (place := _place(name, files)) is not None}
        if not places:
            return {}
        imports = Counter(places.values()).most_common(1)[0][0]
        built = {f"{imports}/{name}".lstrip("/"): name for name in own if name not in places}
        for path, name in built.items():
            (target / "built" / path).parent.mkdir(parents=True, exist_ok=True)
            (target / "built" / path).write_bytes(archive.read(name))
    modules = [f"{place}/{name}".lstrip("/") for name, place in places.items() if name.endswith(".py")]
    return {"imports": imports, "modules": sorted(modules), "built": sorted(built)}


def _place(name: str, files: Mapping[str, bytes]) -> str | None:
    """The folder of the tree below which a file of the wheel lies, the outermost; None if it is not there.

    >>> _place("a/b.py", {"src/a/b.py": b"", "x/src/a/b.py": b""}), _place("b.py", {"b.py": b""}), _place("c.py", {})
    ('src', '', None)
    """
    if name in files:
        return ""
    found = [path.removesuffix(f"/{name}") for path in files if path.endswith(f"/{name}")]
    return min(found, key=len) if found else None
