"""`harbor`: tasks in the format of Harbor (harbor-framework/harbor), one folder each.

Follows harbor 0.26.0 (schema 1.4; Apache-2.0): ``models/task/{config,paths,verifier_mode}.py``, ``trial/trial.py``,
``trial/artifact_handler.py``, ``verifier/verifier.py``, ``agents/oracle.py``. ``/tests/test.sh`` writes a number to
``/logs/verifier/reward.txt`` or numbers to ``reward.json``; exit codes are ignored. Never tested with published images.

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
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from coderepairrl.environments import dockerfile
from coderepairrl.errors import TaskError, UsageError
from coderepairrl.grading import witness
from coderepairrl.grading.reports import Outcome
from coderepairrl.printable import join_first
from coderepairrl.sandbox.workspace import prepare_workspace
from coderepairrl.tasks.benchmark import Benchmark, copy_build_context, pin_image_workspace
from coderepairrl.tasks.patches import detect_language
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.select import SelectedSource
from coderepairrl.types import Checks, Command, Task

_log = logging.getLogger(__name__)
VERIFIER_SECONDS, SOLUTION_SECONDS = 600.0, 900.0
"""Default time limits; Harbor has one only for tests."""
FOLDER = ".crrl-harbor"
"""Workspace folder of the tests' files, before a script copies them to ``/tests``."""
_DIFFICULTIES = {"easy": 1.0, "medium": 2.0, "hard": 3.0}
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*")
_COPY_REWARD = """
if [ -f /logs/verifier/reward.json ]; then cp /logs/verifier/reward.json "$1"
elif [ -f /logs/verifier/reward.txt ]; then cp /logs/verifier/reward.txt "$1"
fi
exit 0
"""
"""End of the check, which copies the reward to ``$1``."""
USED = """
task.name metadata agent.timeout_sec agent.user solution.env artifacts.source artifacts.exclude verifier.timeout_sec
verifier.env verifier.user verifier.environment_mode verifier.environment verifier.collect.command
verifier.collect.timeout_sec environment.docker_image environment.cpus environment.memory_mb environment.storage_mb
environment.env environment.workdir
"""
"""Fields of ``task.toml`` that are read; those of ``verifier.environment`` are the same as of ``environment``."""
REFUSED = """
steps environment.os environment.gpus environment.tpu environment.mcp_servers environment.healthcheck
verifier.collect.service artifacts.service
"""
"""Fields of tasks that are refused, unless they say Linux, the main service, or nothing."""
IGNORED = {
    "schema_version": "fields have kept their meaning",
    "task.version task.description task.authors task.keywords source": "about the package",
    "multi_step_reward_strategy environment.gpu_types": "only with fields that are refused",
    "environment.skills_dir": "no agent reads it",
    "environment.build_timeout_sec": "builds have a limit of their own",
    "artifacts.destination": "a place on Harbor's machine",
    "verifier.collect.user": "a sandbox has one user",
    "environment.network_mode environment.allowed_hosts environment.allow_internet agent.network_mode "
    "agent.allowed_hosts verifier.network_mode verifier.allowed_hosts": "sandboxes have no network",
}
"""Fields that change nothing, with the reason."""
_UNSUPPORTED_FILES = """
environment/docker-compose.yaml tests/docker-compose.yaml tests/.harborignore solution/.harborignore trajectory.json
"""
# keys of `Task.limits` by fields NAME_mb
_SIZES = {"memory": "memory", "storage": "disk_bytes"}
_HOOK = "pre_artifacts.sh"
"""DeepSWE's script that writes artifacts in the attempt's sandbox."""
_ARTIFACTS = "/logs/artifacts"
"""Artifact that a verifier in a separate environment always gets."""
_DIFF = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(diff --git .*?\n)\1\n", re.DOTALL)
"""Diff in a script's here-document."""
IMAGE = "python:3.12"
"""Default image of exported tasks, with Python, git and a shell."""
WORKDIR = "/workspace"
_BY_EXIT = ("", "pytest", "unittest", "cargo", "go", "node")
"""Result formats whose commands fail if a test fails."""
_RUN_WITNESSED = r"""word=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
report=$(echo "$word" | {} | grep -aF "{{\"word\": \"$word\"")"""
"""Runs a command of `witness.make_junit_checks`, which marks its report with the secret word on its input."""
_EXPECT_IN_REPORT = "case $report in *{}*) ;; *) fail ;; esac"
_SOLVE = "git -c safe.directory='*' -c core.autocrlf=false apply --whitespace=nowarn /solution/fix.patch\n"
_FIX = "leave it out (select), or write another format"


class Harbor(Benchmark):
    """Tasks in `path`: the folder of a task, or a folder with tasks at most six levels below (docs/guides/harbor.md).

    A reward of 1 or more passes. A task with unsupported settings raises an error, or is left out if `usable`.
    """

    name = "harbor"

    def __init__(self, path: str, *, split: str = "", kind: str = "harbor", usable: bool = False) -> None:
        super().__init__(path)
        self.split, self.kind, self.usable = split, kind, usable

    def make_task(self, row: Row) -> Task:
        """Convert a task's folder."""
        folder = Path(row.text("folder"))
        settings = _Settings(row)
        settings.check(folder)
        metadata = settings.table("metadata")
        reference = _read_reference(folder, metadata)
        return Task(
            id=str(settings.table("task").get("name") or folder.name),
            prompt=_read_instruction(folder / "instruction.md"),
            language=str(metadata.get("language") or detect_language(reference, "text")),
            workspace=_make_image(settings, folder / "environment", settings.table("agent").get("user"), "environment"),
            reference=reference,
            checks=_make_checks(folder, settings),
            split=self.split or str(metadata.get("split") or "train"),
            licence=str(metadata.get("license") or ""),
            difficulty=_parse_difficulty(metadata.get("difficulty")),
            repository=str(metadata.get("repository") or ""),
            created=str(metadata.get("created") or ""),
            kind=str(metadata.get("kind") or self.kind),
            limits=_read_limits(settings),
        )

    def oracle(self, task_id: str) -> Checks | None:
        """Make checks that first run the task's solution; None without one. Raises KeyError."""
        row = self.row(task_id)
        folder = Path(str(row["folder"]))
        if not (folder / "solution/solve.sh").is_file():
            return None
        settings = _Settings(Row(self.name, str(folder), row))
        files, script = _stage_files(folder / "solution", "/solution")
        script += f"rm -rf {FOLDER}\n{_format_exports(settings, 'solution')}export DEBIAN_FRONTEND=noninteractive\n"
        script += "/solution/solve.sh\nexit 0\n"
        seconds = float(settings.table("agent").get("timeout_sec") or SOLUTION_SECONDS)
        solve = Command(("sh", f"{FOLDER}/solve"), seconds)
        checks = _make_checks(folder, settings)
        restored = {**files, f"{FOLDER}/solve": script, **checks.restore}
        return replace(checks, commands=(solve, *checks.commands), restore=restored)

    def _read_rows(self) -> list[Row]:
        assert self.path is not None
        folders = [self.path] if (self.path / "task.toml").is_file() else _find_task_folders(self.path)
        if not folders:
            raise TaskError(f"harbor: {self.path} has no folder with a task.toml", fix="name a folder of Harbor tasks")
        rows = [_read_row(folder.absolute()) for folder in folders]
        if online := [row.where for row in rows if _Settings(row).asks_for_network()]:
            _log.warning("harbor: tasks ask for a network, which no sandbox has: %s", join_first(online, 3))
        return [row for row in rows if self._is_usable(row)] if self.usable else rows

    def _is_usable(self, row: Row) -> bool:
        try:
            self.make_task(row)
        except TaskError as error:
            _log.warning("left out: %s", error)
            return False
        return True


class _Settings:
    """Settings in a ``task.toml``. Raises `TaskError` for malformed and unsupported ones."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def table(self, *names: str) -> Mapping[str, Any]:
        """Table with the dotted name `names`, or an empty one."""
        table: Any = self.row.values
        for name in names:
            table = table.get(name) or {}
            if not isinstance(table, Mapping):
                raise self.row.make_error(f"[{'.'.join(names)}] is not a table")
        checked: Mapping[str, Any] = table
        return checked

    def entries(self, *names: str) -> list[Mapping[str, Any]]:
        """Tables of a list; a string is short for a table with ``source``."""
        *parents, last = names
        listed = self.table(*parents).get(last) or []
        return [each if isinstance(each, Mapping) else {"source": str(each)} for each in listed]

    @property
    def is_separate(self) -> bool:
        """Whether the verifier runs in a separate environment."""
        verifier = self.table("verifier")
        mode = verifier.get("environment_mode")
        return str(mode) == "separate" if mode else "environment" in verifier

    def asks_for_network(self) -> bool:
        """Whether a field asks for a network (Harbor gives one by default)."""
        tables = map(self.table, ("environment", "agent", "verifier"))
        return any(
            each.get("network_mode", "no-network") != "no-network" or each.get("allow_internet") for each in tables
        )

    def check(self, folder: Path) -> None:
        """Raise `TaskError` for unsupported settings."""
        unsupported = [name for name in REFUSED.split() if self._is_refused(name)]
        unsupported += [name for name in _UNSUPPORTED_FILES.split() if (folder / name).exists()]
        if "environment" in self.table("verifier") and not self.is_separate:
            unsupported.append("[verifier.environment] with a shared verifier")
        if unsupported:
            raise TaskError(
                f"harbor: {folder} needs {', '.join(unsupported)}, which is not supported",
                fix="remove the task's folder, or leave such tasks out with usable=true",
            )

    def _is_refused(self, name: str) -> bool:
        *parents, last = name.split(".")
        tables = self.entries(*parents) if last == "service" else [self.table(*parents)]
        tables += [self.table("verifier", *parents)] if parents == ["environment"] else []
        # an absent or empty field is allowed
        return any(str(each.get(last) or "linux").lower() not in ("linux", "main") for each in tables)


def _find_task_folders(root: Path) -> list[Path]:
    task_folders = []
    for parent, folders, files in os.walk(root):
        folder = Path(parent)
        if "task.toml" in files:
            task_folders.append(folder)
            folders.clear()
        is_deepest = len(folder.relative_to(root).parts) >= 6
        folders[:] = [] if is_deepest else sorted(name for name in folders if not name.startswith("."))
    return task_folders


def _read_row(folder: Path) -> Row:
    path = folder / "task.toml"
    try:
        return Row("harbor", str(folder), {**tomllib.loads(path.read_text(encoding="utf-8")), "folder": str(folder)})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"harbor: {path}: {error}", fix="write TOML") from error


def _read_instruction(path: Path) -> str:
    """Read the prompt without leading canary lines, which keep benchmarks out of training data."""
    lines = _read_bytes(path).decode("utf-8", "replace").split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    return "\n".join(lines).strip("\n") + "\n"


def _read_reference(folder: Path, metadata: Mapping[str, Any]) -> bytes:
    """Read the solution's patch: named in the metadata, its one patch file, or within its script."""
    if "reference" in metadata:
        return _read_bytes(folder / str(metadata["reference"]))
    solution = folder / "solution"
    diffs = [_read_bytes(path) for path in (*solution.glob("*.patch"), *solution.glob("*.diff"))]
    if not diffs and (solution / "solve.sh").is_file():
        script = _read_bytes(solution / "solve.sh").decode("utf-8", "surrogateescape")
        diffs = [diff.encode("utf-8", "surrogateescape") for _, diff in _DIFF.findall(script)]
    return diffs[0] if len(diffs) == 1 else b""


def _parse_difficulty(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return _DIFFICULTIES.get(str(value).lower())


# -- the workspace


def _make_verifier_image(folder: Path, settings: _Settings) -> tuple[str, bool]:
    """Workspace of a verifier in a separate environment, and whether its image has the tests."""
    verifier = settings.table("verifier")
    names = ("verifier", "environment") if "environment" in verifier else ("environment",)
    prebuilt = settings.table("verifier", "environment").get("docker_image")
    is_bundled = bool(prebuilt or (folder / "tests" / dockerfile.NAME).is_file())
    context = folder / ("tests" if is_bundled else "environment")
    return _make_image(settings, context, verifier.get("user"), *names), is_bundled


def _make_image(settings: _Settings, context: Path, user: object, *names: str) -> str:
    """Make the workspace of a prebuilt image, else of the Dockerfile in `context`, with settings of table `names`.

    Without a Dockerfile, a prebuilt image gets the files of ``environment``.
    """
    is_agent_image = context.name == "environment"
    image_table = settings.table("environment") if is_agent_image else settings.table("verifier", "environment")
    prebuilt = str(image_table.get("docker_image") or "")
    table = settings.table(*names)
    has_dockerfile = (context / dockerfile.NAME).is_file()
    if not prebuilt and not has_dockerfile:
        raise TaskError(f"harbor: {context.parent} has neither {context.name}/Dockerfile nor docker_image")
    steps = [f"ENV {name}={_quote_dockerfile(value)}" for name, value in _read_variables(settings, *names).items()]
    steps += [f"WORKDIR {table['workdir']}"] if table.get("workdir") else []
    steps += [f"RUN mkdir -p {_ARTIFACTS}"] if settings.is_separate and is_agent_image else []
    steps += [f"USER {user}"] if user is not None else []
    has_files = is_agent_image and context.is_dir() and any(context.iterdir())
    copies_files = bool(prebuilt and not has_dockerfile and has_files)
    steps += ["COPY . ./"] if copies_files else []
    if not steps and prebuilt:
        return pin_image_workspace(prebuilt)
    if not steps:
        dockerfile.Recipe(context)  # raises unless it can be built
        return pin_image_workspace(dockerfile.dockerfile_image_name(context))
    base = f"FROM {prebuilt}"
    if not prebuilt:
        base = _read_bytes(context / dockerfile.NAME).decode("utf-8", "surrogateescape")
    try:
        text = "\n".join([base, *steps]) + "\n"
        return copy_build_context(text, context if copies_files or not prebuilt else None)
    except OSError as error:
        raise TaskError(f"harbor: {context.parent}: {error}", fix="set CRRL_CACHE") from error


def _read_limits(settings: _Settings) -> dict[str, float]:
    environment = settings.table("environment")
    limits = {
        "seconds": settings.table("agent").get("timeout_sec"),
        "cpus": environment.get("cpus"),
        **{limit: _read_size(environment, name) for name, limit in _SIZES.items()},
    }
    return {name: float(value) for name, value in limits.items() if value}


def _read_size(environment: Mapping[str, Any], name: str) -> float:
    """Bytes of ``NAME_mb``, or of the older ``NAME``, such as ``2G``; 0 for none."""
    text = str(environment.get(name) or f"{environment.get(f'{name}_mb') or 0}M").strip().upper()
    return float(text[:-1]) * {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}[text[-1]]


def _read_variables(settings: _Settings, *names: str) -> dict[str, str]:
    section = ".".join(names)
    variables = {str(name): str(value) for name, value in settings.table(*names, "env").items()}
    for name, value in variables.items():
        if not _VARIABLE_NAME.fullmatch(name):
            raise settings.row.make_error(f"[{section}.env] {name!r} is not a variable name")
        if "${" in value or "\n" in value:
            raise TaskError(
                f"harbor: {settings.row.where}: [{section}.env] {name} uses a variable of the host: {value!r}",
                fix="write its value into task.toml: sandboxes do not see the host's variables",
            )
    return variables


def _quote_dockerfile(value: str) -> str:
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def _format_exports(settings: _Settings, section: str) -> str:
    variables = _read_variables(settings, section)
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


# -- tests and solution


def _make_checks(folder: Path, settings: _Settings) -> Checks:
    workspace, is_bundled = _make_verifier_image(folder, settings) if settings.is_separate else ("", False)
    if not (is_bundled or (folder / "tests/test.sh").is_file()):
        raise TaskError(f"harbor: {folder} has no tests/test.sh")
    files, script = ({}, "chmod +x /tests/test.sh\n") if is_bundled else _stage_files(folder / "tests", "/tests")
    script += f"rm -rf {FOLDER} /logs/verifier\nmkdir -p /logs/verifier /logs/agent {_ARTIFACTS} || exit 1\n"
    script += ("" if workspace else _format_hooks(folder, settings)) + _format_exports(settings, "verifier")
    script += f"/tests/test.sh{_COPY_REWARD}"
    seconds = float(settings.table("verifier").get("timeout_sec") or VERIFIER_SECONDS)
    command = Command(("sh", f"{FOLDER}/test", "{results}"), seconds, results="harbor")
    collect = _make_collect_scripts(folder, settings) if workspace else {}
    return Checks((command,), {**files, f"{FOLDER}/test": script}, workspace=workspace, collect=collect)


def _format_hooks(folder: Path, settings: _Settings) -> str:
    """Format a script of DeepSWE's file and Harbor's hooks, for the attempt's sandbox."""
    hooks = [(300.0, "bash", _read_bytes(folder / _HOOK).decode())] if (folder / _HOOK).is_file() else []
    for hook in settings.entries("verifier", "collect"):
        hooks.append((float(hook.get("timeout_sec", 60)), "sh", str(hook["command"])))
    return "".join(
        f"timeout {seconds:g} {shell} -c {shlex.quote(text)} >/dev/null 2>&1\n" for seconds, shell, text in hooks
    )


def _make_collect_scripts(folder: Path, settings: _Settings) -> dict[str, str]:
    """Make `Checks.collect` for the task's artifacts; its hooks run first."""
    scripts = dict[str, str]()
    for entry in [{"source": _ARTIFACTS}, *settings.entries("artifacts")]:
        path = PurePosixPath(str(entry["source"]))
        if not path.is_absolute() or ".." in path.parts or not path.name:
            raise settings.row.make_error(f"the artifact {path} is not an absolute path below /")
        excluded = "".join(f"--exclude={shlex.quote(str(pattern))} " for pattern in entry.get("exclude") or ())
        parent, name = shlex.quote(str(path.parent)), shlex.quote(path.name)
        scripts[str(path)] = f"{{ cd {parent} && tar {excluded}-cf - -- {name}; }} 2>/dev/null"
    return scripts | {_ARTIFACTS: _format_hooks(folder, settings) + scripts[_ARTIFACTS]}


def _stage_files(source: Path, target: str) -> tuple[dict[str, str], str]:
    """Files of `source` in `FOLDER`, and a script that copies them to `target`."""
    files, lines = {}, [f"rm -rf {target}", f"mkdir -p {target} || exit 1"]
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        target_path = shlex.quote(f"{target}/{name}")
        if path.is_symlink():
            raise TaskError(f"harbor: {path} is a link", fix="replace it by the file itself")
        if path.is_dir():
            lines.append(f"mkdir -p {target_path}")
            continue
        staged = f"{FOLDER}{target}/{name}"
        files[staged] = _read_bytes(path).decode("utf-8", "surrogateescape")
        lines.append(f"cp {shlex.quote(staged)} {target_path} || exit 1")
        if path.stat().st_mode & 0o100 or path.suffix == ".sh":
            lines.append(f"chmod +x {target_path}")
    return files, "\n".join(lines) + "\n"


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TaskError(f"harbor: {path}: {error.strerror}", fix="name a complete Harbor task") from error


def export_harbor(source: Iterable[Task], target: Path, image: str = IMAGE) -> int:
    """Write each task to a folder in the new folder `target`, all or none; return the number of tasks.

    Folders of Harbor tasks are copied. Raises `UsageError` if `target` exists or cannot be written, `TaskError` for
    tasks that the format cannot express.
    """
    if target.exists():
        raise UsageError(f"{target} already exists", fix="remove it, or name another folder")
    names: set[str] = set()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            staging = Path(scratch) / "tasks"
            staging.mkdir()
            origin = source.source if isinstance(source, SelectedSource) else source
            for task in source:
                name = _format_folder_name(task.id)
                if name in names:
                    raise TaskError(f"two tasks would have the folder {name}", fix="give each task a different id")
                names.add(name)
                if isinstance(origin, Harbor):
                    shutil.copytree(origin.row(task.id)["folder"], staging / name, symlinks=True)
                else:
                    _write_harbor_task(task, staging / name, image)
            staging.rename(target)
    except OSError as error:
        raise UsageError(f"{target}: {error}", fix="name a folder that you may create") from error
    return len(names)


def _format_folder_name(task_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "__", task_id).lstrip("._-") or "task"


def _write_harbor_task(task: Task, folder: Path, image: str) -> None:
    if not task.checks or not task.workspace:
        raise TaskError(f"task {task.id} has no {'checks' if task.workspace else 'workspace'}", fix=_FIX)
    if task.environment.startswith(("venv:", "python:")):
        raise TaskError(f"task {task.id} needs an environment that only this machine has", fix=_FIX)
    if task.checks.workspace or task.checks.collect:
        raise TaskError(f"task {task.id} is judged in another image than the agent's", fix=_FIX)
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    limits = {"cpus": task.limits.get("cpus", 0)}
    limits |= {f"{key}_mb": task.limits.get(name, 0) / (1 << 20) for key, name in _SIZES.items()}
    environment: dict[str, Any] = {name: math.ceil(value) for name, value in limits.items() if value}
    if task.workspace.startswith("image:"):
        name = task.workspace.removeprefix("image:")
        if name.startswith(("oci:", "docker-archive:", "dockerfile:")):
            raise TaskError(f"task {task.id}: its image {name} is only on this machine, not in a registry", fix=_FIX)
        environment["docker_image"] = name
    else:
        with tempfile.TemporaryDirectory() as scratch:
            prepare_workspace(task.workspace, Path(scratch) / "workspace")
            source, target = Path(scratch) / "workspace/tree", folder / "environment/workspace"
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        text = f"FROM {image}\nWORKDIR {WORKDIR}\nCOPY workspace/ {WORKDIR}/\n"
        (folder / "environment/Dockerfile").write_text(text)
    (folder / "instruction.md").write_text(task.prompt.rstrip("\n") + "\n", encoding="utf-8")
    _write_tests(task, folder / "tests")
    if task.reference:
        (folder / "solution/fix.patch").write_bytes(task.reference)
        _write_script(folder / "solution/solve.sh", f"set -e\n{_SOLVE}")
    org, _, name = task.id.partition("/")
    full_name = "/".join(map(_format_folder_name, (org, name))) if name else f"coderepairrl/{_format_folder_name(org)}"
    metadata = {
        "language": task.language,
        "split": task.split,
        "license": task.licence,
        "repository": task.repository,
        "created": task.created,
        "kind": task.kind,
        "reference": "solution/fix.patch" if task.reference else "",
        "difficulty": task.difficulty,
    }
    settings = {
        "schema_version": "1.4",
        "task": {"name": full_name},
        "metadata": {name: value for name, value in metadata.items() if value not in ("", None)},
        "verifier": {"timeout_sec": math.ceil(sum(command.timeout for command in task.checks.commands)) + 60.0},
        **({"agent": {"timeout_sec": task.limits["seconds"]}} if "seconds" in task.limits else {}),
        "environment": environment,
    }
    (folder / "task.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")


def _write_tests(task: Task, folder: Path) -> None:
    checks: Checks = task.checks
    is_witnessed = all(witness.watch_junit(command.argv) for command in checks.commands)
    unsupported = [each for each in checks.commands if each.results not in _BY_EXIT or "{results}" in str(each.argv)]
    if (checks.named or unsupported) and not is_witnessed:
        raise TaskError(f"task {task.id} is judged by single tests, not by exit codes of its commands", fix=_FIX)
    lines = ["fail() { echo 0 > /logs/verifier/reward.txt; exit 0; }", "mkdir -p /logs/verifier"]
    for name, content in checks.restore.items():
        restored = folder / "restore" / name
        restored.parent.mkdir(parents=True, exist_ok=True)
        restored.write_bytes(content.encode("utf-8", "surrogateescape"))
        path, parent = shlex.quote(name), shlex.quote(str(Path(name).parent))
        lines += [f"rm -rf {path} || fail", f"mkdir -p {parent} || fail"]
        lines += [f"cp {shlex.quote(f'/tests/restore/{name}')} {path} || fail"]
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
