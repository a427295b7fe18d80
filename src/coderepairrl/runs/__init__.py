"""Run folder: the interface between training and everything that reads it.

config.toml        the resolved configuration
run.json           schema, versions, commit, machine
tasks.jsonl        every task, one per line
log.jsonl          every attempt, turn, verdict and step
episodes/*.jsonl   finished episodes, one file per step or evaluation
metrics.jsonl      one line per step
references.jsonl   verified repairs (``tasks.verified_references``)
checkpoints/STEP/  model in Hugging Face layout, learner's state
eval/NAME-STEP/    results of an evaluation
logs/              output of the child processes
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coderepairrl.errors import PrerequisiteError, RunError, TaskError, UsageError
from coderepairrl.printable import remove_login
from coderepairrl.processes import hostgit
from coderepairrl.registry import suggest_run
from coderepairrl.runs import codec
from coderepairrl.runs.log import JsonLines, Log, Tail, add_checksum, read_records, remove_torn_line, strip_checksum
from coderepairrl.runs.storage import replace_file
from coderepairrl.types import Episode, Task, Turn, VerifiedRepair
from coderepairrl.version import __version__

__all__ = ["Log", "RunFolder", "Tail", "logged_episodes", "open_run"]
SCHEMA = 3
_PACKAGES = (  # whose versions run.json records
    *("torch", "transformers", "tokenizers", "safetensors", "renderers", "numpy"),
    *("peft", "accelerate", "deepspeed", "bitsandbytes"),
)


class RunFolder:
    """Paths and files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log.jsonl"
        self.config = path / "config.toml"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"

    def list_checkpoints(self) -> dict[int, Path]:
        """Complete checkpoints, by step."""
        return {int(path.name): path for path in sorted(self.checkpoints.glob("[0-9]*")) if path.name.isdigit()}

    def prune_checkpoints(self, most: int) -> None:
        """Delete the oldest checkpoints beyond `most`."""
        for _, path in sorted(self.list_checkpoints().items())[:-most]:
            shutil.rmtree(path)

    def command(self) -> str:
        """Command that made the run: ``train``, ``sft``, ``eval`` or ``collect``. Raises OSError or ValueError."""
        facts = self.about()
        if "policy" in facts:
            return "collect" if "holdout" in facts else "eval"
        return "sft" if "data" in facts else "train"

    def about(self) -> dict[str, Any]:
        """Read run.json. Raises OSError or ValueError."""
        data: dict[str, Any] = json.loads((self.path / "run.json").read_text("utf-8"))
        return data

    def create(self, config: str, about: Mapping[str, Any], versions: Mapping[str, str] = MappingProxyType({})) -> None:
        """Create the folder, config.toml and run.json; replace a run that failed before logging. Raises as
        `require_free`."""
        self.require_free()
        try:
            for folder in (self.logs, self.checkpoints, self.path / "episodes", self.path / "eval"):
                folder.mkdir(parents=True, exist_ok=True)
            with closing(Log(self.log)):  # only one of two processes that start the same run gets the log
                self.require_free()
                (self.path / "tasks.jsonl").unlink(missing_ok=True)  # left by a failed start
                self.write_config(config)
                write_json(self.path / "run.json", {"schema": SCHEMA, **about, **describe_machine(versions)})
        except OSError as error:
            raise UsageError(f"cannot create {self.path}: {error}", fix="choose another run.dir") from error

    def require_free(self) -> None:
        """Raise `UsageError` if the folder holds a run, foreign files, or is unreadable."""
        try:
            log_size = self.log.stat().st_size if self.log.exists() else None
            has_other_files = (
                log_size is None and self.path.is_dir() and any(entry.is_file() for entry in self.path.iterdir())
            )
        except OSError as error:
            raise UsageError(f"cannot create {self.path}: {error}", fix="choose another run.dir") from error
        if has_other_files:
            raise UsageError(f"{self.path} has other files in it", fix="choose another run.name or run.dir")
        if log_size:
            raise UsageError(
                f"{self.path} already holds a run",
                fix="continue it with --resume, or choose another run.name, or -o FOLDER if you gave one",
            )

    def write_config(self, config: str) -> None:
        """Replace config.toml."""
        write_atomic(self.config, config)

    def add_tasks(self, tasks: Iterable[Task]) -> None:
        """Add missing tasks to tasks.jsonl, atomically; a changed task appears twice. Raises `RunError` for damage."""
        existing = [line for line, _ in self._read_task_lines()]
        written = (json.dumps(codec.dump(task), separators=(",", ":")) for task in tasks)
        lines = dict.fromkeys([*existing, *written])
        if len(lines) > len(existing):
            write_atomic(
                self.path / "tasks.jsonl", "".join(f"{add_checksum(line.encode()).decode()}\n" for line in lines)
            )

    def tasks(self) -> dict[str, Task]:
        """Latest version of each task by id. Raises `RunError` for damage."""
        return {task.id: task for _, task in self._read_task_lines()}

    def _read_task_lines(self) -> Iterator[tuple[str, Task]]:
        path = self.path / "tasks.jsonl"
        *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for number, line in enumerate(lines, 1):
            try:
                line = strip_checksum(line)
                task = codec.restore(Task, json.loads(line))
                if not isinstance(task, Task):
                    raise ValueError("it is null")
                yield line.decode(), task
            except (ValueError, TypeError, RecursionError) as error:
                raise RunError(
                    f"{path}:{number} is not a task: {error}",
                    fix="restore the file from a copy, or delete it: --resume writes the tasks again",
                ) from None

    def records(self) -> Iterator[dict[str, Any]]:
        """Records of the log."""
        return read_records(self.log)

    def writer(self) -> Log:
        """Open the log for appending, without a torn last line. Raises `RunError` for a changed line."""
        log = Log(self.log)
        try:
            # only with the lock: a line that looks torn may be one that another process is writing
            remove_torn_line(self.log)
        except RunError:
            log.close()
            raise
        return log

    def write_episodes(self, name: str, episodes: Iterable[Episode]) -> None:
        """Export finished episodes to ``episodes/NAME.jsonl``, atomically."""
        lines = (json.dumps(codec.dump(episode), separators=(",", ":")) + "\n" for episode in episodes)
        write_atomic(self.path / "episodes" / f"{name}.jsonl", "".join(lines))

    def episodes(self, pattern: str = "*") -> Iterator[Episode]:
        """Exported episodes, by file name."""
        for path in sorted((self.path / "episodes").glob(f"{pattern}.jsonl")):
            for line in path.read_text().splitlines():
                yield codec.restore(Episode, json.loads(line))

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each step."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    def write_metrics(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Export one line per step, atomically."""
        _write_json_lines(self.path / "metrics.jsonl", map(codec.dump, steps))

    def add_metrics(self, step: Mapping[str, Any]) -> None:
        """Append one step's line atomically. Raises `RunError` when the disk is full."""
        with closing(JsonLines(self.path / "metrics.jsonl")) as lines:
            lines.append(codec.dump(step))

    def write_references(self, references: Mapping[str, Sequence[VerifiedRepair]]) -> None:
        """Export verified repairs by task id, atomically."""
        rows = ({"task": task, **codec.dump(repair)} for task in sorted(references) for repair in references[task])
        _write_json_lines(self.path / "references.jsonl", rows)

    def write_attempts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write ``eval/NAME/metrics.jsonl``, atomically, an object per attempt."""
        _write_json_lines(self._make_evaluation_folder(name) / "metrics.jsonl", rows)

    def attempts(self, name: str) -> dict[str, dict[str, float]]:
        """Metrics in ``eval/NAME/metrics.jsonl`` by episode id. Raises OSError and ValueError for damage."""
        path = self.path / "eval" / name / "metrics.jsonl"
        by_id: dict[str, dict[str, float]] = {}
        for number, line in enumerate(path.read_text("utf-8").splitlines() if path.exists() else (), 1):
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("id"), str):
                raise ValueError(f"{path}:{number} is not an attempt")
            numbers = {key: value for key, value in row.items() if type(value) in (int, float) and key != "attempt"}
            by_id[row["id"]] = numbers
        return by_id

    def write_evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        """Write ``eval/NAME/summary.json``, atomically."""
        write_json(self._make_evaluation_folder(name) / "summary.json", result)

    def _make_evaluation_folder(self, name: str) -> Path:
        folder = self.path / "eval" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def open_run(path: Path) -> RunFolder:
    """Open the run in `path`. Raises `UsageError` for a missing run or unsupported schema."""
    folder = RunFolder(path)
    try:
        facts: object = folder.about()  # perhaps another program's file
    except (OSError, ValueError) as error:
        problem = "it has no run.json" if isinstance(error, FileNotFoundError) else error
        raise UsageError(
            f"{path} is not a run folder ({problem})" if path.exists() else f"there is no run {path}",
            fix=suggest_run(path) or "name the folder of a run: it has a run.json",
        ) from error
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if schema != SCHEMA:
        raise UsageError(
            f"{path} has schema {schema}, this version reads {SCHEMA}", fix="read it with the version in its run.json"
        )
    return folder


def logged_episodes(
    records: Iterable[Mapping[str, Any]], wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[Episode]:
    """Judged episodes from a log's records; `wanted` filters ids, to save parsing."""
    turns: dict[str, list[Turn]] = {}
    for record in records:
        if record["type"] == "episode":
            turns[record["id"]] = []
        elif record["type"] == "turn" and wanted(record["episode"]):
            turns.setdefault(record["episode"], []).append(codec.restore(Turn, record["turn"]))
        elif record["type"] == "verdict" and wanted(record["verdict"]["id"]):
            data = record["verdict"]
            episode_turns = sorted(turns.pop(data["id"], []), key=lambda turn: turn.index)
            yield replace(codec.restore(Episode, data), turns=tuple(episode_turns))


def describe_machine(engine_versions: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Facts to reproduce a number: versions, commit, platform."""
    versions = {"vllm": "absent", **engine_versions}  # vLLM has its own environment, so the engine reports it
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "coderepairrl": __version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),  # that this process may use
        "versions": versions,
        "argv": [remove_login(word) for word in sys.argv],
    }


@functools.cache
def source_digest() -> str:
    """Short digest of the package's code."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def source_commit(package: Path = Path(__file__).parents[1]) -> str:
    """Commit of the source tree, with ``+`` if modified; empty for a wheel."""
    try:
        repository = hostgit.find_repository(package, around=True)
        with hostgit.open_view(repository) as view:
            within = "/".join(package.resolve().relative_to(repository.name).parts)
            head = view.head()
            if not view.files(head, within):  # an installed package, in an environment inside another repository
                return ""
            return head + ("+" if view.changes(within=within) else "")
    except (OSError, TaskError, PrerequisiteError):
        return ""


def write_atomic(path: Path, text: str) -> None:
    """Replace a file atomically. Raises `RunError` when the disk is full."""
    try:
        with replace_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "free some space and continue with --resume"
        raise RunError(f"cannot write {path}: {error}", fix=fix) from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file by indented JSON, atomically. Raises `RunError` when the disk is full."""
    write_atomic(path, json.dumps(data, indent=2) + "\n")


def _write_json_lines(path: Path, rows: Iterable[Any]) -> None:
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


LEARNED_FILE = "learned.json"
"""File with the ids of learned tasks, in a run folder or a model folder exported from one."""


def write_learned(folder: Path, tasks: Iterable[str]) -> None:
    """Record in `folder` the ids `tasks` that a run learned from, if any. Raises `RunError`."""
    if ids := sorted(set(tasks)):
        write_atomic(folder / LEARNED_FILE, json.dumps({"tasks": ids}, indent=1) + "\n")


def read_learned(folder: Path) -> frozenset[str]:
    """Task ids that `write_learned` recorded in `folder`, if any. Raises `RunError` for damage."""
    path = folder / LEARNED_FILE
    if not path.is_file():
        return frozenset()
    try:
        ids = json.loads(path.read_text("utf-8"))["tasks"]
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise ValueError("tasks is not a list of ids")
        return frozenset(ids)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} does not say which tasks were learned from: {error}", fix="restore it from a copy"
        ) from None
