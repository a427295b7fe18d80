"""Rows of a published benchmark: from a file, a folder, or the hub.

Reading a missing column raises an error with benchmark, row and column.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from coderepairrl import models
from coderepairrl.errors import TaskError
from coderepairrl.printable import visible
from coderepairrl.processes.installs import require_extra
from coderepairrl.runs import codec

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
"""Endings of row files; a ``.json`` file is a list of objects, or one object per line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `where` is its place, for messages.

    >>> Row("toy", "row 3", {"FAIL_TO_PASS": '["test_a"]'}).names("FAIL_TO_PASS")
    ('test_a',)
    >>> Row("toy", "row 3", {"repo": "a/b"}).text("base_commit")
    Traceback (most recent call last):
    ...
    coderepairrl.errors.TaskError: toy, row 3: no column 'base_commit'
    """

    benchmark: str
    where: str
    values: Mapping[str, Any]

    def __contains__(self, column: str) -> bool:
        return self.values.get(column) is not None  # in tables, a missing value is None

    def text(self, *columns: str) -> str:
        """Text in the first present column. Raises `TaskError` without any."""
        for column in columns:
            if column in self:
                text: str = self._check_type(column, self.values[column], str)
                try:
                    text.encode("utf-8", "surrogateescape")
                except UnicodeEncodeError as error:
                    raise self.make_error(f"column {column!r} has an unpaired surrogate at {error.start}") from None
                return text
        raise self.make_error(f"no column {' or '.join(map(repr, columns))}")

    def text_or_empty(self, *columns: str) -> str:
        """Text in the first present column, or empty."""
        return self.text(*columns) if any(column in self for column in columns) else ""

    def mapping(self, column: str) -> Mapping[str, Any]:
        """Object in `column`, possibly as JSON. Raises `TaskError`."""
        if column not in self:
            raise self.make_error(f"no column {column!r}")
        value = self.values[column]
        if isinstance(value, str):
            value = self._decode_text(column)
        mapping: Mapping[str, Any] = self._check_type(column, value, dict)
        return mapping

    def names(self, column: str) -> tuple[str, ...]:
        """List of texts in `column`, possibly written as JSON or Python; empty without it."""
        if column not in self:
            return ()
        value = self.values[column]
        if isinstance(value, str):
            value = self._decode_text(column) if value.strip() else []
        return tuple(map(str, self._check_type(column, value, list)))

    def tests(
        self, repaired: str = "FAIL_TO_PASS", passing: str = "PASS_TO_PASS"
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tests that a repair makes pass, and tests that always pass.

        Raises `TaskError` if a column is missing, or the first is empty, so that every patch would pass.
        """
        for column in (repaired, passing):
            if column not in self:
                raise self.make_error(f"no column {column!r}")
        if not self.names(repaired):
            raise self.make_error(f"column {repaired!r} names no test")
        return self.names(repaired), self.names(passing)

    def files(self, column: str) -> dict[str, str]:
        """Files in `column`: contents by path. Raises `TaskError`."""
        return {str(name): str(content) for name, content in self.mapping(column).items()}

    def day(self, *columns: str) -> str:
        """First present date, ``YYYY-MM-DD``, or empty."""
        for column in columns:
            if column in self:
                value = self.values[column]
                if isinstance(value, date):  # a datetime is one
                    return (value.date() if isinstance(value, datetime) else value).isoformat()
                try:
                    return date.fromisoformat(str(value)[:10]).isoformat()
                except ValueError:
                    raise self.make_error(f"column {column!r} is not a date: {value!r}") from None
        return ""

    def make_error(self, problem: str) -> TaskError:
        """Error about this row."""
        fix = f"choose rows of {self.benchmark}; the rows read have the columns {', '.join(self.values)}"
        return TaskError(f"{self.benchmark}, {self.where}: {problem}", fix=fix)

    def _check_type(self, column: str, value: Any, kind: type) -> Any:
        if not isinstance(value, kind):
            raise self.make_error(f"column {column!r} is not a {kind.__name__}: {str(value)[:60]!r}")
        return value

    def _decode_text(self, column: str) -> Any:
        text = self.values[column]
        for decode in (json.loads, ast.literal_eval):
            try:
                return decode(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
        raise self.make_error(f"column {column!r} cannot be read: {text[:60]!r}")


def read_rows(benchmark: str, path: Path, split: str = "") -> list[Row]:
    """Read the rows of a file, or of a folder's files (those of `split`, if files are named by splits).

    Raises `TaskError` for unreadable files.
    """
    files = _find_row_files(path, split)
    if not files:
        raise TaskError(f"{benchmark}: {path} has no file of rows", fix=f"rows are read from {', '.join(ENDINGS)}")
    rows = []
    for file in files:
        read = _read_parquet_rows if file.name.endswith(".parquet") else _read_json_rows
        for number, each in enumerate(read(benchmark, file), 1):
            where = f"row {number} of {file}"
            if not isinstance(each, dict):
                raise TaskError(f"{benchmark}, {where}: not an object", fix="write one JSON object per line")
            rows.append(Row(benchmark, where, each))
    return rows


def read_checkout_text(path: Path) -> str:
    """Read a text file of a checkout, with surrogate escapes for non-UTF-8 bytes. Raises `TaskError`."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror}", fix="name a complete checkout: path=FOLDER") from error


def read_hub_rows(benchmark: str, name: str, split: str, revision: str = "") -> list[Row]:
    """Read the rows of the hub's data set `name` (or of a folder in its layout).

    Raises `PrerequisiteError` without the package ``datasets``, `TaskError` for unavailable rows.
    """
    require_extra("hub", f"{benchmark}, read from the hub,")
    unreachable = "" if Path(name).is_dir() else models.go_offline_without_hub()
    datasets = importlib.import_module("datasets")  # only now: on import it reads whether the hub is offline
    importlib.import_module("huggingface_hub").utils.logging.set_verbosity_error()  # each retry logs two warnings
    print(visible(f"reading {name} from the hub"), file=sys.stderr)
    try:
        table = datasets.load_dataset(name, split=split, revision=revision or None)
    except Exception as error:  # any layer may fail: network, hub, cache, format
        reason = unreachable or f"{type(error).__name__}: {error}"
        raise TaskError(
            f"{benchmark}: the data set {name} (split {split}) cannot be loaded: {reason}",
            fix="connect this machine once, or name a file: path=FILE (docs/guides/benchmarks.md)",
        ) from error
    return [Row(benchmark, f"row {number} of {name}", values) for number, values in enumerate(table, 1)]


def _find_row_files(path: Path, split: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(ENDINGS) and file.is_file())
    split_files = [file for file in files if split and file.name.startswith((f"{split}.", f"{split}-"))]
    return split_files or files


def _read_json_rows(benchmark: str, path: Path) -> Sequence[Any]:
    try:
        text = codec.read_foreign_text(path)
        if path.name.endswith(".json") and text.lstrip()[:1] == "[":
            objects: list[Any] = codec.parse_foreign_json(text)
            return objects
        return [codec.parse_foreign_json(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise TaskError(
            f"{benchmark}: {path}: {error}", fix="name a readable file of rows (docs/guides/benchmarks.md)"
        ) from error


def _read_parquet_rows(benchmark: str, path: Path) -> Sequence[Any]:
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except Exception as error:  # OSError, and pyarrow's exceptions
        raise TaskError(f"{benchmark}: {path}: {error}", fix="name a readable Parquet file") from error
    return rows
