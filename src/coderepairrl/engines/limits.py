"""Checks of options and requests that engines share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coderepairrl.errors import ConfigError
from coderepairrl.types import Sampling


def check_integer_option(options: Mapping[str, Any], name: str, least: int, most: int | None = None) -> None:
    """Raise `ConfigError` unless the option is absent or an integer from `least` to `most`."""
    value = options.get(name)
    if value is not None and (type(value) is not int or value < least or (most is not None and value > most)):
        size = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"engine.options.{name} must be a whole number {size}, not {value!r}")


def check_positive_option(options: Mapping[str, Any], name: str) -> None:
    """Raise `ConfigError` unless the option is absent or a finite number above 0."""
    value = options.get(name)
    if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise ConfigError(f"engine.options.{name} must be a number above 0, not {value!r}")


def check_request(ids: Sequence[int], sampling: Sampling, *, context: int, vocabulary: int) -> None:
    """Raise ValueError for a prompt that leaves no room, ids outside the vocabulary, and settings out of range."""
    if not 1 <= len(ids) < context:
        raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in a context of {context}")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(f"ids reach from {min(ids)} to {max(ids)}, the vocabulary from 0 to {vocabulary - 1}")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens} must be at least 1")
    if not 0.0 <= sampling.temperature < math.inf:
        raise ValueError(f"temperature={sampling.temperature} is not a finite number >= 0")
    if not (0.0 < sampling.top_p <= 1.0 and 0.0 <= sampling.min_p <= 1.0 and sampling.top_k >= 0):
        raise ValueError(f"top_p={sampling.top_p}, min_p={sampling.min_p}, top_k={sampling.top_k}: out of range")
