"""``crrl hello``, ``train``, ``sft``, ``config``: runs and their settings."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from coderepairrl.cli.output import DryRun, Json, Overrides, format_nested, show

if TYPE_CHECKING:
    from coderepairrl.config import Config
    from coderepairrl.runs import RunFolder

RunFile = Annotated[
    str, typer.Argument(metavar="FILE", help="a TOML file, a shipped config, or a run folder to resume")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue the run where it stopped")]


def hello(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [KEY=VALUE]...", help="settings; with --resume first the run (default: runs/hello)"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run where it stopped")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Try the whole loop on this machine: reinforcement learning of a tiny policy."""
    from coderepairrl.stages import hello as app

    if dry_run:
        _show_plan(*app.load_settings(overrides or [], resume=resume), as_json=as_json)
        return
    show(app.hello(overrides or [], resume=resume, as_json=as_json))


def _show_plan(resolved: Config, folder: RunFolder, *, as_json: bool) -> None:
    """Print the plan as far as it is known. Raises its problem."""
    from coderepairrl import stages

    plan, problem = stages.dry_run(resolved, folder)
    show(json.dumps(plan) if as_json else format_nested(plan))
    if problem is not None:
        raise problem


def train(
    file: RunFile, overrides: Overrides = None, resume: Resume = False, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Train a policy: tasks, groups of episodes, rewards, advantages, update, next step."""
    from coderepairrl import stages

    resolved, folder = stages.load_settings(file, overrides or [], resume=resume)
    if dry_run:
        _show_plan(resolved, folder, as_json=as_json)
        return
    result = asyncio.run(stages.run_training(resolved, resume=resume, folder=folder))
    show(json.dumps(result) if as_json else format_nested(result))


def sft(
    file: RunFile, overrides: Overrides = None, resume: Resume = False, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Fine-tune a policy on examples of `crrl collect`, or on a teacher's distribution over them."""
    from coderepairrl.stages import sft as stage

    plan, folder = stage.plan_sft(file, overrides or [], resume=resume, fetches=not dry_run)
    if dry_run:
        summary = stage.as_shown(plan, folder)
        show(json.dumps(summary) if as_json else format_nested(summary))
        return
    result = asyncio.run(stage.sft(plan, folder, resume=resume))
    show(json.dumps(result) if as_json else format_nested(result))


def config(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="as for `crrl train` (default: show defaults)")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Print every setting with its value, default, and origin: a preset, a file, or an override."""
    from coderepairrl import config as configs
    from coderepairrl.plan.names import check_names

    settings = configs.explain(file, overrides or [])
    show(json.dumps([setting._asdict() for setting in settings]) if as_json else configs.format_settings(settings))
    if file is not None:
        check_names(configs.load_config(file, overrides or []))
