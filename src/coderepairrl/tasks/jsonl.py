"""`jsonl`: tasks in a file, one JSON object per line (docs/guides/tasks.md)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from coderepairrl.environments.build import KIND, Specification
from coderepairrl.errors import TaskError
from coderepairrl.grading.harness import RULES, find_rules
from coderepairrl.grading.reports import RESULTS
from coderepairrl.grading.witness import detect_runner
from coderepairrl.registry import suggest_nearest
from coderepairrl.runs import codec, open_run
from coderepairrl.runs.codec import BASE64_PREFIX, bytes_to_text, encode_base64, parse_foreign_json, text_to_bytes
from coderepairrl.runs.storage import replace_file
from coderepairrl.sandbox.rootfs import pin_image
from coderepairrl.tasks.base import LoadedSource
from coderepairrl.types import Checks, Task

_FIXES = {  # by pydantic's type of error
    "missing": "add the field",
    "string_type": "write a JSON string",
    "string_too_short": "write at least one character",
    "finite_number": "write a finite number",
    "greater_than": "write a positive number",
}


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _reject_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("no NUL is allowed")
    return text


_TextWithoutNul = Annotated[str, AfterValidator(_reject_nul)]


class _Command(_Record):
    argv: Annotated[list[_TextWithoutNul], Field(min_length=1)]
    timeout: float = Field(default=60.0, gt=0)
    results: str | None = None
    """Test runner; None detects it (`detect_runner`), empty uses the exit code."""
    test_timeout: float = Field(default=0.0, ge=0)

    @field_validator("results")
    @classmethod
    def _check_results(cls, results: str | None) -> str | None:
        if results and results not in RESULTS and find_rules(results) is None:
            rules = ", ".join(f"{name}:..." for name in RULES)
            raise ValueError(f"{results!r} is not a format of results: {', '.join(RESULTS)}, {rules}")
        return results


def _accept_bare_argv(value: Any) -> Any:
    return {"argv": value} if isinstance(value, list) else value


class _Checks(_Record):
    commands: list[Annotated[_Command, BeforeValidator(_accept_bare_argv)]] = []
    restore: dict[str, str] = {}
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    workspace: _TextWithoutNul = ""
    collect: dict[str, str] = {}

    @field_validator("restore")
    @classmethod
    def _check_restore(cls, restore: dict[str, str]) -> dict[str, str]:
        for name in restore:
            path = PurePosixPath(name)
            try:
                os.fsencode(_reject_nul(name))
            except ValueError as error:
                raise ValueError(f"{name!r} is not a path: {error}") from error
            outside = path.is_absolute() or ".." in path.parts or ".git" in path.parts
            if outside or not path.parts or name.endswith("/"):
                raise ValueError(f"{name!r} is not a path inside the workspace")
        return restore


class _Task(_Record):
    id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    language: str
    workspace: _TextWithoutNul = ""
    reference: str = ""
    checks: _Checks = _Checks()
    environment: str = ""
    split: str = Field(default="train", min_length=1)
    licence: str = ""
    difficulty: float | None = None
    repository: str = ""
    created: str = ""
    kind: str = ""
    answer: str = ""
    limits: dict[Literal["seconds", "memory", "cpus", "disk_bytes"], Annotated[float, Field(gt=0)]] = {}

    @field_validator("created")
    @classmethod
    def _check_created(cls, created: str) -> str:
        try:
            return created and date.fromisoformat(created).isoformat()
        except ValueError:
            raise ValueError(f"{created!r} is not a date: write YYYY-MM-DD") from None

    @field_validator("environment")
    @classmethod
    def _normalize_environment(cls, environment: str) -> str:
        """Normalize the specification: sandboxes find environments by its text."""
        if not environment.startswith(f"{KIND}:"):
            return environment
        try:
            return str(Specification.parse(environment))
        except (TaskError, UnicodeEncodeError) as error:
            raise ValueError(str(error)) from error

    @field_validator("workspace")
    @classmethod
    def _check_workspace(cls, workspace: str) -> str:
        if workspace and not re.fullmatch(r"dir:.+|git:.+@[0-9a-fA-F]{7,64}|image:.+", workspace, re.DOTALL):
            raise ValueError("write dir:PATH, git:URL@SHA or image:NAME@DIGEST")
        return workspace

    @model_validator(mode="after")
    def _require_workspace_or_answer(self) -> _Task:
        if not self.workspace and not self.answer:
            raise ValueError("a task needs a workspace or an answer")
        return self


class JsonlSource(LoadedSource):
    """Tasks of the file `path`, all or those of `split`; relative paths start at its folder.

    The lines of a run folder's ``tasks.jsonl`` have checksums.
    """

    name = "jsonl"

    def __init__(self, path: str | os.PathLike[str], split: str | None = None) -> None:
        self.path = Path(path)
        self.split = split

    def load(self) -> list[Task]:
        """Read and validate the file. Raises `TaskError` with file, line, field and fix."""
        run = self.path.parent
        is_of_run = self.path.name == "tasks.jsonl" and (run / "run.json").is_file()
        tasks = list(open_run(run).tasks().values() if is_of_run else _read_tasks(self.path))
        if not tasks:
            raise TaskError(f"{self.path} has no tasks", fix="write one JSON object per line (docs/guides/tasks.md)")
        chosen = [task for task in tasks if self.split in (None, task.split)]
        if not chosen:
            splits = sorted({task.split for task in tasks})
            raise TaskError(
                f"{self.path} has no task of split {self.split!r}", fix=suggest_nearest(self.split or "", splits)
            )
        return chosen


def write_jsonl(tasks: Iterable[Task], path: str | os.PathLike[str]) -> None:
    """Write `tasks` for `JsonlSource`; ``dir:`` paths below the file's folder become relative.

    Raises `TaskError` for a task outside the schema.
    """
    target = Path(path)
    home = Path(os.path.abspath(target.parent))  # noqa: PTH100 - `resolve` would replace symbolic links
    with replace_file(target) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
        for task in tasks:
            try:
                record = _make_record(task, home)
            except ValidationError as error:
                raise _explain_error(error, f"task {task.id!r}") from None
            file.write(json.dumps(record.model_dump(exclude_defaults=True)) + "\n")


def _make_record(task: Task, home: Path) -> _Task:
    reference = bytes_to_text(task.reference)
    if "\n" not in reference and reference and not reference.startswith(BASE64_PREFIX):
        reference = encode_base64(task.reference)  # `_read_reference` reads a single line as a file name
    fields = codec.dump(task) | {"reference": reference}
    del fields["verified"]  # not in the schema
    checks = fields["checks"]
    for command in checks["commands"]:
        if command["results"] == detect_runner(command["argv"]):
            command["results"] = None  # the default, which is not written
    checks["restore"] = {
        name: bytes_to_text(content.encode("utf-8", "surrogateescape")) for name, content in task.checks.restore.items()
    }
    for part in (fields, checks):
        part["workspace"] = _make_relative(part["workspace"], home)
    return _Task.model_validate(fields)


def _make_relative(workspace: str, home: Path) -> str:
    folder = Path(workspace.removeprefix("dir:"))
    if workspace.startswith("dir:") and folder.is_relative_to(home):
        return f"dir:{folder.relative_to(home)}"
    return workspace


def _read_tasks(path: Path) -> Iterator[Task]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror}", fix="name a readable file of tasks, one per line") from error
    line_by_id: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            task = _parse_task(line, path, f"{path}:{number}")
            if task.id in line_by_id:
                raise TaskError(
                    f"{path}:{number}: id: {task.id!r} is already taken by line {line_by_id[task.id]}",
                    fix="give each task another id",
                )
            line_by_id[task.id] = number
            yield task


def _parse_task(line: bytes, path: Path, where: str) -> Task:
    try:
        data = parse_foreign_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: byte {error.start} is not UTF-8", fix="write bytes as base64:...") from error
    except ValueError as error:
        raise TaskError(f"{where}: not read as JSON: {error}", fix="write one JSON object per line") from error
    if not isinstance(data, dict):
        raise TaskError(f"{where}: a {type(data).__name__}, not an object", fix='write {"id": ..., "prompt": ...}')
    try:
        record = _Task.model_validate(data)
    except ValidationError as error:
        raise _explain_error(error, where) from None
    return _convert_record(record, path, where)


def _explain_error(error: ValidationError, where: str) -> TaskError:
    # an unknown field comes first: a misspelt one also makes "missing" errors
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    # pydantic puts the names of validators among those of fields
    path = [part for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    field = ".".join(map(str, path))
    if first["type"] == "extra_forbidden":  # at FIELD, checks.FIELD or checks.commands.NUMBER.FIELD
        model: type[BaseModel] = _Command if len(path) > 2 else _Checks if path[0] == "checks" and path[1:] else _Task
        return TaskError(f"{where}: unknown field {field!r}", fix=suggest_nearest(str(path[-1]), model.model_fields))
    message = first["msg"].removeprefix("Value error, ")
    return TaskError(f"{where}: {field}: {message}", fix=_FIXES.get(first["type"], "see docs/guides/tasks.md"))


def _convert_record(record: _Task, path: Path, where: str) -> Task:
    home = Path(os.path.abspath(path.parent))  # noqa: PTH100
    fields = record.model_dump()
    checks_fields = fields["checks"]
    for command in checks_fields["commands"]:
        if command["results"] is None:
            command["results"] = detect_runner(command["argv"])
    for name, content in checks_fields["restore"].items():
        checks_fields["restore"][name] = _decode_text(content, f"{where}: checks.restore.{name}")
    checks = codec.restore(Checks, checks_fields)
    if checks.restore and not checks.commands:
        raise TaskError(f"{where}: checks.restore without checks.commands", fix="add the commands that must pass")
    rules = next(filter(None, (find_rules(command.results) for command in checks.commands)), None)
    if rules is not None and rules.needs_named_tests and not checks.fail_to_pass:
        raise TaskError(
            f"{where}: no checks.fail_to_pass, and the benchmark's rule judges a patch only by the tests named there",
            fix="add the names of the tests that the repair makes pass",
        )
    named_tests = checks.fail_to_pass or checks.pass_to_pass
    if named_tests and not any(command.results for command in checks.commands):
        raise TaskError(
            f"{where}: checks.fail_to_pass without a command that says which tests passed",
            fix=f'give the command its "results": {", ".join(RESULTS)}',
        )
    workspace = _resolve_workspace(record.workspace, home, where)
    reference = _read_reference(record.reference, home, where)
    checks = replace(checks, workspace=_resolve_workspace(checks.workspace, home, where))
    return Task(**fields | {"workspace": workspace, "reference": reference, "checks": checks})


def _resolve_workspace(workspace: str, home: Path, where: str) -> str:
    """Resolve paths relative to `home`, and name prepared images by their digest."""
    if workspace.startswith("dir:"):
        try:
            folder = Path(os.path.normpath(home / Path(workspace.removeprefix("dir:")).expanduser()))
        except RuntimeError as error:  # ~NAME without such a user
            raise TaskError(f"{where}: workspace: {error}", fix="write the whole path") from error
        if not folder.is_dir():
            raise TaskError(f"{where}: workspace: {folder} is not a folder", fix=f"paths are relative to {home}")
        workspace = f"dir:{folder}"
    elif re.match(r"git:\.{0,2}/", workspace):  # a path (/, ./ or ../) and not a URL
        url, _, commit = workspace.removeprefix("git:").rpartition("@")
        workspace = f"git:{os.path.normpath(home / url)}@{commit}"
    elif local := re.match(r"image:(oci|docker-archive|dockerfile):", workspace):
        workspace = f"{local[0]}{os.path.normpath(home / workspace[local.end() :])}"
    if workspace.startswith("image:"):
        workspace = f"image:{pin_image(workspace.removeprefix('image:'))}"
    return workspace


def _decode_text(content: str, where: str) -> str:
    try:
        return text_to_bytes(content).decode("utf-8", "surrogateescape")
    except ValueError as error:
        raise TaskError(f"{where}: {error}", fix="write text, or base64: and the bytes") from error


def _read_reference(text: str, home: Path, where: str) -> bytes:
    """Read the reference patch: `text` itself if of several lines or base64, else the file that it names."""
    if not text or "\n" in text or text.startswith(BASE64_PREFIX):
        try:
            return text_to_bytes(text)
        except ValueError as error:
            raise TaskError(f"{where}: reference: {error}", fix="write a diff, base64:..., or a file name") from error
    try:
        return (home / text).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL, which no file name has
        reason = getattr(error, "strerror", None) or str(error)
        raise TaskError(
            f"{where}: reference: {home / text}: {reason}", fix="write the diff itself, or a file that exists"
        ) from error
