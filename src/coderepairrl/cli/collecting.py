"""``crrl collect``, ``select``: trajectories to learn from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from coderepairrl.cli.output import (
    Agents,
    Json,
    KeyEnv,
    Limit,
    ModelName,
    NewRun,
    Policies,
    PoliciesAtOnce,
    PriceList,
    Resume,
    Settings,
    note,
    show,
)


def collect(
    what: Annotated[
        str, typer.Argument(help="a TOML file, a shipped config, a run, or a task source; with --resume a collection")
    ],
    given: Settings = None,
    policy: Policies = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="attempts per task (default: 4)")] = None,
    limit: Limit = None,
    agent: Agents = None,
    output: NewRun = None,
    resume: Resume = False,
    model_name: ModelName = "",
    key_env: KeyEnv = None,
    prices: PriceList = None,
    jobs: PoliciesAtOnce = 1,
    as_json: Json = False,
) -> None:
    """Attempt the held-out share of training tasks with any policy, and keep what is worth learning from."""
    from coderepairrl.apps import collect as collecting
    from coderepairrl.apps import evaluate as evaluating
    from coderepairrl.plan.model import relayed

    settings = [*(given or []), *relayed(model_name, key_env)]
    more: dict[str, Any] = {"limit": limit, "agents": agent or [], "output": output, "resume": resume, "prices": prices}
    more |= {"attempts": attempts, "collects": True}
    if policy and len(policy) > 1:
        planned = evaluating.plan_each(policy, what, settings, **more)
    else:
        evaluating.require_several(jobs)
        planned = [evaluating.plan(what, settings, policy=policy[0] if policy else None, **more)]
    result = asyncio.run(collecting.collect(planned, resume=resume, jobs=jobs, say=note))
    show(json.dumps(result) if as_json else collecting.as_text(result))


def select(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE... [KEEP=VALUE]...", help="runs, and files of examples; filters"),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file or folder (default for one run: its examples)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Keep attempts that are worth learning from, by filters keep.NAME=VALUE."""
    from coderepairrl.apps import collect as collecting
    from coderepairrl.errors import UsageError

    paths = [Path(each) for each in sources if "=" not in each]
    if not paths:
        raise UsageError("no run is named", fix="crrl select RUN... [keep.NAME=VALUE]...")
    result = collecting.select(paths, [each for each in sources if "=" in each], output)
    show(json.dumps(result) if as_json else collecting.as_text(result))
