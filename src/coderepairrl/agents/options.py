"""Validation of an agent's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from coderepairrl.errors import ConfigError
from coderepairrl.registry import nearest

T = TypeVar("T")


def parse(cls: type[T], agent: str, options: Mapping[str, Any]) -> T:
    """Build the dataclass `cls`, checking names and types.

    Raises `ConfigError` with the nearest option, or the location of an invalid value.
    """
    from pydantic import TypeAdapter, ValidationError

    option_names = [option.name for option in fields(cls)]  # type: ignore[arg-type]
    for option in options:
        if option not in option_names:
            raise ConfigError(f"agent {agent!r} has no option {option!r}", fix=nearest(option, option_names))
    try:
        return TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("agent", "options", *first["loc"])))
        raise ConfigError(f"{where}: {first['msg']}, not {first['input']!r}") from error
