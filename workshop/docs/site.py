"""Pages that `make docs` generates from the source: commands, protocols and types.

Called by mkdocs (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.core import TyperCommand, TyperGroup

from coderepairrl import protocols, types
from coderepairrl.cli import app

NAMED = re.compile(r"(?<![`\w/])docs/(\w+)/([\w-]+)\.md")
"""The name of a page in plain text, such as docs/guides/tasks.md; not in code or in a longer path."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages of the reference."""
    pages = {"protocols": module_page(protocols), "types": module_page(types)}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add every command to its page, and turn page names in help and settings (docs/guides/tasks.md) into links."""
    if page.file.src_uri == "reference/commands.md":
        markdown = f"{markdown}\n{commands()}"
    elif not page.file.src_uri.startswith("reference/config"):
        return markdown
    return NAMED.sub(r"[\2](../\1/\2.md)", markdown)


def commands() -> str:
    """Every command of `crrl`, with its arguments and options, as Markdown."""
    return "\n".join(_command(typer.main.get_command(app), "crrl"))


def _command(command: object, name: str) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for key, child in command.commands.items():
            yield from _command(child, f"{name} {key}")
        return
    assert isinstance(command, TyperCommand)
    context = typer.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n\n```\n{name} {usage}\n```\n"
    records = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    yield "| argument or option | meaning |\n|---|---|"
    yield from (
        f"| `{left.replace(' <list[str]>', '')}` | {right} |" for left, right in records if "--help" not in left
    )
    yield ""


def module_page(module: ModuleType) -> str:
    """A page with a module's docstring and the source of its public classes."""
    source = inspect.getsource(module)
    title = module.__name__.rpartition(".")[2].capitalize()
    parts = [
        f"# {title}",
        inspect.cleandoc(module.__doc__ or ""),
        f"Source: `src/{module.__name__.replace('.', '/')}.py`.",
    ]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            code = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
            parts.append(f"## {node.name}\n\n```python\n{code}\n```")
    return "\n\n".join(parts) + "\n"
