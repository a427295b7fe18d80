"""Virtual environment for the tests of a Python project.

It has the test dependencies and the project's metadata; its modules are imported from the workspace.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from coderepairrl import environments
from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.sandbox.environment import built_for
from coderepairrl.tasks.base import waited_for
from coderepairrl.tasks.folders import store
from coderepairrl.tasks.needs import GROUPS, Needs, needs_of

_ANYWAY = "or run the tests with what the sandbox's python3 has: environment=false"
_BOUND = re.compile(r"[\w.-]+ *[<>=!~]")  # also holds for what builds the project
_EXTRA = f"""\
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
class Environment:
    """A virtual environment for a project's tests, and the layout of its tree."""

    specification: environments.Specification
    imports: str
    """Folder that modules are imported from (``src``); empty for the tree."""
    modules: tuple[str, ...]
    """Python files that the project installs; empty if unknown."""
    built: dict[str, bytes]
    """Files that only the build makes (``_version.py``, compiled modules), by path in the tree."""


def build(
    files: Mapping[str, bytes], command: Sequence[str], requirements: Sequence[str], root: Path
) -> Environment | None:
    """Build the environment of the project `files` (contents by path) for `command`; None without needs.

    Version bounds also apply to the build. The project is built from a copy below `root`, again when a file other than
    code changes. Raises as `environments.build`.
    """
    needs = needs_of(files, command, requirements)
    if not (needs.project or needs.requirements or needs.files):
        return None
    specification = _specified(files, needs, root, [each for each in requirements if _BOUND.match(each)])
    try:
        environment = waited_for(environments.build(specification))
    except (PrerequisiteError, TaskError) as error:
        message = str(error).replace(specification.workspace or "these packages", "the project")
        raise type(error)(message, fix=f"{error.fix}; {_ANYWAY}") from error
    built = {path: content for path, _, content in built_for(environment.folder)}
    return Environment(
        specification, environment.imports if environment.modules else source_folder(files), environment.modules, built
    )


def source_folder(files: Mapping[str, bytes]) -> str:
    """``src`` if an undeclared project's modules are there, else empty.

    >>> source_folder({"src/a.py": b"", "tests/test_a.py": b""}), source_folder({"a.py": b""})
    ('src', '')
    """
    has_modules = any(path.startswith("src/") and path.endswith(".py") for path in files)
    return "src" if has_modules and "src/__init__.py" not in files else ""


def _specified(
    files: Mapping[str, bytes], needs: Needs, root: Path, bounds: Sequence[str]
) -> environments.Specification:
    python = environments.sandbox_version()
    if not (needs.project or needs.files):
        return environments.Specification(python=python, requirements=needs.requirements)
    file_options = (f"-r {shlex.quote(path)}" for path in needs.files)
    install = " ".join(("pip install", *file_options, *(('".$extra"',) if needs.project else ())))
    install = f"{_EXTRA if needs.project else ''}{install}"
    if bounds:
        written = f"printf '%s\\n' {shlex.join(bounds)} >$PIP_CONSTRAINT"
        install = f"export PIP_CONSTRAINT=/tmp/constraints\n{written}\n{install}"
    # without tags of git, from which setuptools-scm and hatch-vcs would take it
    version = Parser().parsestr(files.get("PKG-INFO", b"").decode("utf-8", "replace"))["Version"] or "0"
    return environments.Specification(
        workspace=f"dir:{store(root, files, _digest(files))}",
        python=python,
        requirements=needs.requirements,
        install=install,
        version=version,
    )


def _digest(files: Mapping[str, bytes]) -> str:
    """Digest of what the build reads: all but the content of modules."""
    matter = {
        path: "" if path.endswith(".py") and path != "setup.py" else hashlib.sha256(data).hexdigest()
        for path, data in sorted(files.items())
    }
    return hashlib.sha256(json.dumps(matter).encode()).hexdigest()
