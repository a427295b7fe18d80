"""Base class of sections, and short ways to write values."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Base of all sections: rejects unknown keys; values are final."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


Short = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
"""A section written as its `name`."""
Several = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
"""A list written as its one item."""
Words = BeforeValidator(lambda value: [word.strip() for word in value.split(",")] if isinstance(value, str) else value)
"""A list written with commas."""
Weights = BeforeValidator(lambda value: {value: 1.0} if isinstance(value, str) else value)
"""Weights written as one name, with weight 1."""
Switch = BeforeValidator(lambda value: ({} if value else None) if isinstance(value, bool) else value)
"""A section written as `true` (defaults) or `false` (none)."""
