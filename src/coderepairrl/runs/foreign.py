"""Foreign JSON: read whole, or rejected by a `ValueError` with the reason."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coderepairrl.errors import UsageError


def text(path: Path) -> str:
    """Text in `path`: UTF-8, with or without byte order mark or gzip. Raises `ValueError`."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8: no text file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(getattr(error, "strerror", None) or str(error)) from error


def value(written: str) -> Any:
    """Parse JSON. Raises `ValueError`, also for a repeated field, of which Python takes the last.

    >>> value('{"resolved": true, "resolved": false}')
    Traceback (most recent call last):
    ...
    ValueError: 'resolved' twice in one object
    """
    try:
        return json.loads(written, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deep") from None


def objects(path: Path, written: str, fix: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of JSON lines in `path`. Raises `UsageError` with `fix` for the first other line."""
    for number, line in enumerate(written.split("\n"), 1):  # not splitlines: a text may have U+2028
        if not line.strip():
            continue
        try:
            row = value(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not read as JSON: {error}", fix=fix) from None
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: no object", fix=fix)
        yield number, row


def stem(path: Path) -> str:
    """Name of `path` without its format's endings.

    >>> stem(Path("gpt-4.1.jsonl.gz"))
    'gpt-4.1'
    """
    name = path.name
    for ending in (".gz", ".json", ".jsonl"):
        name = name.removesuffix(ending) or name
    return name


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return fields
