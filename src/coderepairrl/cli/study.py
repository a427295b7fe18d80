"""``crrl study``: a grid of arms and seeds, and what it says."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from coderepairrl.cli.output import Format, Json, note, run, show
from coderepairrl.errors import RunError, UsageError


def study(
    file: Annotated[str, typer.Argument(help="a TOML file with arms and seeds, or a shipped study")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check all arms, and say what they cost")] = False,
    table: Annotated[bool, typer.Option("--table", help="what the runs that are done say; starts nothing")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time")] = 1,
    number: Annotated[
        int | None, typer.Option("--run", min=1, help="only policy N of the grid, as a task of a Slurm array does")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="write the jobs, and print how to submit them")] = False,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="on this Ray cluster; `local` is one here")] = None,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Arms and seeds from one file: train and evaluate what is not done yet, and answer its questions in a table."""
    from coderepairrl.report import verdict
    from coderepairrl.runs.folder import write_atomic
    from coderepairrl.stages import study as studies
    from coderepairrl.stages import study_run

    if sum([dry_run, table, number is not None, slurm, ray is not None]) > 1:
        raise UsageError("these options exclude each other", fix="one of --dry-run, --table, --run, --slurm, --ray")
    form = "json" if as_json else form
    planned = studies.read(file)
    if slurm:
        show(study_run.slurm(planned, note))
        return
    if dry_run:
        costs, problem = study_run.check(planned)
        data = verdict.Result(
            [], [study_run.costs_table(planned, costs), planned.arms()], study_run.costs_notes(planned), {}
        )
        show(json.dumps([asdict(each) for each in costs]) if form == "json" else verdict.render(data, form).strip())
        if problem is not None:
            raise problem
        return
    error: RunError | None = None
    units = planned.units()
    if number is not None:
        if number > len(units):
            raise UsageError(f"the study has {len(units)} policies to run", fix=f"--run 1 to --run {len(units)}")
        if failures := run(study_run.run_here(planned, [units[number - 1]], 1, note)):
            raise study_run.failed(failures, planned)
        return
    if ray is not None:
        if lines := study_run.on_ray(planned, ray, note):
            error = RunError("\n".join(lines), fix="the same command goes on with what is not done")
    elif not table:
        study_run.require(planned)
        if failures := run(study_run.run_here(planned, units, jobs, note)):
            error = study_run.failed(failures, planned)
    found = study_run.table(planned)
    if not table or planned.folder.is_dir():
        for name, text in (("report.md", "markdown"), ("report.json", "json")):
            write_atomic(planned.folder / name, f"{verdict.render(found, text)}\n")
    show(verdict.render(found, form))
    if error is not None:
        raise error
