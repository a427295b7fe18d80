"""What sections have in common, and short ways to write a value."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are final."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


def _short(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _words(value: Any) -> Any:
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def _weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


def _switch(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


Short = BeforeValidator(_short)
"""A section written as its `name`."""
Several = BeforeValidator(_several)
"""A list written as its one item."""
Words = BeforeValidator(_words)
"""A list written with commas."""
Weights = BeforeValidator(_weights)
"""Weights written as the one name that has weight 1."""
Switch = BeforeValidator(_switch)
"""A section with defaults written as `true`, none as `false`."""
