"""Conversations to learn from, as one Parquet file: what `crrl collect` writes and `crrl sft` reads."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.runs.storage import replace_file

NAME = "examples.parquet"
"""The file of this name in a run folder holds what was selected of it."""
_ROWS = 256
"""Rows that are held in memory while they are written, and form a row group."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation of an attempt at a task, or of a published trajectory.

    >>> said = ({"role": "user", "content": "fix it"}, {"role": "assistant", "content": "done"})
    >>> Example("e/0", "e", "toy/1", messages=said).exact
    False
    """

    id: str
    """Of this row."""
    episode: str
    """Of the attempt, which several rows share where it had several conversations."""
    task_id: str
    repository: str = ""
    """``OWNER/NAME``, where it is known."""
    language: str = ""
    kind: str = ""
    source: str = ""
    """The run or the import that it is from."""
    agent: str = ""
    policy: str = ""
    """Who acted: a model's name, or the run that trained it."""
    reward: float | None = None
    passed: bool | None = None
    """Whether the patch passed the task's checks; None where none were run."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """In the schema of Chat Completions, ``reasoning_content`` included."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that were offered."""
    ids: tuple[int, ...] = ()
    """The tokens of the whole conversation as the engine had them. Empty where no exact tokens are known: then the
    messages are rendered by the template of the policy that is trained."""
    trained: tuple[bool, ...] = ()
    """Of each of `ids`, whether the policy sampled it and it is learned from."""
    tokenizer: str = ""
    """Digest of the tokenizer and template that made `ids`."""

    @property
    def exact(self) -> bool:
        """Whether the tokens are those of the engine that sampled them."""
        return bool(self.ids)


def write_examples(path: Path, examples: Iterable[Example]) -> int:
    """Write `examples` to `path`, which is there whole or not at all; returns how many.

    `messages` and `tools` are JSON in a column of text. Raises OSError where it cannot be written.
    """
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    schema, count, rest = _schema(arrow), 0, iter(examples)
    with replace_file(path) as temporary, parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        while some := [_row(example) for example in islice(rest, _ROWS)]:
            writer.write_table(arrow.Table.from_pylist(some, schema=schema))
            count += len(some)
    return count


def read_examples(path: Path) -> list[Example]:
    """The examples of a file that `write_examples` wrote. Raises `UsageError` for any other."""
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="name a file that crrl collect wrote") from None
    schema = _schema(arrow)
    if missing := sorted(set(schema.names) - set(table.column_names)):
        raise UsageError(f"{path} has no column {missing[0]!r}", fix="name a file that crrl collect wrote")
    try:
        rows = table.select(schema.names).cast(schema).to_pylist()
    except arrow.ArrowException as error:
        raise UsageError(f"{path}: {error}", fix="name a file that crrl collect wrote") from None
    return [_example(path, number, row) for number, row in enumerate(rows, 1)]


_JSON = ("messages", "tools")


def _row(example: Example) -> dict[str, Any]:
    row = {field.name: getattr(example, field.name) for field in fields(Example)}
    return row | {name: json.dumps(row[name]) for name in _JSON}


def _example(path: Path, number: int, row: dict[str, Any]) -> Example:
    def wrong(what: str) -> UsageError:
        return UsageError(f"{path}, row {number}: {what}", fix="write it again with crrl collect")

    if empty := [name for name, value in row.items() if value is None and name not in ("reward", "passed")]:
        raise wrong(f"{empty[0]} is empty")
    for name in _JSON:
        try:
            row[name] = tuple(json.loads(row[name]))
        except (ValueError, TypeError, RecursionError) as error:
            raise wrong(f"{name} is no JSON array: {error}") from None
        if not all(isinstance(each, dict) for each in row[name]):
            raise wrong(f"{name} holds something that is no object")
    if not all(isinstance(each.get("role"), str) for each in row["messages"]):
        raise wrong("a message has no role")
    if len(row["ids"]) != len(row["trained"]) or None in row["ids"] or None in row["trained"]:
        raise wrong(f"{len(row['ids'])} ids and {len(row['trained'])} marks of what is trained")
    if not math.isfinite(row["reward"] or 0.0):
        raise wrong(f"reward {row['reward']} is no number")
    return Example(**row | {"ids": tuple(row["ids"]), "trained": tuple(row["trained"])})


def _schema(arrow: Any) -> Any:
    """Of every file the same, whatever is in it: several load as one data set."""
    types = {
        "reward": arrow.float64(),
        "passed": arrow.bool_(),
        "ids": arrow.list_(arrow.int32()),
        "trained": arrow.list_(arrow.bool_()),
    }
    return arrow.schema([(field.name, types.get(field.name, arrow.string())) for field in fields(Example)])
