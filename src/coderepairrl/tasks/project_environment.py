"""Virtual environment for the tests of a Python project, whose needs are read without running its code.

It has the test dependencies and the project's metadata; modules are imported from the workspace.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from coderepairrl.environments.build import Specification, build_environment
from coderepairrl.environments.pythons import sandbox_version
from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.sandbox.workspace import read_built_files
from coderepairrl.tasks.base import run_blocking, store_folder

PYTEST = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=")
"""Test command that ignores the project's `addopts` (their plugins may be missing) and runs all tests (no ``-x``)."""
GROUPS = ("test", "tests", "testing", "dev")
"""Names of a test extra or dependency group; the first present is used."""
_REQUIREMENT_FILE = re.compile(
    r"(test|tests|testing|dev)[-_]requirements\.txt|requirements[-_](test|tests|testing|dev)\.txt"
    r"|requirements/(test|tests|testing|dev)\.txt|tests?/requirements\.txt"
)


class InstallNeeds(NamedTuple):
    """Installation needs: whether to build the project, requirements, and requirement files."""

    project: bool
    requirements: tuple[str, ...]
    files: tuple[str, ...]


def find_install_needs(files: Mapping[str, bytes], command: Sequence[str], requirements: Sequence[str]) -> InstallNeeds:
    """Find what `command` needs in project `files` (contents by path).

    The project, its test dependency group and requirement files, `requirements`, and pytest if `command` names it.
    Raises `TaskError` for an unreadable ``pyproject.toml`` or ``setup.cfg``.
    """
    project = _read_pyproject(files)
    declared = bool({"project", "build-system"} & set(project)) or "poetry" in project.get("tool", {})
    pytest = ["pytest"] if any(PurePosixPath(word).name in ("pytest", "py.test") for word in command) else []
    groups = project.get("dependency-groups", {})
    name = next((name for name in GROUPS if name in groups), "")
    requirement_files = [path for path in files if _REQUIREMENT_FILE.fullmatch(path)]
    if len(requirement_files) > 1:  # files for development also name linters
        requirement_files = [path for path in requirement_files if "dev" not in path] or requirement_files
    return InstallNeeds(
        declared or "setup.py" in files or _has_metadata(files),
        tuple(dict.fromkeys([*pytest, *(_expand_group(groups, name) if name else ()), *requirements])),
        tuple(sorted(requirement_files)),
    )


def find_test_extra(files: Mapping[str, bytes]) -> str:
    r"""Test extra in ``pyproject.toml``, in brackets; else empty.

    >>> find_test_extra({"pyproject.toml": b"[project.optional-dependencies]\ntests = []"}), find_test_extra({})
    ('[tests]', '')
    """
    extras = _read_pyproject(files).get("project", {}).get("optional-dependencies", {})
    extra = next((name for name in GROUPS if name in extras), "")
    return f"[{extra}]" if extra else ""


def _read_pyproject(files: Mapping[str, bytes]) -> dict[str, Any]:
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


def _expand_group(groups: Mapping[str, Any], name: str, outer: tuple[str, ...] = ()) -> Iterator[str]:
    """Requirements of a dependency group and the groups it includes (PEP 735).

    >>> list(_expand_group({"test": ["pytest", {"include-group": "more"}], "more": ["six"]}, "test"))
    ['pytest', 'six']
    """
    for entry in groups.get(name, ()):
        if isinstance(entry, str):
            yield entry
        elif (included := entry.get("include-group", "")) not in (*outer, name):  # not in a cycle
            yield from _expand_group(groups, included, (*outer, name))


_WITHOUT_BUILD = "or run the tests with what the sandbox's python3 has: environment=false"
_BOUND = re.compile(r"[\w.-]+ *[<>=!~]")  # a version bound, which also holds for packages that build the project
# sets `extra` to the project's test extra, which may be known only after a build
_INSTALL_PROJECT = f"""\
pip install --no-deps .
extra=$(python - <<'END'
from email.parser import Parser
from pathlib import Path
import sysconfig

for record in Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info"):
    origin = record / "direct_url.json"
    if origin.exists() and Path.cwd().as_uri() in origin.read_text():
        there = Parser().parsestr((record / "METADATA").read_text(encoding="utf-8")).get_all("Provides-Extra", [])
        print(next((f"[{{name}}]" for name in {GROUPS} if name in there), ""))
END
)
"""


@dataclass(frozen=True, slots=True)
class ProjectEnvironment:
    """A virtual environment for a project's tests, and the layout of its tree."""

    environment: str
    """As `Task.environment`; empty without needs."""
    imports: str
    """Folder that modules are imported from (``src``); empty for the root."""
    modules: tuple[str, ...]
    """Python files that the project installs; empty if unknown."""
    built: dict[str, bytes]
    """Files that only the build makes (``_version.py``, compiled modules), by path in the tree."""


def build_project_environment(
    files: Mapping[str, bytes], command: Sequence[str], requirements: Sequence[str], root: Path, *, build: bool
) -> ProjectEnvironment:
    """Build the environment of the project `files` (contents by path) for `command`; none without `build` or needs.

    The project is built from a copy below `root`, again when a file other than code changes. Raises as
    `build.build_environment`.
    """
    if not build or not any(needs := find_install_needs(files, command, requirements)):  # not any: all fields empty
        return ProjectEnvironment("", find_source_folder(files), (), {})
    specification = _make_specification(files, needs, root, [each for each in requirements if _BOUND.match(each)])
    try:
        environment = run_blocking(build_environment(specification))
    except (PrerequisiteError, TaskError) as error:
        message = str(error).replace(specification.workspace or "these packages", "the project")  # not the copy
        raise type(error)(message, fix=f"{error.fix}; {_WITHOUT_BUILD}") from error
    imports = environment.imports if environment.modules else find_source_folder(files)
    built = {path: content for path, _, content in read_built_files(environment.folder)}
    return ProjectEnvironment(str(specification), imports, environment.modules, built)


def find_source_folder(files: Mapping[str, bytes]) -> str:
    """``src`` if an undeclared project's modules are there, else empty.

    >>> find_source_folder({"src/a.py": b"", "tests/test_a.py": b""}), find_source_folder({"a.py": b""})
    ('src', '')
    """
    has_modules = any(path.startswith("src/") and path.endswith(".py") for path in files)
    return "src" if has_modules and "src/__init__.py" not in files else ""


def _make_specification(
    files: Mapping[str, bytes], needs: InstallNeeds, root: Path, bounds: Sequence[str]
) -> Specification:
    python = sandbox_version()
    if not (needs.project or needs.files):
        return Specification(python=python, requirements=needs.requirements)
    install = " ".join(("pip install", *(f"-r {shlex.quote(path)}" for path in needs.files)))
    if needs.project:
        install = f'{_INSTALL_PROJECT}{install} ".$extra"'
    if bounds:
        write_constraints = f"printf '%s\\n' {shlex.join(bounds)} >$PIP_CONSTRAINT"
        install = f"export PIP_CONSTRAINT=/tmp/constraints\n{write_constraints}\n{install}"
    # the copy lacks git's tags, from which setuptools-scm and hatch-vcs take the version
    version = Parser().parsestr(files.get("PKG-INFO", b"").decode("utf-8", "replace"))["Version"] or "0"
    return Specification(
        workspace=f"dir:{store_folder(root, files, _digest_build_files(files))}",
        python=python,
        requirements=needs.requirements,
        install=install,
        version=version,
    )


def _digest_build_files(files: Mapping[str, bytes]) -> str:
    """Digest of all that builds read: everything except contents of modules."""
    digests = {
        path: "" if path.endswith(".py") and path != "setup.py" else hashlib.sha256(data).hexdigest()
        for path, data in sorted(files.items())
    }
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
