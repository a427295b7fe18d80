"""Published or logged trajectories of other programs; each item is read or reported as damaged."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.report.trajectories.others import formats
from coderepairrl.report.trajectories.others.trajectory import Trajectory
from coderepairrl.runs import codec

Reader = Callable[[Mapping[str, Any], str], Trajectory]
_READERS: Mapping[str, Reader] = {
    "openhands": formats.read_openhands,
    "swe-agent": formats.read_swe_agent,
    "mini-swe-agent": formats.read_mini_swe_agent,
    "atif": formats.read_atif,
}
_FILE_ENDINGS: Mapping[str, tuple[str, ...]] = {
    "openhands": (".jsonl", ".jsonl.gz", ".parquet", ".json"),
    "swe-agent": (".traj", ".jsonl", ".jsonl.gz", ".parquet"),
    "mini-swe-agent": (".traj.json", ".jsonl", ".parquet"),
    "atif": (".json", ".jsonl"),
}
FORMATS = (*_READERS, "nano")
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""Errors that readers raise on damaged contents."""


__all__ = ["FORMATS", "DamagedItem", "LogFilter", "Trajectory", "read_trajectories"]


class DamagedItem(NamedTuple):
    """Unreadable item, and why."""

    where: str
    why: str


class LogFilter(NamedTuple):
    """Filter of an agent's logs: window of local start times, part of the model's name."""

    after: datetime | None = None
    before: datetime | None = None
    model: str = ""

    def takes(self, when: datetime) -> bool:
        """Whether `when` is within the window."""
        return (self.after is None or when >= self.after) and (self.before is None or when < self.before)


def read_trajectories(form: str, path: Path, window: LogFilter | None = None) -> Iterator[Trajectory | DamagedItem]:
    """Read trajectories in `path`, files sorted by name. Raises `UsageError` without files."""
    if form not in FORMATS:
        raise UsageError(f"unknown format {form!r}", fix=f"one of {', '.join(FORMATS)}")
    if form == "nano":
        yield from _read_nano_logs(path, window or LogFilter())
        return
    if any(window or ()):
        raise UsageError(
            "a time window or a model selects logs of nano only", fix="leave them out, or read the format nano"
        )
    endings = _FILE_ENDINGS[form]
    files = sorted(each for each in path.rglob("*") if each.name.endswith(endings)) if path.is_dir() else [path]
    if not files or not path.exists():
        raise UsageError(f"{path} has no trajectories", fix=f"{form} is read from {', '.join(endings)}")
    for file in files:
        for where, row in _read_file_rows(file, str(file.relative_to(path.parent))):
            yield _read_item(_READERS[form], row, where) if not isinstance(row, DamagedItem) else row


def _read_item(reader: Reader, row: Any, where: str) -> Trajectory | DamagedItem:
    try:
        if not isinstance(row, Mapping):
            raise ValueError("it is not a JSON object")
        attempt = reader(row, where)
        if not math.isfinite(attempt.reward or 0.0):
            raise ValueError(f"its reward {attempt.reward} is not finite")
        names = (attempt.task, attempt.id, attempt.agent, attempt.model, attempt.stated_repository)
        "".join(names).encode()  # raises for lone surrogates
        attempt.patch.encode("utf-8", "surrogateescape")
        return attempt
    except _DAMAGE as error:
        return DamagedItem(where, str(error) or type(error).__name__)


def _read_file_rows(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    if file.name.endswith(".parquet"):
        try:
            table = importlib.import_module("pyarrow.parquet").ParquetFile(file)
            rows = (row for batch in table.iter_batches(64) for row in batch.to_pylist())
            yield from ((f"{name}:{number}", row) for number, row in enumerate(rows, 1))
        except Exception as error:  # pyarrow raises many classes
            yield name, DamagedItem(name, str(error))
        return
    try:
        contents = codec.read_foreign_text(file)
    except ValueError as error:
        yield name, DamagedItem(name, str(error))
        return
    has_lines = file.name.endswith((".jsonl", ".jsonl.gz"))
    for number, text in enumerate(contents.split("\n") if has_lines else [contents], 1):
        if not text.strip():
            continue
        where = f"{name}:{number}" if has_lines else name
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield where, DamagedItem(where, f"not read as JSON: {error}")
            continue
        if isinstance(value, list):
            yield from ((f"{where}:{at}", row) for at, row in enumerate(value, 1))
        else:
            yield where, value


def _read_nano_logs(path: Path, window: LogFilter) -> Iterator[Trajectory | DamagedItem]:
    folders = sorted(each.parent for each in path.expanduser().rglob(formats.NANO_MESSAGES))
    if not folders:
        raise UsageError(f"{path} has no logs of nano", fix="name the folder that holds them: ~/.nano")
    for folder in folders:
        try:
            if window.takes(datetime.fromisoformat(folder.name.rpartition("-")[0])):  # its local start time
                attempt = formats.read_nano(folder)
                if window.model in attempt.model:
                    yield attempt
        except (*_DAMAGE, OSError) as error:
            yield DamagedItem(str(folder), str(error) or type(error).__name__)
