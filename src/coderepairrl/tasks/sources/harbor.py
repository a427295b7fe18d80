"""`harbor`: tasks in the format of Harbor (harbor-framework/harbor), one folder each.

Follows harbor 0.25.0 (schema 1.4; Apache-2.0): ``models/task/{config,paths}.py``, ``verifier/verifier.py``,
``agents/oracle.py``, ``environments/definition.py``. ``/tests/test.sh`` writes a number to
``/logs/verifier/reward.txt`` or numbers to ``reward.json``; exit codes are ignored. Not run on a published task with an
image.

`export_harbor` writes such folders. Unlike a fresh sandbox, Harbor judges the machine that the agent left, including
files that steer test runners or replace Python's modules.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coderepairrl.environments import dockerfile
from coderepairrl.errors import TaskError, UsageError
from coderepairrl.grading import witness
from coderepairrl.grading.reports import Outcome
from coderepairrl.sandbox.workspace import prepare_workspace
from coderepairrl.tasks.benchmark import Benchmark, image_workspace
from coderepairrl.tasks.benchmark import context as context_image
from coderepairrl.tasks.patches import language
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

_log = logging.getLogger(__name__)
VERIFIER_SECONDS, SOLUTION_SECONDS = 600.0, 900.0
"""Default time limits: Harbor's for tests; Harbor has none for solutions."""
RESULTS = "harbor"
FOLDER = ".crrl-harbor"
"""Workspace folder of the tests' files before they move to ``/tests``."""
_LEVELS = {"easy": 1.0, "medium": 2.0, "hard": 3.0}
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_RUN = """
if [ -f /logs/verifier/reward.json ]; then cp /logs/verifier/reward.json "$1"
elif [ -f /logs/verifier/reward.txt ]; then cp /logs/verifier/reward.txt "$1"
fi
exit 0
"""
IMAGE = "python:3.12"
"""Has Python, git and a shell."""
WORKDIR = "/workspace"
_PLAIN = ("", "pytest", "unittest", "cargo", "go", "node")
"""Result formats whose commands exit with a code other than 0 when a test fails."""
_WATCHED = r"""word=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
report=$(echo "$word" | {} | grep -aF "{{\"word\": \"$word\"")"""
"""Runs a command of `witness.junit_checks`, which marks its report with the word that it reads."""
_TOLD = "case $report in *{}*) ;; *) fail ;; esac"
_SOLVE = "git -c safe.directory='*' -c core.autocrlf=false apply --whitespace=nowarn /solution/fix.patch\n"
_FIX = "leave it out (select), or write another format"


class Harbor(Benchmark):
    """Tasks of `path`: a task's folder, or one with tasks at most six levels down (docs/guides/harbor.md).

    A reward of 1 or more passes. Refused settings raise an error, or with `usable` leave the task out.
    """

    name = "harbor"

    def __init__(self, path: str, *, split: str = "", kind: str = "harbor", usable: bool = False) -> None:
        super().__init__(path)
        self.split, self.kind, self.usable = split, kind, usable

    def task(self, row: Row) -> Task:
        """Task of a folder."""
        folder = Path(row.text("folder"))
        settings = _Settings(row)
        settings.check(folder)
        metadata = settings.table("metadata")
        reference = _bytes(folder / str(metadata["reference"])) if "reference" in metadata else b""
        return Task(
            id=str(settings.table("task").get("name") or folder.name),
            prompt=_instruction(folder / "instruction.md"),
            language=str(metadata.get("language") or language(reference, "text")),
            workspace=_workspace(folder, settings),
            reference=reference,
            checks=Checks(*_tests(folder, settings)),
            split=self.split or str(metadata.get("split") or "train"),
            licence=str(metadata.get("license") or ""),
            difficulty=_difficulty(metadata.get("difficulty")),
            repository=str(metadata.get("repository") or ""),
            created=str(metadata.get("created") or ""),
            kind=str(metadata.get("kind") or self.kind),
        )

    def oracle(self, task_id: str) -> Checks | None:
        """Checks that first run the task's solution; None without one. Raises KeyError."""
        row = self.row(task_id)
        folder = Path(str(row["folder"]))
        if not (folder / "solution/solve.sh").is_file():
            return None
        settings = _Settings(Row(self.name, str(folder), row))
        files, script = _moved(folder / "solution", "/solution")
        script += f"{_exports(settings, 'solution')}export DEBIAN_FRONTEND=noninteractive\n/solution/solve.sh\nexit 0\n"
        seconds = float(settings.table("agent").get("timeout_sec") or SOLUTION_SECONDS)
        first = Command(("sh", f"{FOLDER}/solve"), seconds)
        commands, restore = _tests(folder, settings)
        return Checks((first, *commands), {**files, f"{FOLDER}/solve": script, **restore})

    def _read(self) -> list[Row]:
        assert self.path is not None
        folders = [self.path] if (self.path / "task.toml").is_file() else _task_folders(self.path)
        if not folders:
            raise TaskError(f"harbor: {self.path} has no folder with a task.toml", fix="name a folder of Harbor tasks")
        rows = [_harbor_row(folder.absolute()) for folder in folders]
        return [row for row in rows if self._can(row)] if self.usable else rows

    def _can(self, row: Row) -> bool:
        try:
            self.task(row)
        except TaskError as error:
            _log.warning("left out: %s", error)
            return False
        return True


class _Settings:
    """``task.toml``. Raises `TaskError` for malformed and unsupported settings."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def table(self, *names: str) -> Mapping[str, Any]:
        """The named table, or empty."""
        table: Any = self.row.values
        for name in names:
            table = table.get(name) or {}
            if not isinstance(table, Mapping):
                raise self.row.wrong(f"[{'.'.join(names)}] is no table")
        checked: Mapping[str, Any] = table
        return checked

    def check(self, folder: Path) -> None:
        """Raise `TaskError` for unsupported settings."""
        environment, verifier = self.table("environment"), self.table("verifier")
        wrong = {
            "several steps": self.row.values.get("steps"),
            "Windows": str(environment.get("os", "linux")).lower() != "linux",
            "a separate environment of the verifier": verifier.get("environment")
            or str(verifier.get("environment_mode", "shared")) != "shared",
            "commands of verifier.collect": verifier.get("collect"),
            "GPUs": environment.get("gpus") or environment.get("tpu"),
            "MCP servers": environment.get("mcp_servers"),
            "a health check": environment.get("healthcheck"),
            "docker-compose.yaml": (folder / "environment/docker-compose.yaml").exists(),
        }
        if unsupported := [name for name, value in wrong.items() if value]:
            raise TaskError(
                f"harbor: {folder} needs {', '.join(unsupported)}, which is not there",
                fix="leave the task's folder out",
            )


def _task_folders(root: Path) -> list[Path]:
    task_folders = []
    for parent, folders, files in os.walk(root):
        folder = Path(parent)
        if "task.toml" in files:
            task_folders.append(folder)
            folders.clear()
        deep = len(folder.relative_to(root).parts) >= 6
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
    return task_folders


def _harbor_row(folder: Path) -> Row:
    path = folder / "task.toml"
    try:
        return Row("harbor", str(folder), {**tomllib.loads(path.read_text(encoding="utf-8")), "folder": str(folder)})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"harbor: {path}: {error}", fix="write TOML") from error


def _instruction(path: Path) -> str:
    """Prompt without leading canary lines, which mark benchmarks for filters of training data."""
    lines = _bytes(path).decode("utf-8", "replace").split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    return "\n".join(lines).strip("\n") + "\n"


def _difficulty(given: object) -> float | None:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    return _LEVELS.get(str(given).lower())


# -- the workspace


def _workspace(folder: Path, about: _Settings) -> str:
    """Prebuilt image, else the Dockerfile's; without a Dockerfile, files go to the image's workdir."""
    settings, context = about.table("environment"), folder / "environment"
    prebuilt = str(settings.get("docker_image") or "")
    written = (context / dockerfile.NAME).is_file()
    if not prebuilt and not written:
        raise TaskError(f"harbor: {folder} has neither environment/Dockerfile nor docker_image")
    lines = [f"ENV {name}={_quoted(value)}" for name, value in _variables(about, "environment").items()]
    lines += [f"WORKDIR {settings['workdir']}"] if settings.get("workdir") else []
    lines += [f"USER {user}"] if (user := about.table("agent").get("user")) is not None else []
    copied = bool(prebuilt and not written and context.is_dir() and any(context.iterdir()))
    if prebuilt:
        lines = [f"FROM {prebuilt}", *lines, *(["COPY . ./"] if copied else [])]
        if len(lines) == 1:
            return image_workspace(prebuilt)
    elif lines:
        lines.insert(0, _bytes(context / dockerfile.NAME).decode("utf-8", "surrogateescape"))
    else:
        dockerfile.base_of(context)
        return image_workspace(dockerfile.dockerfile_image_name(context))
    try:
        return context_image("\n".join(lines) + "\n", context if copied or not prebuilt else None)
    except OSError as error:
        raise TaskError(f"harbor: {folder}: {error}", fix="set CRRL_CACHE") from error


def _variables(about: _Settings, section: str) -> dict[str, str]:
    variables = {str(name): str(value) for name, value in about.table(section, "env").items()}
    for name, value in variables.items():
        if not _NAME.fullmatch(name):
            raise about.row.wrong(f"[{section}.env] {name!r} is no name of a variable")
        if "${" in value or "\n" in value:
            raise TaskError(
                f"harbor: {about.row.where}: [{section}.env] {name} is a variable of the host: {value!r}",
                fix="write its value into task.toml: no variable of the host is shown to a sandbox",
            )
    return variables


def _quoted(value: str) -> str:
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def _exports(about: _Settings, section: str) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in _variables(about, section).items())


# -- tests and solution


def _tests(folder: Path, about: _Settings) -> tuple[tuple[Command, ...], dict[str, str]]:
    if not (folder / "tests/test.sh").is_file():
        raise TaskError(f"harbor: {folder} has no tests/test.sh")
    files, script = _moved(folder / "tests", "/tests")
    script += f"rm -rf {FOLDER} /logs/verifier\nmkdir -p /logs/verifier /logs/agent /logs/artifacts || exit 1\n"
    script += f"{_exports(about, 'verifier')}/tests/test.sh{_RUN}"
    seconds = float(about.table("verifier").get("timeout_sec") or VERIFIER_SECONDS)
    command = Command(("sh", f"{FOLDER}/test", "{results}"), seconds, RESULTS)
    return (command,), {**files, f"{FOLDER}/test": script}


def _moved(source: Path, target: str) -> tuple[dict[str, str], str]:
    files, lines = {}, [f"rm -rf {target}", f"mkdir -p {target} || exit 1"]
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        at = shlex.quote(f"{target}/{name}")
        if path.is_symlink():
            raise TaskError(f"harbor: {path} is a link", fix="put the file itself there")
        if path.is_dir():
            lines.append(f"mkdir -p {at}")
            continue
        staged = f"{FOLDER}{target}/{name}"
        files[staged] = _bytes(path).decode("utf-8", "surrogateescape")
        lines.append(f"cp {shlex.quote(staged)} {at} || exit 1")
        if path.stat().st_mode & 0o100 or path.suffix == ".sh":
            lines.append(f"chmod +x {at}")
    return files, "\n".join(lines) + "\n"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TaskError(f"harbor: {path}: {error.strerror}", fix="name a whole Harbor task") from error


def export_harbor(source: Iterable[Task], target: Path, image: str = IMAGE) -> int:
    """Write each task to a folder in the new folder `target`, all or none; return their number.

    Raises `UsageError` if `target` exists or cannot be written, `TaskError` for tasks the format cannot express.
    """
    if target.exists():
        raise UsageError(f"{target} exists already", fix="remove it, or name another folder")
    names: set[str] = set()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            staging = Path(scratch) / "tasks"
            staging.mkdir()
            for task in source:
                name = _harbor_name(task.id)
                if name in names:
                    raise TaskError(f"two tasks would have the folder {name}", fix="give tasks ids of their own")
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
        raise TaskError(f"task {task.id} needs an environment of this machine, which no image has", fix=_FIX)
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    settings = ""
    if task.workspace.startswith("image:"):
        name = task.workspace.removeprefix("image:")
        if name.startswith(("oci:", "docker-archive:", "dockerfile:")):
            raise TaskError(f"task {task.id}: its image {name} is of this machine, and in no registry", fix=_FIX)
        settings = f"docker_image = {_toml(name)}\n"
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
        _script(folder / "solution/solve.sh", f"set -e\n{_SOLVE}")
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
    lines = [f"{name} = {_toml(value)}" for name, value in metadata.items() if value]
    lines += [f"difficulty = {task.difficulty!r}"] if task.difficulty is not None else []
    org, _, name = task.id.partition("/")
    named = "/".join(map(_harbor_name, (org, name))) if name else f"coderepairrl/{_harbor_name(org)}"
    text = (
        f'schema_version = "1.4"\n\n[task]\nname = {_toml(named)}\n\n[metadata]\n' + "\n".join(lines) + "\n\n"
        f"[verifier]\ntimeout_sec = {float(seconds)}\n\n[environment]\n{environment}"
    )
    tomllib.loads(text)
    return text


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write_tests(task: Task, folder: Path) -> None:
    checks: Checks = task.checks
    watched = all(witness.junit(command.argv) for command in checks.commands)
    odd = [command for command in checks.commands if command.results not in _PLAIN or "{results}" in str(command.argv)]
    if (checks.named or odd) and not watched:
        raise TaskError(f"task {task.id} is judged by single tests, not by how its commands end", fix=_FIX)
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
            [_WATCHED.format(call), *(_TOLD.format(shlex.quote(each)) for each in expected)]
            if watched
            else [f"{call} </dev/null || fail"]
        )
    lines.append("echo 1 > /logs/verifier/reward.txt")
    _script(folder / "test.sh", "\n".join(lines) + "\n")


def _script(path: Path, text: str) -> None:
    path.write_bytes(b"#!/bin/sh\n" + text.encode("utf-8", "surrogateescape"))
    path.chmod(0o755)
