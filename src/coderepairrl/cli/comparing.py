"""``crrl compare``: paired comparison of policies."""

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
    metric: Annotated[str, typer.Option(help="resolved, reward, or the name of a reward or metric")] = "resolved",
    common: Annotated[bool, typer.Option("--common", help="compare only tasks that all have")] = False,
    other_conditions: Annotated[
        bool, typer.Option("--other-conditions", help="compare in spite of different limits or environments")
    ] = False,
    cluster: Annotated[str, typer.Option(help="unit of independence: repository, or task")] = "repository",
    margin: Annotated[float | None, typer.Option(help="points (or units) up to which policies count as equal")] = None,
    pass_at: Annotated[str, typer.Option(help="k of pass@k, as 1,2,4,8 (default: all that attempts allow)")] = "",
    pairs: Annotated[bool, typer.Option("--all-pairs", help="compare all pairs, not only with the first")] = False,
    plan: Annotated[
        float | None, typer.Option(help="points to detect: print only the tasks and attempts needed")
    ] = None,
    discordance: Annotated[
        float | None, typer.Option(help="for --plan: share of tasks that only one policy solves")
    ] = None,
    power: Annotated[float, typer.Option(help="power of --plan and of the smallest detectable difference")] = 0.8,
    tasks: Annotated[
        Path | None, typer.Option(help="file of the ids of all tasks; those not in a report are unresolved")
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="list published numbers with sources")] = False,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Compare policies on the same tasks: paired tests, intervals, and detectable differences."""
    from coderepairrl.report import verdict
    from coderepairrl.report.comparison import Question

    question = Question(
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
    show(verdict.render(verdict.answer(policies or [], question), "json" if as_json else form))
