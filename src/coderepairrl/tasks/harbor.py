"""Export tasks to folders in Harbor's format (harbor 0.25.0, schema 1.4).

Harbor runs the tests on the machine as the agent left it, not in a fresh sandbox: files that steer test runners or
replace Python's modules have an effect.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from coderepairrl.errors import TaskError, UsageError
from coderepairrl.grading import witness
from coderepairrl.grading.reports import Outcome
from coderepairrl.sandbox.workspace import prepare_workspace
from coderepairrl.types import Checks, Task

IMAGE = "python:3.12"
"""Default image, with Python, git and a shell."""
WORKDIR = "/workspace"
_BY_EXIT = ("", "pytest", "unittest", "cargo", "go", "node")
"""Result formats whose commands exit with a code other than 0 when a test fails."""
_RUN_WITNESSED = r"""word=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
report=$(echo "$word" | {} | grep -aF "{{\"word\": \"$word\"")"""
"""Runs a command of `witness.junit_checks`, which marks its report with a secret word that it reads."""
_EXPECT_IN_REPORT = "case $report in *{}*) ;; *) fail ;; esac"
_SOLVE = "git -c safe.directory='*' -c core.autocrlf=false apply --whitespace=nowarn /solution/fix.patch\n"
_FIX = "leave it out (select), or write another format"


def export_harbor(source: Iterable[Task], target: Path, image: str = IMAGE) -> int:
    """Write each task to a folder in the new folder `target`, all or none; return the number of tasks.

    Raises `UsageError` if `target` exists or cannot be written, `TaskError` for tasks that the format cannot express.
    """
    if target.exists():
        raise UsageError(f"{target} already exists", fix="remove it, or name another folder")
    names: set[str] = set()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            staging = Path(scratch) / "tasks"
            staging.mkdir()
            for task in source:
                name = _harbor_name(task.id)
                if name in names:
                    raise TaskError(f"two tasks would have the folder {name}", fix="give each task a different id")
                names.add(name)
                _write_harbor_task(task, staging / name, image)
            staging.rename(target)
    except OSError as error:
        raise UsageError(f"{target}: {error}", fix="name a folder in one that you may write to") from error
    return len(names)


def _harbor_name(task_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "__", task_id).lstrip("._-") or "task"


def _write_harbor_task(task: Task, folder: Path, image: str) -> None:
    if not task.checks or not task.workspace:
        raise TaskError(f"task {task.id} has no {'checks' if task.workspace else 'workspace'}", fix=_FIX)
    if task.environment.startswith(("venv:", "python:")):
        raise TaskError(f"task {task.id} needs an environment that only this machine has", fix=_FIX)
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    settings = ""
    if task.workspace.startswith("image:"):
        name = task.workspace.removeprefix("image:")
        if name.startswith(("oci:", "docker-archive:", "dockerfile:")):
            raise TaskError(f"task {task.id}: its image {name} is only on this machine, not in a registry", fix=_FIX)
        settings = f"docker_image = {_quote_toml(name)}\n"
    else:
        with tempfile.TemporaryDirectory() as scratch:
            prepare_workspace(task.workspace, Path(scratch) / "made")
            ignored = shutil.ignore_patterns(".git")
            shutil.copytree(
                Path(scratch) / "made/tree", folder / "environment/workspace", symlinks=True, ignore=ignored
            )
        text = f"FROM {image}\nWORKDIR {WORKDIR}\nCOPY workspace/ {WORKDIR}/\n"
        (folder / "environment/Dockerfile").write_text(text)
    (folder / "instruction.md").write_text(task.prompt.rstrip("\n") + "\n", encoding="utf-8")
    _write_tests(task, folder / "tests")
    if task.reference:
        (folder / "solution/fix.patch").write_bytes(task.reference)
        _write_script(folder / "solution/solve.sh", f"set -e\n{_SOLVE}")
    seconds = math.ceil(sum(command.timeout for command in task.checks.commands)) + 60
    (folder / "task.toml").write_text(_format_task_toml(task, settings, seconds), encoding="utf-8")


def _format_task_toml(task: Task, environment: str, seconds: int) -> str:
    metadata = {
        "language": task.language,
        "split": task.split,
        "license": task.licence,
        "repository": task.repository,
        "created": task.created,
        "kind": task.kind,
        "reference": "solution/fix.patch" if task.reference else "",
    }
    lines = [f"{name} = {_quote_toml(value)}" for name, value in metadata.items() if value]
    lines += [f"difficulty = {task.difficulty!r}"] if task.difficulty is not None else []
    org, _, name = task.id.partition("/")
    named = "/".join(map(_harbor_name, (org, name))) if name else f"coderepairrl/{_harbor_name(org)}"
    text = (
        f'schema_version = "1.4"\n\n[task]\nname = {_quote_toml(named)}\n\n[metadata]\n' + "\n".join(lines) + "\n\n"
        f"[verifier]\ntimeout_sec = {float(seconds)}\n\n[environment]\n{environment}"
    )
    tomllib.loads(text)
    return text


def _quote_toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write_tests(task: Task, folder: Path) -> None:
    checks: Checks = task.checks
    is_witnessed = all(witness.junit(command.argv) for command in checks.commands)
    unsupported = [each for each in checks.commands if each.results not in _BY_EXIT or "{results}" in str(each.argv)]
    if (checks.named or unsupported) and not is_witnessed:
        raise TaskError(f"task {task.id} is judged by single tests, not by exit codes of its commands", fix=_FIX)
    lines = ["fail() { echo 0 > /logs/verifier/reward.txt; exit 0; }", "mkdir -p /logs/verifier"]
    for name, content in checks.restore.items():
        restored = folder / "restore" / name
        restored.parent.mkdir(parents=True, exist_ok=True)
        restored.write_bytes(content.encode("utf-8", "surrogateescape"))
        at, parent = shlex.quote(name), shlex.quote(str(Path(name).parent))
        lines += [f"rm -rf {at} || fail", f"mkdir -p {parent} || fail"]
        lines += [f"cp {shlex.quote(f'/tests/restore/{name}')} {at} || fail"]
    expected = [f"{json.dumps(name)}: {Outcome.PASSED.value}" for name in checks.named] or ['"ok": true']
    for command in checks.commands:
        call = f"timeout {math.ceil(command.timeout)} {shlex.join(command.argv)}"
        lines += (
            [_RUN_WITNESSED.format(call), *(_EXPECT_IN_REPORT.format(shlex.quote(each)) for each in expected)]
            if is_witnessed
            else [f"{call} </dev/null || fail"]
        )
    lines.append("echo 1 > /logs/verifier/reward.txt")
    _write_script(folder / "test.sh", "\n".join(lines) + "\n")


def _write_script(path: Path, text: str) -> None:
    path.write_bytes(b"#!/bin/sh\n" + text.encode("utf-8", "surrogateescape"))
    path.chmod(0o755)
