"""``crrl agents``: agents that work on tasks."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from coderepairrl.cli.output import Json, show

app = typer.Typer(name="agents", help="List agents; install their programs.", no_args_is_help=True)


@app.command("list")
def agents_list(as_json: Json = False) -> None:
    """List shipped agents: where they work, what they speak, and whether their programs are installed."""
    from coderepairrl.agents import recipe

    entries = recipe.list_agents()
    show(json.dumps([entry._asdict() for entry in entries]) if as_json else recipe.format_agents(entries))


@app.command("install")
def agents_install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="an agent of `crrl agents list`, or a recipe file")],
    as_json: Json = False,
) -> None:
    """Install an agent's program into a separate environment, which sandboxes see read-only."""
    from coderepairrl.agents import recipe

    folder, versions = recipe.install_named(name)
    show(json.dumps({"agent": recipe.agent_label(name), "folder": str(folder), **versions}) if as_json else folder)
