"""Conversations to learn from, as a Parquet file."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.runs.storage import write_table

EXAMPLES_FILE = "examples.parquet"
_JSON_COLUMNS = ("messages", "tools")


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation of an attempt, or of a published trajectory.

    >>> chat = ({"role": "user", "content": "fix it"}, {"role": "assistant", "content": "done"})
    >>> Example("e/0", "e", "toy/1", messages=chat).exact
    False
    """

    id: str
    episode: str
    """Id of the attempt, which may have several conversations."""
    task_id: str
    repository: str = ""
    language: str = ""
    kind: str = ""
    source: str = ""
    """Its run, or published data set."""
    agent: str = ""
    policy: str = ""
    """Model's name, or the run that trained it."""
    reward: float | None = None
    passed: bool | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat Completions messages, ``reasoning_content`` included."""
    tools: tuple[Mapping[str, Any], ...] = ()
    ids: tuple[int, ...] = ()
    """Engine's tokens of the whole conversation, if known; else the trained policy's template renders the messages."""
    trained: tuple[bool, ...] = ()
    """Whether each of `ids` is trained."""
    tokenizer: str = ""

    @property
    def exact(self) -> bool:
        """Whether the engine's tokens are known."""
        return bool(self.ids)


def write_examples(path: Path, examples: Iterable[Example]) -> int:
    """Write `examples` to `path`, atomically; returns their number. Raises `UsageError`."""
    schema = _arrow_schema(importlib.import_module("pyarrow"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_table(path, schema, map(_example_row, examples))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}", fix="name another file with -o") from error


def read_examples(path: Path) -> list[Example]:
    """Read a file that `write_examples` wrote. Raises `UsageError` for others."""
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="name a file that crrl collect wrote") from None
    schema = _arrow_schema(arrow)
    if missing := sorted(set(schema.names) - set(table.column_names)):
        raise UsageError(f"{path} has no column {missing[0]!r}", fix="name a file that crrl collect wrote")
    try:
        rows = table.select(schema.names).cast(schema).to_pylist()
    except arrow.ArrowException as error:
        raise UsageError(f"{path}: {error}", fix="name a file that crrl collect wrote") from None
    return [_parse_example(path, number, row) for number, row in enumerate(rows, 1)]


def _example_row(example: Example) -> dict[str, Any]:
    row = {field.name: getattr(example, field.name) for field in fields(Example)}
    return row | {name: json.dumps(row[name]) for name in _JSON_COLUMNS}


def _parse_example(path: Path, number: int, row: dict[str, Any]) -> Example:
    def row_error(problem: str) -> UsageError:
        return UsageError(f"{path}, row {number}: {problem}", fix="write it again with crrl collect")

    if empty := [name for name, value in row.items() if value is None and name not in ("reward", "passed")]:
        raise row_error(f"{empty[0]} is empty")
    for name in _JSON_COLUMNS:
        try:
            row[name] = tuple(json.loads(row[name]))
        except (ValueError, TypeError, RecursionError) as error:
            raise row_error(f"{name} is not a JSON array: {error}") from None
        if not all(isinstance(value, dict) for value in row[name]):
            raise row_error(f"{name} holds something that is not an object")
    if not all(isinstance(message.get("role"), str) for message in row["messages"]):
        raise row_error("a message has no role")
    if len(row["ids"]) != len(row["trained"]) or None in row["ids"] or None in row["trained"]:
        raise row_error(f"{len(row['ids'])} ids but {len(row['trained'])} values of trained")
    if not math.isfinite(row["reward"] or 0.0):
        raise row_error(f"reward {row['reward']} is not a number")
    return Example(**row | {"ids": tuple(row["ids"]), "trained": tuple(row["trained"])})


def _arrow_schema(arrow: Any) -> Any:
    # fixed, not inferred from the rows, so that several files load as one data set
    types = {
        "reward": arrow.float64(),
        "passed": arrow.bool_(),
        "ids": arrow.list_(arrow.int32()),
        "trained": arrow.list_(arrow.bool_()),
    }
    return arrow.schema([(field.name, types.get(field.name, arrow.string())) for field in fields(Example)])
