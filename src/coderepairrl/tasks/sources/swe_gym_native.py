"""Instances of SWE-Gym without images: their environments are built on this machine from the benchmark's own
specifications, and their tests run in any sandbox that shows folders.

Source: the specifications are in ``swebench/harness/constants.py`` of ``SWE-Gym/SWE-Bench-Fork`` (MIT licence, commit
242429c), which no package index has; the user names a copy of that file. Scripts and test commands are those that
``swebench/harness/test_spec.py`` there makes of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from coderepairrl.environments import CondaFile, Specification
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.sources.swe_bench_native import BEFORE, TIMEOUT, constants
from coderepairrl.types import Checks, Command

COMMIT = "242429c188fcfd06aad13fce9a54d450470bf0ac"
_FIX = f"specifications=FILE: swebench/harness/constants.py of github.com/SWE-Gym/SWE-Bench-Fork at {COMMIT[:7]}"
_PARSER = "parse_log_pytest"
"""The fork's parser of all its repositories but pydantic."""
_OTHER_PARSER = ("pydantic/pydantic",)
_UNABLE = re.compile(r"\b(npm|conda|pdm|pip install -ve)\b")
"""Commands of specifications that take more than packages of Python, or leave a compiled project in its folder."""
_SYSTEM = re.compile(r"\bapt(-get)? ")
"""In preparations that change the machine."""
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""How files of a test patch end that are no tests."""
_END = "EOF_114329324912"


@cache
def published(file: Path) -> dict[str, Any]:
    """The ``specifications`` in `file` by repository and version, and where repositories have conda ``environments``.

    A JSON file has specifications alone. Raises `ConfigError` where it cannot be read.
    """
    try:
        if file.suffix == ".json":
            found: dict[str, Any] = {"specifications": json.loads(file.read_text(encoding="utf-8")), "environments": {}}
        else:
            found = constants(Path(sys.executable), file)
        return {"environments": found["environments"], "specifications": dict(found["specifications"])}
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"no specifications of environments can be read from {file}: {error}", fix=_FIX) from error


def file_of(specifications: str) -> Path:
    """The file of the option `specifications`. Raises `ConfigError` where it is empty."""
    if not specifications:
        raise ConfigError("workspace=native needs SWE-Gym's own specifications, which are not shipped", fix=_FIX)
    return Path(specifications).expanduser().resolve()


def why_not(row: Row, file: Path) -> str:
    """Why no environment of the instance can be built from its specification in `file`; empty where one can."""
    repository, version = row.text("repo").lower(), row.text("version")
    spec = published(file)["specifications"].get(repository, {}).get(version)
    if spec is None:
        return f"version {version} has no specification"
    if repository in _OTHER_PARSER:
        return "its log has a parser of its own"
    if spec.get("packages") == "environment.yml" and repository not in published(file)["environments"]:
        return f"{file.name} does not say where its conda environment is"
    found = _UNABLE.search(_commands(spec))
    return f"its specification takes {found[0]}" if found else ""


def environment(row: Row, url: str, file: Path) -> str:
    """`Task.environment` of the instance `row`, whose repository is at `url`, specified in `file`.

    Raises `TaskError` where the benchmark specifies no environment that takes packages of Python alone.
    """
    if why := why_not(row, file):
        raise TaskError(f"{row.text('instance_id')} has no native environment: {why}", fix="workspace=image")
    repository, version = row.text("repo").lower(), row.text("version")
    spec = published(file)["specifications"][repository][version]
    asked = Specification(
        workspace=f"git:{url}@{row.text('base_commit')}",
        python=spec.get("python", ""),
        conda=CondaFile(paths=published(file)["environments"][repository], edits=spec.get("env_patches", ()))
        if spec.get("packages") == "environment.yml"
        else None,
        requirements=spec.get("pip_packages", ()),
        install=_commands(spec),
        before=BEFORE,
        version=f"{version}.0",
    )
    return str(asked)


def _commands(spec: dict[str, Any]) -> str:
    """What prepares and installs the project, without what changes the machine."""
    steps = (*spec.get("pre_install", ()), spec["install"])
    return "\n".join(step for step in steps if not _SYSTEM.search(step))


def checks(row: Row, file: Path) -> Checks:
    """The instance's tests, as the fork's own script runs them; the harness of SWE-bench judges their log."""
    query = urlencode({"instance_id": row.text("instance_id"), "version": row.text("version")})
    return Checks(
        commands=(Command(("bash", "-c", script(row, file)), TIMEOUT, f"swebench:{_PARSER}?{query}"),),
        fail_to_pass=row.names("FAIL_TO_PASS"),
        pass_to_pass=row.names("PASS_TO_PASS"),
    )


def script(row: Row, file: Path) -> str:
    """What runs the tests of the instance in a workspace whose only commit is its own, specified in `file`."""
    patch = row.text("test_patch")
    spec = published(file)["specifications"][row.text("repo").lower()][row.text("version")]
    reset = f"git checkout HEAD {' '.join(re.findall(r'--- a/(.*)', patch))}"
    return "\n".join(
        (
            "#!/bin/bash",
            "set -uxo pipefail",
            *spec.get("eval_commands", ()),
            reset,
            f"git apply -v - <<'{_END}'\n{patch}\n{_END}",
            ": '>>>>> Start Test Output'",
            f"{spec['test_cmd']} {_chosen(row.text('repo').lower(), patch)}",
            ": '>>>>> End Test Output'",
            reset,
            "",
        )
    )


def _chosen(repository: str, patch: str) -> str:
    """Which tests are run: files of the test patch; of mypy, the cases that it names."""
    if repository == "python/mypy":
        cases = " or ".join(re.findall(r"\[case ([^\]]+)\]", patch))
        return f'"{cases}"'
    files = re.findall(r"diff --git a/.* b/(.*)", patch)
    return " ".join(each for each in files if not each.endswith(_NO_TESTS))
