"""Exact conversion of `coderepairrl.types` to JSON and back, and reading of foreign JSON.

Bytes become text, or ``base64:...`` if not UTF-8. Floats keep every bit. Foreign JSON is read whole, or rejected by a
`ValueError` with the reason.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import gzip
import hashlib
import json
import types
import typing
import zlib
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from coderepairrl.errors import UsageError

BASE64_PREFIX = "base64:"
_JSON_TYPES = frozenset((str, int, float, bool, type(None)))
T = TypeVar("T")


def dump(value: Any) -> Any:
    """Convert to data for JSON.

    >>> from coderepairrl.types import Sampling
    >>> dump(Sampling(temperature=0.5))["temperature"]
    0.5
    >>> dump(b"text"), dump(bytes([255]))
    ('text', 'base64:/w==')
    """
    if type(value) in _JSON_TYPES:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str | int | float):  # a subclass, such as numpy's float64
        return value
    if isinstance(value, bytes):
        return bytes_to_text(value)
    if dataclasses.is_dataclass(value):
        return {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): dump(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        if _JSON_TYPES.issuperset(map(type, value)):  # ids and logprobs: most of a log
            return list(value)
        return [dump(item) for item in value]
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


def restore(kind: type[T], data: Any) -> T:
    """Restore what `dump` converted. Raises ValueError or TypeError for other data."""
    return typing.cast(T, _restore(kind, data))


def _restore(kind: Any, data: Any) -> Any:
    if kind is Any or data is None:
        return data
    origin, arguments = _type_parts(kind)
    if origin in (typing.Union, types.UnionType):  # `X | None`
        return _restore(next(each for each in arguments if each is not type(None)), data)
    if origin is tuple:
        item = arguments[0]
        return tuple(data) if item in (int, float, str) else tuple(_restore(item, part) for part in data)
    if origin is not None:  # a mapping of str to plain values
        return dict(data)
    if kind is bytes:
        return text_to_bytes(data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(data, Mapping):
            raise TypeError(f"{kind.__name__} must be an object, not a {type(data).__name__}")
        fields = _fields(kind)
        unknown = set(data) - set(fields)
        if unknown:
            raise ValueError(f"{kind.__name__} has no field {sorted(unknown)[0]!r}")
        return kind(**{name: _restore(fields[name], part) for name, part in data.items()})
    return kind(data)


@cache
def _type_parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@cache
def _fields(kind: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def bytes_to_text(data: bytes) -> str:
    """Decode UTF-8, else encode as ``base64:...``.

    >>> bytes_to_text("é\\n".encode()), bytes_to_text(b"\\xff"), text_to_bytes("base64:/w==")
    ('é\\n', 'base64:/w==', b'\\xff')
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return encode_base64(data)
    return encode_base64(data) if text.startswith(BASE64_PREFIX) else text


def text_to_bytes(text: str) -> bytes:
    """Invert `bytes_to_text`; surrogate escapes become bytes. Raises ValueError."""
    if not text.startswith(BASE64_PREFIX):
        return text.encode("utf-8", "surrogateescape")
    try:
        return base64.b64decode(text.removeprefix(BASE64_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def encode_base64(data: bytes) -> str:
    """Encode as ``base64:...``."""
    return BASE64_PREFIX + base64.b64encode(data).decode("ascii")


def digest_json(value: Any) -> str:
    """SHA-256 (hexadecimal) of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_foreign_text(path: Path) -> str:
    """Text in `path`: UTF-8, with or without byte order mark or gzip. Raises `ValueError`."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8: no text file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(getattr(error, "strerror", None) or str(error)) from error


def parse_foreign_json(written: str) -> Any:
    """Parse JSON. Raises `ValueError`, also for a repeated field, of which Python takes the last.

    >>> parse_foreign_json('{"resolved": true, "resolved": false}')
    Traceback (most recent call last):
    ...
    ValueError: 'resolved' twice in one object
    """
    try:
        return json.loads(written, object_pairs_hook=_reject_repeated_fields)
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_foreign_lines(path: Path, written: str, fix: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of JSON lines in `path`. Raises `UsageError` with `fix` for a line without one."""
    for number, line in enumerate(written.split("\n"), 1):  # not splitlines: a text may have U+2028
        if not line.strip():
            continue
        try:
            row = parse_foreign_json(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not read as JSON: {error}", fix=fix) from None
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: not an object", fix=fix)
        yield number, row


def file_stem(path: Path) -> str:
    """Name of `path` without its format's endings.

    >>> file_stem(Path("gpt-4.1.jsonl.gz"))
    'gpt-4.1'
    """
    name = path.name
    for ending in (".gz", ".json", ".jsonl"):
        name = name.removesuffix(ending) or name
    return name


def _reject_repeated_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return fields
