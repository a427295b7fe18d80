"""Tables as text. Each format is a module of `export.formats` with a function `write(rows)`."""

import importlib
import pkgutil

from export import formats


def names():
    """The formats that exist."""
    return sorted(module.name for module in pkgutil.iter_modules(formats.__path__))


def export(rows, format):
    """`rows` (lists of cells) as text in that format."""
    if format not in names():
        raise ValueError(f"unknown format {format!r}, there are {', '.join(names())}")
    return importlib.import_module(f"export.formats.{format}").write(rows)
