"""``crrl config``, ``check``, ``agents``: settings, prerequisites, exams, and agents' programs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from coderepairrl.cli.output import Json, Options, Overrides, run_interruptible, show
from coderepairrl.errors import ExitCode, UsageError

app = typer.Typer(name="agents", help="List agents; install their programs.", no_args_is_help=True)


def config(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="as for `crrl train` (default: show defaults)")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Print every setting with its value, default, and origin: a preset, a file, or an override."""
    from coderepairrl import config as configs
    from coderepairrl.plan.terms import check_names

    settings = configs.list_settings(file, overrides or [])
    show(json.dumps([setting._asdict() for setting in settings]) if as_json else configs.format_settings(settings))
    if file is not None:
        check_names(configs.load_config(file, overrides or []))


def check(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="sandbox, engine, agent, reward, tasks, environments, model, crash (default: the machine)",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="an implementation, module:Class, a task source, a model folder, or the process to kill",
        ),
    ] = None,
    options: Options = None,
    every: Annotated[bool, typer.Option("--all", help="with KIND sandbox: every sandbox that works here")] = False,
    as_json: Json = False,
) -> None:
    """Check what this machine has and lacks; with KIND NAME, examine one implementation."""
    from coderepairrl import config
    from coderepairrl.checks import exams
    from coderepairrl.checks.machine import examine_machine, format_finding
    from coderepairrl.registry import Finding

    if every and (kind != "sandbox" or name is not None or options):
        raise UsageError("--all is for sandboxes, without name and options", fix="crrl check sandbox --all")
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            show(format_finding(finding))

    async def add_all(exam: AsyncIterator[Finding]) -> None:
        async for finding in exam:
            add(finding)

    if every:
        run_interruptible(add_all(exams.examine_sandboxes()))
    elif kind is not None:
        example_key = "path" if kind in ("tasks", "environments") else "KEY"
        run_interruptible(add_all(exams.run_exam(kind, name, config.parse_options(options or [], example_key))))
    else:
        for finding in examine_machine():
            add(finding)
    if as_json:
        show(json.dumps([finding._asdict() for finding in findings]))
    if not all(finding.ok for finding in findings if finding.required):
        raise typer.Exit(ExitCode.PREREQUISITE if kind is None else ExitCode.RUN_FAILED)


@app.command("list")
def agents_list(as_json: Json = False) -> None:
    """List shipped agents: where they run, which API they use, and whether their programs are installed."""
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

    folder, versions = recipe.install_agent(name)
    show(json.dumps({"agent": recipe.agent_label(name), "folder": str(folder), **versions}) if as_json else folder)
