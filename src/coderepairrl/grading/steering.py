"""Files that decide how checks run: a patch's changes to them are not graded."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from coderepairrl.types import Checks

STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "pytest.py"),
    *("*_test.go", "go.work", "Cargo.toml", ".cargo/*", "build.rs", "package.json", ".npmrc", ".mocharc*"),
    *("jest.config.*", "vitest.config.*", "vite.config.*"),
    *("Makefile", "makefile", "GNUmakefile", "run_tests.sh", "CMakeLists.txt", "Rakefile", "go.mod"),
    *("pom.xml", ".mvn/*", "mvnw", "build.gradle", "build.gradle.kts", "settings.gradle", "settings.gradle.kts"),
    *("gradle.properties", "gradle/wrapper/*", "gradlew", "phpunit.xml", "phpunit.xml.dist", "phpunit.dist.xml"),
    *("sitecustomize.*", "sitecustomize/*", "usercustomize.*", "usercustomize/*", "*.pth", "*.egg-link", "pyvenv.cfg"),
    *("*.dist-info/*", "*.egg-info/*", "site-packages/*", "dist-packages/*", "*.pyc", ".coveragerc", "tox.toml"),
    *("node_modules/*", ".babelrc*", "babel.config.*", ".nycrc*", "ava.config.*", "karma.conf.*", "vendor/modules.txt"),
)
"""Files that steer a test runner or an interpreter, or count as tests by name. A patch's changes to them are left out
before judging, unless the task's reference changes such a file too. So are files that a command names, and new files
that Python could import instead of its own modules or a runner's (`find_stand_in`).
"""

SCRIPTS = ("*.mk", "*.mak", "*.cmake", "*.sh", "*.bash")
"""Further steering files if a command starts `make` or a shell (`_SCRIPT_STARTER`), which may read them."""
_SCRIPT_STARTER = re.compile(r"(g?make|cmake|ctest|ninja|[a-z]*sh|.*\.(ba)?sh)")
# bytes of C's one-letter escapes, with which git quotes unusual file names
_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}
_SHELL_SEPARATORS = re.compile(r"[\s;&|()<>\"'=,]+")
# Diff lines that name changed files; binary files have only the first kind
_FILE_HEADER = re.compile(
    rb"^(?:diff --git (\"?a/.*?) (\"?b/.*?)|(?:\+\+\+|---|rename to|rename from|copy to) (.*?))\r?$", re.MULTILINE
)

_RUNNERS = (
    *("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "exceptiongroup", "tomli", "pygments", "colorama"),
    *("attr", "attrs", "more_itertools", "atomicwrites", "wcwidth", "toml", "importlib_metadata", "zipp", "six"),
    *("typing_extensions", "pathlib2", "funcsigs", "xdist", "execnet", "coverage", "nose", "nose2", "tox"),
    *("setuptools", "pkg_resources", "pip", "_distutils_hack", "sitecustomize", "usercustomize"),
)
# modules of some Python versions, which runners import if they exist
_NOT_IN_EVERY_PYTHON = ("distutils", "imp", "tomllib")
MODULES = {*sys.stdlib_module_names, *_RUNNERS, *_NOT_IN_EVERY_PYTHON} - {"test"}
"""Modules that Python and its test runners import before code of a workspace, and must not find in it."""
# modules of every Python, which prefers them to folders that are not packages
_IN_EVERY_PYTHON = {
    name for name in sys.stdlib_module_names - {"nt", "msvcrt", "winreg", "winsound"} if not name.startswith("_")
}
_IMPORT_SUFFIXES = (".py", ".pyc", ".pyo", ".so", ".pyd")
# diff lines that may name files, and what separates the parts of their paths
_NAME_LINE = re.compile(rb"^(?:diff|---|\+\+\+|rename|copy) .*", re.MULTILINE)
_PATH_SEPARATORS = re.compile(rb"[/\s\"]+")


def read_touched_files(patch: bytes) -> set[str]:
    """Files named in a patch of our format."""
    return {_read_diff_path(path) for line in _FILE_HEADER.findall(patch) for path in line if path}


def can_shadow_module(patch: bytes) -> bool:
    """Whether a new file of `patch` may shadow a module (`find_stand_in`). Quick: False is certain, True is not.

    >>> [can_shadow_module(line) for line in (b"+++ b/src/json.py", b'+++ "b/\\152son.py"', b"+++ b/maths.py")]
    [True, True, False]
    """
    return any(
        b'"' in line  # a quoted name is not decoded here
        or any(part.partition(b".")[0].decode("latin-1") in MODULES for part in _PATH_SEPARATORS.split(line)[1:])
        for line in _NAME_LINE.findall(patch)
    )


def find_shadowed_module(path: str) -> str:
    """First name in `path` that is in `MODULES`, if the file is importable; else "".

    >>> [find_shadowed_module(path) for path in ("src/json/decoder.py", "unittest", "json/a.txt", "_ssl.abi3.so")]
    ['json', 'unittest', '', '_ssl']
    """
    *folders, name = path.split("/")
    if not name.endswith(_IMPORT_SUFFIXES):  # it may be a link to a package
        return name if name in MODULES else ""
    return next((part for part in (*folders, name.partition(".")[0]) if part in MODULES), "")


def list_new_packages(paths: Iterable[str]) -> set[str]:
    """Folders with an ``__init__`` file in `paths`.

    >>> sorted(list_new_packages(["a/__init__.py", "a/b/__init__.abi3.so", "a/c/d.py"]))
    ['a', 'a/b']
    """
    parts = (path.rpartition("/") for path in paths)
    return {folder for folder, _, name in parts if name.startswith("__init__.") and name.endswith(_IMPORT_SUFFIXES)}


def find_stand_in(path: str, new_packages: Collection[str], *, links: bool = True) -> str:
    """File or folder that `path` would make importable as one of `MODULES`, or "".

    `new_packages` are those of the patch: a folder that is no package stands in only for a module that some Pythons
    lack. `links`: names without an extension may be links.

    >>> find_stand_in("a/json/b.py", ["a/json"])
    'a/json'
    >>> [find_stand_in(path, []) for path in ("a/json/b.py", "a/cmd.py")]
    ['', 'a/cmd.py']
    """
    folder, _, name = path.rpartition("/")
    if not name.endswith(_IMPORT_SUFFIXES):
        return path if links and name in MODULES else ""
    folder_names = folder.split("/")
    for end, folder_name in enumerate(folder_names, 1):
        parent = "/".join(folder_names[:end])
        if folder_name in MODULES and (parent in new_packages or folder_name not in _IN_EVERY_PYTHON):
            return parent
    return path if name.partition(".")[0] in MODULES else ""


def escape_pattern(path: str) -> str:
    r"""Escape `path` as a literal git pattern.

    >>> print(escape_pattern("a[1]*"))
    a\[1]\*
    """
    return re.sub(r"([\\*?\[])", r"\\\1", path)


def list_excluded_patterns(reference: bytes, checks: Checks = Checks(), workdir: str = "") -> tuple[str, ...]:  # noqa: B008 - frozen
    """Patterns (`git apply --exclude`) of files that a patch may not change.

    They are `STEERING`, `SCRIPTS` if a command starts scripts, and files that a command names, without those that match
    files of the reference.
    """
    reference_files = read_touched_files(reference)
    words = (posixpath.basename(word) for command in checks.commands for word in command.argv)
    steering = (*STEERING, *SCRIPTS) if any(map(_SCRIPT_STARTER.fullmatch, words)) else STEERING
    patterns = [  # the slashes let a pattern match in any folder, the top one included
        pattern for pattern in steering if not any(fnmatchcase(f"/{path}", f"*/{pattern}") for path in reference_files)
    ]
    files = [escape_pattern(path) for path in find_named_files(checks, workdir) if path not in reference_files]
    return (*patterns, *(f"*/{pattern}" for pattern in patterns), *files)


def _read_diff_path(name: bytes) -> str:
    r"""Path in a diff without ``a/`` or ``b/`` and git's quotes.

    >>> _read_diff_path(rb'"b/\303\244.sh"'), _read_diff_path(b"a/run.sh")
    ('ä.sh', 'run.sh')
    """
    path = unquote_path(name[1:-1]) if name[:1] == b'"' == name[-1:] else name
    return path.removeprefix(b"a/").removeprefix(b"b/").decode("utf-8", "replace")


def unquote_path(name: bytes) -> bytes:
    """Decode git's quoted file name (C escapes)."""

    def decode_escape(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF if code[0] in b"01234567" else _ESCAPES.get(code, code[0])])

    return re.sub(rb"\\([0-7]{1,3}|.)", decode_escape, name, flags=re.DOTALL)


def find_named_files(checks: Checks, workdir: str = "") -> list[str]:
    """Workspace paths that the commands' words, or parts of their shell lines, may name.

    >>> from coderepairrl.types import Command
    >>> checks = Checks((Command(("sh", "-c", "cd . && ./run.sh a/test_b.py::test_c", "/w/d/../e")),))
    >>> find_named_files(checks, "/w")[-3:]
    ['run.sh', 'a/test_b.py', 'e']
    """
    paths: dict[str, None] = {}
    for command in checks.commands:
        for word in command.argv:
            for part in (word, *_SHELL_SEPARATORS.split(word)):
                path = posixpath.normpath(part.partition("::")[0] or ".")
                if workdir and path.startswith(f"{workdir}/"):
                    path = path[len(workdir) + 1 :]
                if path != "." and "\0" not in path and not path.startswith(("/", "../", "-")):
                    paths[path] = None
    return list(paths)
