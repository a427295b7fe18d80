"""Checks of engine options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from coderepairrl.errors import ConfigError


def check_whole(options: Mapping[str, Any], name: str, least: int, most: int | None = None) -> None:
    """Raise `ConfigError` unless the option is absent or an integer from `least` to `most`."""
    value = options.get(name)
    if value is not None and (type(value) is not int or value < least or (most is not None and value > most)):
        size = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"engine.options.{name} must be a whole number {size}, not {value!r}")


def check_positive(options: Mapping[str, Any], name: str) -> None:
    """Raise `ConfigError` unless the option is absent or a finite number above 0."""
    value = options.get(name)
    if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise ConfigError(f"engine.options.{name} must be a number above 0, not {value!r}")
