"""Exact conversion of `coderepairrl.types` to JSON and back.

Bytes become text, or ``base64:...`` if not UTF-8. Floats keep every bit.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

PREFIX = "base64:"
_PLAIN = frozenset((str, int, float, bool, type(None)))
T = TypeVar("T")


def dump(value: Any) -> Any:
    """Convert to data for JSON.

    >>> from coderepairrl.types import Sampling
    >>> dump(Sampling(temperature=0.5))["temperature"]
    0.5
    >>> dump(b"text"), dump(bytes([255]))
    ('text', 'base64:/w==')
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return bytes_to_text(value)
    if dataclasses.is_dataclass(value):
        return {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): dump(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        if _PLAIN.issuperset(map(type, value)):  # ids and logprobs: most of a log
            return list(value)
        return [dump(item) for item in value]
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


def load(kind: type[T], data: Any) -> T:
    """Restore what `dump` converted. Raises ValueError or TypeError for other data."""
    return typing.cast(T, _load(kind, data))


def _load(kind: Any, data: Any) -> Any:
    if kind is Any or data is None:
        return data
    origin, arguments = _parts(kind)
    if origin in (typing.Union, types.UnionType):
        return _load(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        item = arguments[0]
        return tuple(data) if item in (int, float, str) else tuple(_load(item, part) for part in data)
    if origin is not None:  # mappings: str keys, plain values
        return dict(data)
    if kind is bytes:
        return text_to_bytes(data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(data, Mapping):
            raise TypeError(f"{kind.__name__} is a {type(data).__name__}")
        fields = _fields(kind)
        unknown = set(data) - set(fields)
        if unknown:
            raise ValueError(f"{kind.__name__} has no field {sorted(unknown)[0]!r}")
        return kind(**{name: _load(fields[name], part) for name, part in data.items()})
    return kind(data)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
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
        return armour(data)
    return armour(data) if text.startswith(PREFIX) else text


def text_to_bytes(text: str) -> bytes:
    """Invert `bytes_to_text`; surrogate escapes become bytes. Raises ValueError."""
    if not text.startswith(PREFIX):
        return text.encode("utf-8", "surrogateescape")
    try:
        return base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def armour(data: bytes) -> str:
    """Encode as ``base64:...``."""
    return PREFIX + base64.b64encode(data).decode("ascii")
