"""`bugsinpy`: 501 bugs of 17 Python projects (``soarsmu/BugsInPy``; the paper counts 493).

Follows ``bugsinpy-compile`` and ``bugsinpy-test``: requirements are frozen lists of 2020, given to pip one by one, and
failures are skipped. Unless built, the project is imported from the workspace, so bugs with equal lists share an
environment.
"""

from __future__ import annotations

import codecs
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from coderepairrl.environments.build import Specification
from coderepairrl.grading.witness import detect_runner
from coderepairrl.sandbox.commits import fetch_commits
from coderepairrl.tasks.benchmark import RepositoryBenchmark, encode_patch
from coderepairrl.tasks.commits import RepositoryHistory
from coderepairrl.tasks.patches import is_test_path
from coderepairrl.tasks.project_environment import find_install_needs
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

NATIVE = frozenset((resources.files(__package__) / "bugsinpy_native.txt").read_text().split())
"""Bugs whose tests fail in a native environment, and pass with the reference."""
BEFORE = "2020-11-09"
"""Latest upload of unpinned packages: the week of BugsInPy's presentation (ESEC/FSE 2020)."""
TIMEOUT = 600.0
"""Seconds per line of ``run_test.sh``; the framework has no limit."""
_INSTALLS = re.compile(r"(python3? -m ?)?pip3? install (?P<packages>.+)")
_BUILDS = re.compile(r"python3? setup\.py (install|develop|build)\b.*")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)  # not the # within a word
_SHELL_WORD = re.compile(r"if|then|elif|else|fi|for|while|until|do|done|case|esac|function|select|[{}!]")
# lines of tox.ini with requirement files (found anyway), or for some environments only
_NO_REQUIREMENT = re.compile(r"^-|^[\w,!-]+:|^$")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class BugsInPy(RepositoryBenchmark):
    """BugsInPy: the commit before the repair, without its tests (options: docs/guides/benchmarks.md).

    `path` is a checkout, or a file of rows. Pandas' commits are published with 7 digits and cannot be fetched; keras-12
    has no patch.
    """

    name = "bugsinpy"

    def __init__(
        self,
        path: str = "",
        *,
        clone: str = "",
        split: str = "test",
        workspace: Literal["git", "native"] = "git",
        all_native: bool = False,
        project: str | Sequence[str] = (),
    ) -> None:
        super().__init__(path, split=split, workspace=workspace, clone=clone)
        self.all_native = all_native
        self.projects = frozenset(project.split(",") if isinstance(project, str) else project) - {""}

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        commands = "\n".join(row.names("run_test"))
        if not commands.strip():
            raise row.make_error("column 'run_test' names no test")
        repository = row.text("repo")
        task = Task(
            id=row.text("instance_id"),
            prompt=f"A bug in {repository.partition('/')[2]} makes this fail, with tests that are not in the "
            f"repository yet:\n\n{commands}\n",
            language="python",
            workspace=self.make_workspace(row, repository),
            reference=encode_patch(row.text("patch")),
            split=self.split,
            licence=row.text_or_empty("license_upstream"),
            repository=repository,
        )
        if not self.native:
            return task
        url = self.clone.format(repository=repository)
        return replace(task, environment=_specify_bug_environment(row, url), checks=_make_bug_checks(row, url))

    def _read_rows(self) -> list[Row]:
        return [row for row in self._read_checkout("projects", _read_bugsinpy_rows) if self._is_selected(row)]

    def _is_selected(self, row: Row) -> bool:
        name = row.text("instance_id")
        if self.projects and name.removeprefix("bugsinpy__").rpartition("-")[0] not in self.projects:
            return False
        return not self.native or (_can_be_native(row) if self.all_native else name in NATIVE)


def _read_bugsinpy_rows(root: Path) -> Iterator[Row]:
    for info in sorted(root.glob("projects/*/project.info")):
        repository = re.sub(r"^.*github\.com/|(\.git)?/?$", "", _read_bug_settings(info)["github_url"])
        for bug in sorted(info.parent.glob("bugs/*/bug.info"), key=lambda path: int(path.parent.name)):
            yield Row("bugsinpy", f"{info.parent.name}-{bug.parent.name}", _read_bug_values(bug.parent, repository))


def _read_bug_values(folder: Path, repository: str) -> dict[str, Any]:
    info = _read_bug_settings(folder / "bug.info")
    return {
        "instance_id": f"bugsinpy__{folder.parent.parent.name}-{folder.name}",
        "repo": repository,
        "base_commit": info["buggy_commit_id"],
        "fixed_commit": info["fixed_commit_id"],
        "python_version": info.get("python_version", ""),
        "test_files": info.get("test_file", "").split(";"),
        "run_test": [line.strip() for line in _read_bug_file(folder / "run_test.sh").split("\n") if line.strip()],
        "setup_sh": _read_bug_file(folder / "setup.sh"),
        "requirements": _read_bug_file(folder / "requirements.txt").split("\n"),
        "patch": _read_bug_file(folder / "bug_patch.txt"),
    }


def _read_bug_settings(path: Path) -> dict[str, str]:
    return {
        key: value.strip()
        for key, value in re.findall(r'^\s*(\w+)\s*=\s*"([^"]*)"', _read_bug_file(path), re.MULTILINE)
    }


def _read_bug_file(path: Path) -> str:
    data = path.read_bytes() if path.is_file() else b""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # lists that PowerShell wrote
        data = data.decode("utf-16").encode()
    return data.decode("utf-8", "surrogateescape")


def _can_be_native(row: Row) -> bool:
    """Whether ``setup.sh`` compiles nothing in place."""
    return not any("build_ext" in line or "install -" in line for line in _split_script(row.text_or_empty("setup_sh")))


def _specify_bug_environment(row: Row, url: str) -> str:
    """`Task.environment` of a bug. Raises `TaskError` and `SandboxFault`."""
    version = re.match(r"\d+\.\d+", row.text("python_version"))
    if version is None:
        raise row.make_error(f"column 'python_version' is not a version: {row.text('python_version')!r}")
    lines = [line.strip() for line in row.names("requirements")]
    frozen = [line for line in lines if line and not line.startswith("#") and not _is_project_itself(line, row)]
    setup = _split_script(row.text_or_empty("setup_sh"))
    installs = " ".join(match["packages"] for match in map(_INSTALLS.fullmatch, setup) if match).split()
    requirements = [
        name for name in installs if name not in sys.stdlib_module_names and not _is_project_itself(name, row)
    ]
    files: tuple[str, ...] = ()
    needs_pytest = any(detect_runner(argv) == "pytest" for argv in _list_test_commands(row))
    if needs_pytest and "pytest" not in map(_parse_package_name, (*frozen, *requirements)):
        declared, files = _read_declared_requirements(row, url)
        requirements += declared
    is_built = any(map(_BUILDS.fullmatch, setup))
    if not is_built:  # setuptools-scm's `write_to` makes a version file only in a build
        _, contents = _read_at_base(row, url, ("setup.py", "pyproject.toml", "setup.cfg"))
        is_built = any(b"write_to" in content for content in contents.values())
    return str(
        Specification(
            workspace=f"git:{url}@{row.text('base_commit')}" if is_built or files else "",
            python=version[0],
            frozen=tuple(frozen),
            requirements=tuple(requirements),
            files=files,
            before=BEFORE,
            version="0.0.dev0",
        )
    )


def _make_bug_checks(row: Row, url: str) -> Checks:
    """Lines of ``run_test.sh``, after those of ``setup.sh`` that change files, with the repaired commit's tests.

    Raises `TaskError` and `SandboxFault`.
    """
    setup = [
        _format_setup_command(line, row)
        for line in _split_script(row.text_or_empty("setup_sh"))
        if not _INSTALLS.fullmatch(line) and not _BUILDS.fullmatch(line)
    ]
    prefix = ("sh", "-c", "".join(setup) + 'exec "$@"', "sh") if setup else ()
    commands = [Command((*prefix, *argv), TIMEOUT, detect_runner(argv)) for argv in _list_test_commands(row)]
    return Checks(tuple(commands), _read_restored_files(row, url))


def _format_setup_command(line: str, row: Row) -> str:
    """Make ``LINE </dev/null &&``. Raises `TaskError` for compound commands."""
    try:
        first = (shlex.split(line) or [""])[0]
    except ValueError:  # an open quote, or a final backslash
        first = ""
    if not first or _SHELL_WORD.fullmatch(first) or "<<" in line:
        raise row.make_error(f"setup.sh has {line!r}, which is not a command by itself")
    return f"{{ {line}\n}} </dev/null && " if re.search("[|<>&]", line) else f"{line} </dev/null && "


def _split_script(script: str) -> list[str]:
    return [line.strip() for line in re.split(r"[\n;]", _COMMENT.sub("", script)) if line.strip()]


def _is_project_itself(line: str, row: Row) -> bool:
    repository = row.text("repo").lower()
    name = repository.rpartition("/")[2]
    return f"/{repository}" in line.lower().replace(".git@", "@") or _parse_package_name(line) == name.replace("_", "-")


def _parse_package_name(requirement: str) -> str:
    match = _NAME.match(requirement)
    return match[0].lower().replace("_", "-") if match else ""


def _list_test_commands(row: Row) -> list[list[str]]:
    """Test commands, with pytest instead of tox, which would make another environment."""
    split = [shlex.split(line) for line in row.names("run_test") if line.strip()]
    return [["pytest", *argv[1:]] if argv[0] == "tox" else argv for argv in split]


def _read_declared_requirements(row: Row, url: str) -> tuple[list[str], tuple[str, ...]]:
    """Declared requirements and requirement files for pytest."""
    names, contents = _read_at_base(row, url, ("pyproject.toml", "setup.cfg", "tox.ini"))
    needs = find_install_needs(dict.fromkeys(names, b"") | contents, ("pytest",), ())
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(contents.get("tox.ini", b"").decode("utf-8", "replace"))
    except ConfigParserError as error:
        raise row.make_error(f"tox.ini of its repository cannot be read: {error}") from error
    tox = [
        line for line in _split_script(parser.get("testenv", "deps", fallback="")) if not _NO_REQUIREMENT.search(line)
    ]
    return list(dict.fromkeys([*needs.requirements, *tox])), needs.files


def _read_at_base(row: Row, url: str, names: Sequence[str]) -> tuple[list[str], dict[str, bytes]]:
    """All file names of the bug's commit, and contents of `names`."""
    commit = row.text("base_commit")
    history = RepositoryHistory(Path(url), fetch_commits(url, [commit]))
    blobs = history.list_blobs(commit)
    return list(blobs), history.read_blobs({name: blobs[name] for name in names if name in blobs})


def _read_restored_files(row: Row, url: str) -> dict[str, str]:
    """The bug's test files, and changed test data of the repaired commit."""
    base, fixed = row.text("base_commit"), row.text("fixed_commit")
    test_files = [name.strip() for name in row.names("test_files") if name.strip()]
    history = RepositoryHistory(Path(url), fetch_commits(url, [base, fixed]))
    before, blobs = history.list_blobs(base), history.list_blobs(fixed)
    if missing := next((name for name in test_files if name not in blobs), None):
        raise row.make_error(f"its repaired commit has no {missing}")
    changed = [name for name, blob in blobs.items() if before.get(name) != blob and is_test_path(name)]
    contents = history.read_blobs({name: blobs[name] for name in (*test_files, *changed)})
    return {name: data.decode("utf-8", "surrogateescape") for name, data in contents.items()}
