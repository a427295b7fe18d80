"""Configuration: one typed TOML file, validated when loaded; its settings with value, default and origin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.config.loading import (
    apply_overrides,
    find_run_folder,
    load_config,
    load_run,
    parse_options,
    parse_override,
    read_layers,
    shipped_configs,
    to_inline,
    to_toml,
    validate_config,
)
from coderepairrl.config.schema import Config, Run

__all__ = [
    "Config",
    "Setting",
    "apply_overrides",
    "find_run_folder",
    "format_settings",
    "list_settings",
    "load_config",
    "load_run",
    "parse_options",
    "parse_override",
    "shipped_configs",
    "to_inline",
    "to_toml",
    "validate_config",
]
REQUIRED = "required"
"""Placeholder for a missing default."""


class Setting(NamedTuple):
    """Setting by dotted key; a `default` of None is unset.

    `source` is ``default``, ``preset NAME``, ``file PATH`` or ``override KEY=VALUE``.
    """

    key: str
    value: Any
    default: Any
    source: str


def list_settings(source: str | Path | None = None, overrides: Sequence[str] = ()) -> list[Setting]:
    """List settings of `source` with `overrides`, or the defaults, in reference order. Raises `ConfigError`."""
    defaults = _flatten_keys(Config(run=Run(name=REQUIRED)).model_dump(mode="json"))
    if source is None:
        return [Setting(key, None if value == REQUIRED else value, value, "default") for key, value in defaults.items()]
    named_layers = [(layer.name, layer.data) for layer in read_layers(source)]
    named_layers += [(f"override {text}", parse_options([text])) for text in overrides]
    values = _flatten_keys(load_config(source, overrides).model_dump(mode="json"))
    origins: dict[str, str] = {}
    for name, data in named_layers:
        for key in _flatten_keys(data):  # ``engine = "tiny"`` replaces the whole table
            origins = {other: origin for other, origin in origins.items() if not other.startswith(f"{key}.")}
            origins[key] = name
    return [Setting(key, value, defaults.get(key), _find_setting_origin(key, origins)) for key, value in values.items()]


def format_settings(settings: Sequence[Setting]) -> str:
    """Format as a table."""
    rows = [("setting", "value", "default", "set by")]
    rows += [
        (key, _format_setting_value(value), _format_setting_value(default), source)
        for key, value, default, source in settings
    ]
    widths = [min(44, max(map(len, column))) for column in zip(*rows, strict=True)][:3]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _format_setting_value(value: Any) -> str:
    if value is None:
        return "unset"
    return json.dumps(value) if value != REQUIRED else REQUIRED


def _find_setting_origin(key: str, origins: Mapping[str, str]) -> str:
    """Origin of `key` or its table: ``engine = "tiny"`` sets ``engine.name``."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return "default"


def _flatten_keys(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            leaves |= _flatten_keys(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves
