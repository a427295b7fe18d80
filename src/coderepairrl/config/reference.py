"""Write docs/reference/config.md and its further pages: ``python -m coderepairrl.config.reference docs/reference``."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from coderepairrl.config import shipped_configs
from coderepairrl.config.schema import Config

_HEAD = """# Configuration

<!-- Written by `python -m coderepairrl.config.reference docs/reference`; a test keeps it current. -->

One TOML file with the sections below. `KEY=VALUE` on the command line overrides it: `train.lr=3e-6`, `engine=tiny`,
`reward={patch_edits=0.6,tests=0.4}`.

- **`extends`** starts from another file (`extends = "other.toml"`, which must not extend another) or from a shipped
  configuration (`extends = "thesis-8b"`). Each setting of your file replaces that of the extended one; `reward` and
  `options` are replaced as a whole. With another `tasks.source`, or `tasks.sources` in its place, the old one's options
  are dropped, also in `eval`.
- **To see the result**: `crrl config FILE` prints every setting, its value, its default and where it was set;
  `crrl train FILE --dry-run` checks all of it and prints the plan.
- **Mistakes** are reported all at once, each with its fix (exit code 2; 3 if only the machine lacks something).
- **Secrets** in clear are refused, since a configuration is printed and kept in the run folder: `options` and arguments
  whose name ends in `key`, `token`, `password`, `secret` or `authorization`, URLs with a login, and keys of well-known
  services. Name an environment variable instead (`engine.options.key_env` of a remote model).
"""


class _Page(NamedTuple):
    title: str
    sections: tuple[str, ...]


_PAGES = {
    "config-tasks": _Page(
        "Settings of attempts", ("tasks", "curriculum", "agent", "sandbox", "reward", "rollout", "kinds")
    ),
    "config-train": _Page("Settings of learning", ("data", "train")),
    "config-eval": _Page("Settings of measuring", ("eval", "keep")),
}
"""Pages beside ``config``, which has the other sections."""


def format_config_reference() -> dict[str, str]:
    """All settings as Markdown, by name of the page."""
    elsewhere = [name for page in _PAGES.values() for name in page.sections]
    names = ", ".join(f"`{name}`" for name in shipped_configs())
    links = "; ".join(
        f"[{', '.join(f'`{name}`' for name in page.sections)}]({file}.md)" for file, page in _PAGES.items()
    )
    head = [_HEAD, f"Shipped configurations, usable by name: {names}.\n"]
    head.append(f"Further sections: {links}.\n")
    pages = {"config": [*head, *_format_sections([name for name in Config.model_fields if name not in elsewhere])]}
    for file, page in _PAGES.items():
        pages[file] = [f"# {page.title}\n", "<!-- Written with config.md. -->\n", *_format_sections(page.sections)]
    return {file: "\n".join(parts) for file, parts in pages.items()}


def _format_sections(names: Iterable[str]) -> list[str]:
    parts = list[str]()
    for name in names:
        field = Config.model_fields[name]
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            parts += [
                _format_section(name, model),
                *(_format_section(f"{name}.{key}", inner) for key, inner in _inner_sections(model)),
            ]
        elif get_origin(model) is dict and issubclass(inner := get_args(model)[1], BaseModel):
            parts.append(_format_section(f"{name}.NAME", inner))
        else:
            default = field.get_default()
            if isinstance(default, dict):
                default_text, heading = f"`{default}`" if default else "empty", f"[{name}]"
            else:
                default_text, heading = f"`{_format_default(default)}`", name
            parts.append(f"## {heading}\n\n{field.description}\nDefault: {default_text}.\n")
    return parts


def _format_section(name: str, model: type[BaseModel]) -> str:
    return f"## [{name}]\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n{_format_settings_table(model)}"


def _inner_sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield key, kind


def _format_settings_table(model: type[BaseModel]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if field.default is PydanticUndefined:
            default_text = "required"
        elif field.default is None:
            default_text = "unset"
        elif isinstance(field.default, BaseModel):
            default_text = "below"
        else:
            default_text = f"`{_format_default(field.default)}`"
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {_describe_type(field.annotation)} | {default_text} | {meaning} |")
    return "\n".join(rows) + "\n"


def _describe_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) in (types.UnionType, Union):  # a Union if it has a Literal
        return _describe_type(next(part for part in get_args(kind) if part is not type(None)))
    if get_origin(kind) is tuple:
        return "list" if Ellipsis in get_args(kind) else "pair"
    if get_origin(kind) is dict or issubclass(kind, BaseModel):
        return "table"
    return {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}[kind.__name__]


def _format_default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    for file, text in format_config_reference().items():
        Path(sys.argv[1], f"{file}.md").write_text(text)
