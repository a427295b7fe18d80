"""``crrl compare``: is one policy better than another, and what would it take to know?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coderepairrl.cli.output import Format, Json, show


def compare(
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B [C]", help="RUN, RUN@NAME-STEP, outcome files, harness reports, 36/500, published:NAME"
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="resolved, reward, or any score or measure by its name")] = "resolved",
    common: Annotated[bool, typer.Option("--common", help="compare the tasks that all have, and no others")] = False,
    other_conditions: Annotated[
        bool, typer.Option("--other-conditions", help="though limits or environments differ")
    ] = False,
    cluster: Annotated[str, typer.Option(help="repository, or task: each stands for itself")] = "repository",
    margin: Annotated[float | None, typer.Option(help="points (or units) below which they count as equivalent")] = None,
    pass_at: Annotated[str, typer.Option(help="pass@k for these k, as 1,2,4,8; else as far as attempts go")] = "",
    pairs: Annotated[bool, typer.Option("--all-pairs", help="each against each, not all against the first")] = False,
    plan: Annotated[float | None, typer.Option(help="points to be shown: how many tasks and attempts it takes")] = None,
    discordance: Annotated[
        float | None, typer.Option(help="of the plan: the share of tasks on which they differ")
    ] = None,
    power: Annotated[float, typer.Option(help="of the plan, and of the smallest difference to be shown")] = 0.8,
    tasks: Annotated[Path | None, typer.Option(help="ids of all tasks: what a report leaves out is unresolved")] = None,
    published: Annotated[bool, typer.Option("--published", help="list numbers of others, with their sources")] = False,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Is one policy better than another on the same tasks? Paired tests, intervals, and what could have been seen."""
    from coderepairrl.report import verdict
    from coderepairrl.report.comparing import Arguments, answer

    arguments = Arguments(
        policies=policies or [],
        metric=metric,
        common=common,
        other_conditions=other_conditions,
        cluster=cluster,
        margin=margin,
        pass_at=pass_at,
        plan=plan,
        discordance=discordance,
        power=power,
        tasks=tasks,
        published=published,
        pairs=pairs,
    )
    show(verdict.render(answer(arguments), "json" if as_json else form))
