"""``crrl run``: jobs of one file, their dependencies, arms and seeds."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from coderepairrl.cli import output
from coderepairrl.cli.output import Format, Json, note, show
from coderepairrl.errors import UsageError


def run(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="a TOML file with jobs (docs/guides/jobs.md), or a shipped one")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB.KEY=VALUE]...", help="keys and settings of a job")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="JOB", help="run only this job; repeatable")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="concurrent jobs")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check all jobs, and print what each does")] = False,
    commands: Annotated[bool, typer.Option("--commands", help="print commands for Slurm, and start nothing")] = False,
    table: Annotated[bool, typer.Option("--table", help="print the table of what is done, and start nothing")] = False,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Run unfinished jobs of a file (train, sft, collect, eval), and print one table of their arms."""
    from coderepairrl.report import verdict
    from coderepairrl.stages import jobs as running
    from coderepairrl.stages import jobs_file as reading

    if sum([dry_run, commands, table, bool(only)]) > 1:
        raise UsageError("these options exclude each other", fix="one of --only, --dry-run, --commands, --table")
    form = "json" if as_json else form
    planned = reading.read_jobs_file(file, overrides or [])
    if commands:
        if overrides:
            raise UsageError("overrides are not passed on by --commands", fix="write them into the file")
        show(running.slurm_script(planned, note))
        return
    failures: dict[str, str] = {}
    if not table:
        names = [job.name for job in planned.jobs]
        if unknown := [each for each in only or [] if each not in names]:
            raise UsageError(f"there is no job {unknown[0]}", fix=f"jobs: {', '.join(names)}")
        checked, problem = running.plan_jobs(planned)
        if dry_run:
            show(verdict.render(running.format_jobs_plan(planned, checked), form).strip())
        if problem is not None:
            raise problem
        if dry_run:
            return
        failures = output.run_tidily(running.run_jobs(planned, jobs, note, only or []))
    show(verdict.render(running.write_jobs_table(planned), form))
    note(f"crrl report {shlex.quote(str(planned.folder))}  the same as a page")
    if failures:
        raise running.make_failure(failures, planned)
