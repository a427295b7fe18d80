"""Tasks of SWE-bench and its kin without images: their environments are built on this machine from the benchmark's
own specifications, and their tests run in any sandbox that shows folders.

Source: the specifications are those of swebench 4.1.0, the last version that has them; the log of the tests is judged
by the harness that `grading.harness` pins.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from coderepairrl.environments import Specification, build
from coderepairrl.errors import TaskError
from coderepairrl.grading import harness
from coderepairrl.processes.hostgit import git, reason
from coderepairrl.processes.installs import tool
from coderepairrl.processes.scratch import scratch
from coderepairrl.sandbox.workspace import commit_folder
from coderepairrl.types import Checks, Command, Task

Row = Mapping[str, Any]

PACKAGES = ("swebench==4.1.0",)
BEFORE = "2024-12-01"
"""The published images have the packages of that time."""
TIMEOUT = 1800.0
"""The harness's own limit on the tests of an instance, in seconds."""
_PROGRAM = (resources.files(__package__) / "programs/swebench_specifications.py").read_text()
_IMAGE = "use its image"
_START, _END = ": '>>>>> Start Test Output'", ": '>>>>> End Test Output'"
_TOX = re.compile(r"^tox --current-env -epy3\d+ -v -- (.*)$", re.MULTILINE)
_EXTRAS = re.compile(r"-e \.(\[[\w,-]+\])|pip install \.(\[[\w,-]+\])")
_SYSTEM = re.compile(r"\b(apt-get|apt|wget|curl|make|locale-gen)\b")
"""Preparations that change the machine or fetch from elsewhere: an environment of Python has none of them."""


@cache
def _known() -> dict[str, Any]:
    inside = tool("swebench-specifications", PACKAGES)
    [package] = inside.glob("lib/python3*/site-packages/swebench")
    done = subprocess.run(
        [str(inside / "bin/python"), "-I", "-c", _PROGRAM, str(package)], capture_output=True, check=True, timeout=120
    )
    known: dict[str, Any] = json.loads(done.stdout)
    return known


def specification(row: Row, url: str) -> Specification:
    """What the environment of the instance `row` is built from; `url` is its repository.

    Raises `TaskError` where the benchmark specifies none, or one that no environment of Python can fill.
    """
    known = _known()
    spec = known["specifications"].get(row["repo"], {}).get(row["version"])
    if spec is None:
        raise TaskError(f"{row['instance_id']} has no specification of a Python environment", fix=_IMAGE)
    if "no-build-isolation" in spec["install"]:
        raise TaskError(f"{row['instance_id']} has compiled modules, which every commit needs anew", fix=_IMAGE)
    commit = row.get("environment_setup_commit") or row["base_commit"]
    edits = tuple(step for step in spec.get("pre_install", ()) if not _SYSTEM.search(step))
    extras = _EXTRAS.search(spec["install"])
    return Specification(
        workspace=f"git:{url}@{commit}",
        python=spec["python"],
        requirements=(*_packages(spec, row["repo"], url, commit), *spec.get("pip_packages", ())),
        extras=next(filter(None, extras.groups()), "") if extras else "",
        before=BEFORE,
        edits=edits,
        version=f"{row['version']}.0.dev0",
    )


def _packages(spec: Mapping[str, Any], repository: str, url: str, commit: str) -> tuple[str, ...]:
    """What stands in ``packages`` of a specification: words, a requirement file, or a conda environment."""
    named = spec.get("packages", "")
    if named == "requirements.txt":
        return _listed(_file(url, commit, _known()["requirements"].get(repository, [])))
    if named == "environment.yml":
        return ()  # its versions are those of ``pip_packages``; the rest is conda's
    return tuple(word for word in shlex.split(named) if word != "python")


def _file(url: str, commit: str, paths: list[str]) -> str:
    with commit_folder(url, commit) as folder:
        for path in paths:
            try:
                return git("show", f"{commit}:{path}", folder=folder).decode("utf-8")
            except subprocess.CalledProcessError:
                continue
    return ""


def _listed(text: str) -> tuple[str, ...]:
    """The requirements in the text of a requirement file, without options and other files.

    >>> _listed("-r other.txt\\npytest>=6 # tests\\n-e .\\n")
    ('pytest>=6',)
    """
    lines = (line.split(" #")[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith(("#", "-", ".", "git+")))


async def native(task: Task, row: Row, url: str) -> Task:
    """`task` with the environment of its instance, built unless it is in the cache, and with checks that run in it.

    Raises what `specification` and `environments.build` raise.
    """
    environment = await build(specification(row, url))
    return replace(
        task,
        workspace=f"git:{url}@{row['base_commit']}",
        environment=f"venv:{environment.folder}",
        checks=checks(row, url),
    )


def checks(row: Row, url: str) -> Checks:
    """The tests of an instance as its script runs them, without conda, judged by the harness."""
    query = "&".join(f"{name}={row[name]}" for name in ("instance_id", "version"))
    results = f"{harness.PREFIX}{row['log_parser']}?eval_type={row['eval_type']}&{query}"
    return Checks(
        commands=(Command(("bash", "-c", test_script(row)), timeout=TIMEOUT, results=results),),
        restore=test_files(row, url),
        fail_to_pass=_names(row["FAIL_TO_PASS"]),
        pass_to_pass=_names(row["PASS_TO_PASS"]),
    )


def _names(given: str | list[str]) -> tuple[str, ...]:
    return tuple(json.loads(given) if isinstance(given, str) else given)


def test_script(row: Row) -> str:
    """What the instance's script runs between its marks, with what it exports; tox, which leaves the environment that
    it is started in, gives way to the command that it would run."""
    script = row["eval_script"]
    if _START not in script or _END not in script:
        raise TaskError(f"{row['instance_id']}: its eval_script has no marks around its tests", fix=_IMAGE)
    before, _, rest = script.partition(_START)
    exports = [line for line in before.splitlines() if line.startswith("export ")]
    tests = rest.partition(_END)[0].strip()
    return "\n".join([*exports, _TOX.sub(r"python -X dev -m pytest -rA \1", tests)])


def test_files(row: Row, url: str) -> dict[str, str]:
    """The files of the instance's tests as they are after its test patch, by their path."""
    commit = row["base_commit"]
    with commit_folder(url, commit) as folder, scratch("tests") as home:
        env = {
            "GIT_INDEX_FILE": str(home / "index"),
            "GIT_OBJECT_DIRECTORY": str(home / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(folder / "objects"),
            "PATH": os.environ.get("PATH", os.defpath),
        }
        (home / "objects").mkdir()
        try:
            git("read-tree", commit, folder=folder, env=env)
            git("apply", "--cached", "-", folder=folder, env=env, stdin=row["test_patch"].encode())
            listed = git(
                "diff-index", "--cached", "--name-status", "--no-renames", "-z", commit, folder=folder, env=env
            )
            words = listed.decode("utf-8", "surrogateescape").split("\0")
            paths = [path for kind, path in zip(words[::2], words[1::2], strict=False) if kind != "D"]
            return {
                path: git("show", f":{path}", folder=folder, env=env).decode("utf-8", "surrogateescape")
                for path in paths
            }
        except subprocess.CalledProcessError as error:
            raise TaskError(f"{row['instance_id']}: its test patch does not apply: {reason(error)}") from error
