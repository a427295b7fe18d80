"""``crrl env``: environments of tasks."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from coderepairrl.cli.output import Json, Options, show, table
from coderepairrl.errors import ExitCode
from coderepairrl.printable import logged

app = typer.Typer(name="env", help="Verify and compare environments of tasks.", no_args_is_help=True)

Environment = Annotated[str, typer.Argument(help="folder, name in the cache, or image name")]


@app.command("verify")
def env_verify(
    source: Annotated[str, typer.Argument(help="a task source, or module:Class")],
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Verify that the environments and images of SOURCE's tasks exist and are as built, reading every file."""
    from coderepairrl import config
    from coderepairrl.checks import data
    from coderepairrl.environments import states

    environments = states(list(data.load(source, config.parse_options(options or [], "path"))))
    lines = {each.name: f"{each.state:<10} {each.tasks} tasks" for each in environments}
    show(
        json.dumps([each._asdict() for each in environments]) if as_json else table(lines) or "no environment is needed"
    )
    for fix in dict.fromkeys(each.fix for each in environments if each.fix):
        print(logged(f"fix: {fix}"), file=sys.stderr)
    if any(each.state != "as built" for each in environments):
        raise typer.Exit(ExitCode.RUN_FAILED)


@app.command("diff")
def env_diff(first: Environment, second: Environment, as_json: Json = False) -> None:
    """Compare two environments or images: Python, packages, specification or settings, files. Exit code 1 if they
    differ."""
    from coderepairrl.environments import differences, record

    differing = differences(record(first), record(second))
    lines = [f"{each.fact}: {each.first or '-'} | {each.second or '-'}" for each in differing]
    show(json.dumps([each._asdict() for each in differing]) if as_json else "\n".join(lines) or "no difference")
    if differing:
        raise typer.Exit(ExitCode.RUN_FAILED)
