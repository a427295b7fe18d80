"""`swe_gym`: SWE-Gym (arXiv 2412.21139), issues of 11 Python repositories for training.

Follows ``SWE-Gym/SWE-Bench-Fork`` (MIT licence, commit 242429c): ``test_spec.py``, and
``swebench/harness/constants.py``, which is not on PyPI. Never tested with the hub.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from coderepairrl.environments.build import CondaFile, Specification
from coderepairrl.errors import ConfigError
from coderepairrl.tasks.benchmark import RepositoryBenchmark
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.sources.swe_bench_native import BEFORE, TIMEOUT, read_specifications
from coderepairrl.types import Checks, Command, Task

_HUB = {"full": "SWE-Gym/SWE-Gym", "lite": "SWE-Gym/SWE-Gym-Lite"}
COMMIT = "242429c188fcfd06aad13fce9a54d450470bf0ac"
_FIX = f"specifications=FILE: swebench/harness/constants.py of github.com/SWE-Gym/SWE-Bench-Fork at {COMMIT[:7]}"
_PARSER = "parse_log_pytest"
"""The fork's parser of all repositories except pydantic."""
_REPOSITORIES_WITH_OTHER_PARSER = ("pydantic/pydantic",)
_UNSUPPORTED = re.compile(r"\b(npm|conda|pdm|pip install -ve)\b")
"""Commands that need more than Python packages, or leave a compiled project in its folder."""
_SYSTEM = re.compile(r"\bapt(-get)? ")  # such commands are left out: they need root
_DATA_ENDINGS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_END = "EOF_114329324912"


class SweGym(RepositoryBenchmark):
    """SWE-Gym: `name` is ``full`` (2,438 issues) or ``lite`` (230).

    `workspace` ``native`` adds environments built on this machine from the file `specifications`, for instances that
    need only packages. Other options: `swe_bench.SweBench`.
    """

    name = "swe_gym"

    def __init__(
        self,
        name: Literal["full", "lite"] = "full",
        *,
        path: str = "",
        split: str = "train",
        revision: str = "",
        workspace: Literal["git", "image", "native"] = "git",
        specifications: str = "",
        clone: str = "",
    ) -> None:
        super().__init__(path, hub=_HUB[name], split=split, revision=revision, workspace=workspace, clone=clone)
        if self.native and not specifications:
            raise ConfigError("workspace=native needs SWE-Gym's specifications, which are not shipped", fix=_FIX)
        self.specifications = Path(specifications).expanduser().resolve()

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        task = super().make_task(row)
        if not self.native:
            return task
        spec, conda = self._find_specification(row)
        specification = Specification(
            workspace=f"git:{self.clone.format(repository=row.text('repo'))}@{row.text('base_commit')}",
            python=spec.get("python", ""),
            conda=CondaFile(paths=conda, edits=spec.get("env_patches", ())) if conda else None,
            requirements=spec.get("pip_packages", ()),
            install=_join_install_commands(spec),
            before=BEFORE,
            version=f"{row.text('version')}.0",
        )
        query = urlencode({"instance_id": row.text("instance_id"), "version": row.text("version")})
        command = Command(("bash", "-c", _make_script(row, spec)), TIMEOUT, f"swebench:{_PARSER}?{query}")
        return replace(task, environment=str(specification), checks=Checks((command,), {}, *row.tests()))

    def _read_rows(self) -> list[Row]:
        rows = super()._read_rows()
        return [row for row in rows if self._can_build(row)] if self.native else rows

    def _find_specification(self, row: Row) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A row's specification, or empty, and paths of its conda file."""
        published, repository = _read_specifications(self.specifications), row.text("repo").lower()
        spec = published["specifications"].get(repository, {}).get(row.text("version"), {})
        has_conda_file = spec.get("packages") == "environment.yml"
        return spec, tuple(published["environments"].get(repository, ())) if has_conda_file else ()

    def _can_build(self, row: Row) -> bool:
        """Whether packages suffice, and the fork's pytest parser reads the log."""
        spec, conda = self._find_specification(row)
        if not spec or row.text("repo").lower() in _REPOSITORIES_WITH_OTHER_PARSER:
            return False
        has_packages = spec.get("packages") != "environment.yml" or bool(conda)
        return has_packages and not _UNSUPPORTED.search(_join_install_commands(spec))

    def format_image_name(self, row: Row) -> str:
        """The fork's published image."""
        if "image" in row:
            return row.text("image")
        return f"xingyaoww/sweb.eval.x86_64.{row.text('instance_id').lower().replace('__', '_s_')}"


@cache
def _read_specifications(file: Path) -> dict[str, Any]:
    """Specifications in `file`, and paths of conda ``environments``. Raises `ConfigError`."""
    try:
        return read_specifications(Path(sys.executable), file)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"no specifications of environments can be read from {file}: {error}", fix=_FIX) from error


def _join_install_commands(spec: dict[str, Any]) -> str:
    steps = (*spec.get("pre_install", ()), spec["install"])
    return "\n".join(step for step in steps if not _SYSTEM.search(step))


def _make_script(row: Row, spec: dict[str, Any]) -> str:
    patch = row.text("test_patch")
    reset = f"git checkout HEAD {' '.join(re.findall(r'--- a/(.*)', patch))}"
    return "\n".join(
        (
            "#!/bin/bash",
            "set -uxo pipefail",
            *spec.get("eval_commands", ()),
            reset,
            f"git apply -v - <<'{_END}'\n{patch}\n{_END}",
            ": '>>>>> Start Test Output'",
            f"{spec['test_cmd']} {_choose_tests(row.text('repo').lower(), patch)}",
            ": '>>>>> End Test Output'",
            reset,
            "",
        )
    )


def _choose_tests(repository: str, patch: str) -> str:
    """Tests to run: files of the test patch; for mypy, its cases."""
    if repository == "python/mypy":
        cases = " or ".join(re.findall(r"\[case ([^\]]+)\]", patch))
        return f'"{cases}"'
    files = re.findall(r"diff --git a/.* b/(.*)", patch)
    return " ".join(each for each in files if not each.endswith(_DATA_ENDINGS))
