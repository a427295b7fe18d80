"""Configuration: one typed TOML file, validated when loaded."""

from coderepairrl.config.loading import (
    inline,
    load_config,
    load_run,
    override,
    parse_options,
    parse_override,
    run_of,
    shipped,
    to_toml,
    validate,
)
from coderepairrl.config.schema import Config
from coderepairrl.config.settings import Setting, explain, format_settings

__all__ = [
    "Config",
    "Setting",
    "explain",
    "format_settings",
    "inline",
    "load_config",
    "load_run",
    "override",
    "parse_options",
    "parse_override",
    "run_of",
    "shipped",
    "to_toml",
    "validate",
]
