"""Configuration: one typed TOML file, validated when loaded."""

from coderepairrl.config.loading import (
    apply_overrides,
    load_config,
    load_run,
    parse_options,
    parse_override,
    run_folder,
    shipped,
    to_inline,
    to_toml,
    validate,
)
from coderepairrl.config.schema import Config
from coderepairrl.config.settings import Setting, explain, format_settings

__all__ = [
    "Config",
    "Setting",
    "apply_overrides",
    "explain",
    "format_settings",
    "load_config",
    "load_run",
    "parse_options",
    "parse_override",
    "run_folder",
    "shipped",
    "to_inline",
    "to_toml",
    "validate",
]
