"""Configuration: one typed TOML file, validated when loaded."""

from coderepairrl.config.loading import (
    inline,
    load,
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
from coderepairrl.config.settings import Setting, as_text, explain

__all__ = [
    "Config",
    "Setting",
    "as_text",
    "explain",
    "inline",
    "load",
    "load_run",
    "override",
    "parse_options",
    "parse_override",
    "run_of",
    "shipped",
    "to_toml",
    "validate",
]
