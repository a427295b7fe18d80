"""`bugsinpy`: 501 bugs of 17 Python projects (``soarsmu/BugsInPy``; the paper counts 493).

The rules are those of ``bugsinpy-compile`` and ``bugsinpy-test``. Requirements are frozen lists of 2020, some made on
Windows or Debian: the framework gives them to pip one after another and goes on where one cannot be had. Lines that are
the project itself are left out: the workspace is on Python's path, and bugs with the same list share an environment. It
is installed from the bug's own commit where ``setup.sh`` builds it, or its build writes a module (setuptools_scm).
``setup.sh`` installs further packages. The tests are the lines of ``run_test.sh``, on the tests of the repaired commit.
What was on the framework's machine alone, pytest and what tox installs, the project declares.
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

from coderepairrl.environments import Specification
from coderepairrl.grading import results_of
from coderepairrl.sandbox.commits import commit_folder
from coderepairrl.tasks.benchmark import Repositories, patch_bytes
from coderepairrl.tasks.commits import History
from coderepairrl.tasks.needs import needs_of
from coderepairrl.tasks.patches import is_test
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

NATIVE = frozenset((resources.files(__package__) / "bugsinpy_native.txt").read_text().split())
"""Bugs whose tests fail in a native environment, and pass with the reference."""
BEFORE = "2020-11-09"
"""Packages without a version are those of the week in which BugsInPy was presented (ESEC/FSE 2020)."""
TIMEOUT = 600.0
"""Seconds for each line of ``run_test.sh``; the framework has no limit."""
_INSTALLS = re.compile(r"(python3? -m ?)?pip3? install (?P<what>.+)")
_BUILDS = re.compile(r"python3? setup\.py (install|develop|build)\b.*")
"""What the build of an environment does anyway."""
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_SHELL_WORD = re.compile(r"if|then|elif|else|fi|for|while|until|do|done|case|esac|function|select|[{}!]")
_NOT_PLAIN = re.compile(r"^-|^[\w,!-]+:|^$")
"""Requirement files of tox, which are looked for anyway, and what it installs in some environments only."""
_BUILDING = ("setup.py", "pyproject.toml", "setup.cfg")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class BugsInPy(Repositories):
    """BugsInPy: the commit before the repair, without the tests that come with it.

    `path` is a checkout, or a file of rows (``repo``, ``base_commit``, ``patch``, ``run_test``). There are no issue
    texts; a prompt has the command of the failing tests. `clone` is that of `benchmark.Repositories`; commits of pandas
    are published with 7 digits, which cannot be fetched, and keras-12 has no patch. `project` are the benchmark's names
    of some projects, between commas; all if not given.

    With `workspace` ``native`` a task has an environment that is built on this machine and the bug's own tests, which
    come from the repaired commit; of those bugs where that reproduces the benchmark (`NATIVE`; with `all_native` of
    every one whose project compiles nothing). They are read when the tasks are, and fetched the first time.
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
        super().__init__(path, split=split, workspace="git", clone=clone)
        self.native, self.all_native = workspace == "native", all_native
        self.projects = frozenset(project.split(",") if isinstance(project, str) else project) - {""}

    def task(self, row: Row) -> Task:
        """The task of a row."""
        commands = "\n".join(row.names("run_test"))
        if not commands.strip():
            raise row.wrong("column 'run_test' names no test")
        repository = row.text("repo")
        made = Task(
            id=row.text("instance_id"),
            prompt=f"A bug in {repository.partition('/')[2]} makes this fail, with tests that are not in the "
            f"repository yet:\n\n{commands}\n",
            language="python",
            workspace=self.place(row, repository),
            reference=patch_bytes(row.text("patch")),
            split=self.split,
            licence=row.maybe("license_upstream"),
            repository=repository,
        )
        if not self.native:
            return made
        url = self.clone.format(repository=repository)
        return replace(made, environment=_environment(row, url), checks=_checks(row, url))

    def _read(self) -> list[Row]:
        projects = self.path / "projects" if self.path is not None else None
        rows = list(_checkout(projects)) if projects is not None and projects.is_dir() else super()._read()
        return [row for row in rows if self._taken(row)]

    def _taken(self, row: Row) -> bool:
        id_ = row.text("instance_id")
        if self.projects and id_.removeprefix("bugsinpy__").rpartition("-")[0] not in self.projects:
            return False
        return not self.native or (_specified(row) if self.all_native else id_ in NATIVE)


def _checkout(projects: Path) -> Iterator[Row]:
    for info in sorted(projects.glob("*/project.info")):
        repository = re.sub(r"^.*github\.com/|(\.git)?/?$", "", _settings(info)["github_url"])
        bugs = sorted((path for path in info.parent.glob("bugs/*/bug.info")), key=lambda path: int(path.parent.name))
        for bug in bugs:
            yield Row("bugsinpy", f"{info.parent.name}-{bug.parent.name}", _values(bug.parent, repository))


def _values(folder: Path, repository: str) -> dict[str, Any]:
    known = _settings(folder / "bug.info")
    return {
        "instance_id": f"bugsinpy__{folder.parent.parent.name}-{folder.name}",
        "repo": repository,
        "base_commit": known["buggy_commit_id"],
        "fixed_commit": known["fixed_commit_id"],
        "python_version": known.get("python_version", ""),
        "test_files": known.get("test_file", "").split(";"),
        "run_test": [line.strip() for line in _text(folder / "run_test.sh").split("\n") if line.strip()],
        "setup_sh": _text(folder / "setup.sh"),
        "requirements": _text(folder / "requirements.txt").split("\n"),
        "patch": _text(folder / "bug_patch.txt"),
    }


def _settings(path: Path) -> dict[str, str]:
    return {key: value.strip() for key, value in re.findall(r'^\s*(\w+)\s*=\s*"([^"]*)"', _text(path), re.MULTILINE)}


def _text(path: Path) -> str:
    data = path.read_bytes() if path.is_file() else b""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # lists that PowerShell wrote
        data = data.decode("utf-16").encode()
    return data.decode("utf-8", "surrogateescape")


def _specified(row: Row) -> bool:
    """Whether `environment` can build what the bug's tests need: not where ``setup.sh`` compiles extensions in place,
    or has files of requirements or extras."""
    return not any("build_ext" in line or "install -" in line for line in _lines(row.maybe("setup_sh")))


def _environment(row: Row, url: str) -> str:
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


def _checks(row: Row, url: str) -> Checks:
    """The bug's tests: each line of ``run_test.sh`` after those of ``setup.sh`` that change files.

    `Checks.restore` has the tests of the repaired commit, which is fetched where the cache does not have it.
    Raises `TaskError` and `SandboxFault`.
    """
    before = [_one_command(line, row) for line in _lines(row.maybe("setup_sh")) if not _known(line)]
    first = ("sh", "-c", "".join(before) + 'exec "$@"', "sh") if before else ()
    commands = [Command((*first, *argv), TIMEOUT, results_of(argv)) for argv in _commands(row)]
    return Checks(tuple(commands), _restored(row, url))


def _one_command(line: str, row: Row) -> str:
    """A line of ``setup.sh`` as the beginning of a shell's command line, whose pipes and redirections are its own.

    Raises `TaskError` for one that is a part of a longer command.
    """
    try:
        first = (shlex.split(line) or [""])[0]
    except ValueError:  # an open quote, or a backslash at its end
        first = ""
    if not first or _SHELL_WORD.fullmatch(first) or "<<" in line:
        raise row.wrong(f"setup.sh has {line!r}, which is no command by itself")
    return f"{{ {line}\n}} </dev/null && " if re.search("[|<>&]", line) else f"{line} </dev/null && "


def _lines(script: str) -> list[str]:
    """The commands of a script, without comments."""
    return [line.strip() for line in re.split(r"[\n;]", _COMMENT.sub("", script)) if line.strip()]


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
        history = History(Path(url), folder)
        blobs = history.files(commit)
        read = history.read({name: blobs[name] for name in ("pyproject.toml", "setup.cfg", "tox.ini") if name in blobs})
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
        history = History(Path(url), folder)
        blobs = history.files(commit)
        read = history.read({name: blobs[name] for name in _BUILDING if name in blobs})
    return any(b"write_to" in content for content in read.values())


def _restored(row: Row, url: str) -> dict[str, str]:
    """The bug's test files, and what else lies among the tests that the repaired commit has and the other one has not:
    data of the tests. Bytes that are no UTF-8 are surrogate escapes."""
    base, fixed = row.text("base_commit"), row.text("fixed_commit")
    named = [name.strip() for name in row.names("test_files") if name.strip()]
    with commit_folder(url, base) as folder:
        before = History(Path(url), folder).files(base)
    with commit_folder(url, fixed) as folder:
        history = History(Path(url), folder)
        blobs = history.files(fixed)
        if lacking := next((name for name in named if name not in blobs), None):
            raise row.wrong(f"its repaired commit has no {lacking}")
        changed = [name for name, blob in blobs.items() if before.get(name) != blob and is_test(name)]
        found = history.read({name: blobs[name] for name in (*named, *changed)})
    return {name: data.decode("utf-8", "surrogateescape") for name, data in found.items()}
