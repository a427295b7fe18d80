"""Bugs of BugsInPy without its scripts: environments that this machine builds, and the tests that each bug names.

The rules are those of ``bugsinpy-compile`` and ``bugsinpy-test``. Requirements are frozen lists of 2020, some made on
Windows or Debian: the framework gives them to pip one after another and goes on where one cannot be had. Lines that are
the project itself are left out: the workspace is on Python's path, and bugs with the same list share an environment. It
is installed from the bug's own commit where ``setup.sh`` builds it, or its build writes a module (setuptools_scm).
``setup.sh`` installs further packages. The tests are the lines of ``run_test.sh``, on the tests of the repaired commit.
What was on the framework's machine alone, pytest and what tox installs, the project declares.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from pathlib import Path

from coderepairrl.environments import Specification
from coderepairrl.grading import results_of
from coderepairrl.processes.hostgit import git
from coderepairrl.sandbox.commits import commit_folder
from coderepairrl.tasks.needs import needs_of
from coderepairrl.tasks.patches import is_test
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command

BEFORE = "2020-11-09"
"""Packages without a version are those of the week in which BugsInPy was presented (ESEC/FSE 2020)."""
TIMEOUT = 600.0
"""Seconds for each line of ``run_test.sh``; the framework has no limit."""
_INSTALLS = re.compile(r"(python3? -m ?)?pip3? install (?P<what>.+)")
_BUILDS = re.compile(r"python3? setup\.py (install|develop|build)\b.*")
"""What the build of an environment does anyway."""
_NOT_PLAIN = re.compile(r"^-|^[\w,!-]+:|^$")
"""Requirement files of tox, which are looked for anyway, and what it installs in some environments only."""
_BUILDING = ("setup.py", "pyproject.toml", "setup.cfg")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def specified(row: Row) -> bool:
    """Whether `environment` can build what the bug's tests need: not where ``setup.sh`` compiles extensions in place,
    or has files of requirements or extras."""
    return not any("build_ext" in line or "install -" in line for line in _lines(row.maybe("setup_sh")))


def environment(row: Row, url: str) -> str:
    """`Task.environment` of the bug in `row`, whose repository is at `url`. Raises `TaskError` and `SandboxFault`."""
    version = re.match(r"\d+\.\d+", row.text("python_version"))
    if version is None:
        raise row.wrong(f"column 'python_version' is no version: {row.text('python_version')!r}")
    listed = [line.strip() for line in row.names("requirements")]
    listed = [line for line in listed if line and not line.startswith("#")]
    frozen = [line for line in listed if not _own(line, row)]
    requirements = [name for name in _installed(row) if not _own(name, row)]
    files: tuple[str, ...] = ()
    pytest = any(results_of(argv) == "pytest" for argv in _commands(row))
    if pytest and "pytest" not in map(_package, (*frozen, *requirements)):
        declared, files = _declared(row, url)
        requirements += declared
    project = any(map(_BUILDS.fullmatch, _lines(row.maybe("setup_sh")))) or _writes(row, url)
    return str(
        Specification(
            workspace=f"git:{url}@{row.text('base_commit')}" if project or files else "",
            python=version[0],
            frozen=tuple(frozen),
            requirements=tuple(requirements),
            files=files,
            before=BEFORE,
            version="0.0.dev0",
        )
    )


def checks(row: Row, url: str) -> Checks:
    """The bug's tests: lines of ``setup.sh`` that change files, then those of ``run_test.sh``.

    `Checks.restore` has the tests of the repaired commit, which is fetched where the cache does not have it.
    Raises `TaskError` and `SandboxFault`.
    """
    prepared = [shlex.split(line) for line in _lines(row.maybe("setup_sh")) if not _known(line)]
    commands = [Command(tuple(argv), TIMEOUT, results_of(argv)) for argv in (*prepared, *_commands(row))]
    return Checks(tuple(commands), _restored(row, url))


def _lines(script: str) -> list[str]:
    return [line.strip() for line in re.split(r"[\n;]", script) if line.strip()]


def _known(line: str) -> bool:
    return bool(_INSTALLS.fullmatch(line) or _BUILDS.fullmatch(line))


def _installed(row: Row) -> Iterator[str]:
    """Packages that ``setup.sh`` installs, but for names of the standard library (``unittest``)."""
    for line in _lines(row.maybe("setup_sh")):
        if found := _INSTALLS.fullmatch(line):
            yield from (name for name in found["what"].split() if name not in sys.stdlib_module_names)


def _own(line: str, row: Row) -> bool:
    """Whether a requirement is the project itself."""
    repository = row.text("repo").lower()
    name = repository.rpartition("/")[2]
    return f"/{repository}" in line.lower().replace(".git@", "@") or _package(line) == name.replace("_", "-")


def _package(requirement: str) -> str:
    found = _NAME.match(requirement)
    return found[0].lower().replace("_", "-") if found else ""


def _commands(row: Row) -> list[list[str]]:
    """The test commands. tox would make an environment of its own, in which it runs pytest."""
    split = [shlex.split(line) for line in row.names("run_test") if line.strip()]
    return [["pytest", *argv[1:]] if argv[0] == "tox" else argv for argv in split]


def _declared(row: Row, url: str) -> tuple[list[str], tuple[str, ...]]:
    """What the project says that its tests need, for pytest: requirements, those of ``tox.ini`` among them, and files
    of them."""
    commit = row.text("base_commit")
    with commit_folder(url, commit) as folder:
        blobs = _blobs(folder, commit)
        read = {
            name: _content(folder, blobs[name]) for name in ("pyproject.toml", "setup.cfg", "tox.ini") if name in blobs
        }
    needs = needs_of(dict.fromkeys(blobs, b"") | read, ("pytest",), ())
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(read.get("tox.ini", b"").decode("utf-8", "replace"))
    except ConfigParserError as error:
        raise row.wrong(f"tox.ini of its repository cannot be read: {error}") from error
    tox = [line for line in _lines(parser.get("testenv", "deps", fallback="")) if not _NOT_PLAIN.search(line)]
    return list(dict.fromkeys([*needs.requirements, *tox])), needs.files


def _writes(row: Row, url: str) -> bool:
    """Whether the project's build writes the module with its version, which the project imports."""
    commit = row.text("base_commit")
    with commit_folder(url, commit) as folder:
        blobs = _blobs(folder, commit)
        return any(b"write_to" in _content(folder, blobs[name]) for name in _BUILDING if name in blobs)


def _restored(row: Row, url: str) -> dict[str, str]:
    """The bug's test files, and what else lies among the tests that the repaired commit has and the other one has not:
    data of the tests. Bytes that are no UTF-8 are surrogate escapes."""
    base, fixed = row.text("base_commit"), row.text("fixed_commit")
    named = [name.strip() for name in row.names("test_files") if name.strip()]
    with commit_folder(url, base) as folder:
        before = _blobs(folder, base)
    with commit_folder(url, fixed) as folder:
        blobs = _blobs(folder, fixed)
        if lacking := next((name for name in named if name not in blobs), None):
            raise row.wrong(f"its repaired commit has no {lacking}")
        changed = [name for name, blob in blobs.items() if before.get(name) != blob and is_test(name)]
        found = {name: _content(folder, blobs[name]) for name in (*named, *changed)}
    return {name: data.decode("utf-8", "surrogateescape") for name, data in found.items()}


def _blobs(folder: Path, commit: str) -> dict[str, str]:
    """The ids of the plain files of `commit`, by path."""
    rows = git("ls-tree", "-r", "-z", "--full-tree", commit, folder=folder).split(b"\0")
    split = (row.partition(b"\t") for row in rows if row.startswith(b"100"))
    return {os.fsdecode(path): about.split()[2].decode() for about, _, path in split}


def _content(folder: Path, blob: str) -> bytes:
    return git("cat-file", "blob", blob, folder=folder)
