"""``crrl hello``, ``train``, ``sft``, ``run``: runs, and jobs of one file."""

from __future__ import annotations

import asyncio
import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coderepairrl.cli import output
from coderepairrl.cli.output import DryRun, Format, Json, Overrides, Verbose, format_nested, note, note_reading, show
from coderepairrl.errors import UsageError

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
    resume: Resume = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Try the whole loop on this machine: reinforcement learning of a tiny policy."""
    note_reading("hello")
    from coderepairrl.stages.hello import load_hello_settings, run_hello

    _refuse_verbose_run(verbose=verbose, dry_run=dry_run)
    if dry_run:
        _show_plan(*load_hello_settings(overrides or [], resume=resume), verbose=verbose, as_json=as_json)
        return
    show(run_hello(overrides or [], resume=resume, as_json=as_json))


_DETAILS = ("devices", "verify", "epochs", "clip", "log", "learner")
"""Parts of a plan that only `--verbose` shows."""


def _refuse_verbose_run(*, verbose: bool, dry_run: bool) -> None:
    if verbose and not dry_run:
        raise UsageError("--verbose is an option of --dry-run", fix="add --dry-run, or leave out --verbose")


def _show_plan(config: Config, folder: RunFolder, *, verbose: bool, as_json: bool) -> None:
    """Print the known part of the plan, then raise its problem."""
    from coderepairrl.stages import command

    plan, problem = command.dry_run(config, folder)
    show(json.dumps(plan) if as_json else format_nested(plan if verbose else _shorten_plan(plan)))
    if not (verbose or as_json):
        note("all settings and numbers of the plan: --dry-run --verbose")
    if problem is not None:
        raise problem


def _shorten_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """Leave out `_DETAILS`, and all needs except each GPU's memory and the run's time."""
    shown = {key: value for key, value in plan.items() if key not in _DETAILS}
    if "needs" in plan:
        shown["needs"] = {}
    for name, part in plan.get("needs", {}).items():
        if name in ("run", "memory"):  # "memory": why nothing is planned
            shown["needs"][name] = part
        elif isinstance(part, dict) and "needs_gb" in part:
            shown["needs"][name] = {key: part[key] for key in ("needs_gb", "has_gb") if key in part}
    return shown


def train(
    file: RunFile,
    overrides: Overrides = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Train a policy: tasks, groups of episodes, rewards, advantages, update, next step."""
    note_reading(file)
    from coderepairrl.stages import command, life_cycle
    from coderepairrl.stages.hello import compare_first_and_last, format_training

    _refuse_verbose_run(verbose=verbose, dry_run=dry_run)
    config, folder = life_cycle.load_settings(file, overrides or [], resume=resume)
    if dry_run:
        _show_plan(config, folder, verbose=verbose, as_json=as_json)
        return
    result = asyncio.run(command.run_training(config, resume=resume, folder=folder))
    if as_json:
        show(json.dumps(result))
        return
    run = shlex.quote(str(folder.path))
    next_commands = {
        f"crrl fix REPOSITORY --issue FILE --policy {run}": "the policy on a bug of yours",
        f"crrl export {run} FOLDER": "its weights, for other programs",
    }
    show(format_training(compare_first_and_last(folder, config), next_commands))


def sft(
    file: RunFile,
    overrides: Overrides = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a policy on examples of `crrl collect`, or on a teacher's distribution over them."""
    note_reading(file)
    from coderepairrl.stages.sft import format_fine_tuning, plan_sft, run_sft, sft_plan_as_json

    plan, folder = plan_sft(file, overrides or [], resume=resume, fetches=not dry_run)
    if dry_run:
        result = sft_plan_as_json(plan, folder)
        show(json.dumps(result) if as_json else format_nested(result))
        return
    summary = asyncio.run(run_sft(plan, folder, resume=resume))
    show(json.dumps(summary) if as_json else format_fine_tuning(folder, plan.config))


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
    commands: Annotated[bool, typer.Option("--commands", help="print the commands for Slurm; start nothing")] = False,
    table: Annotated[bool, typer.Option("--table", help="print the table of finished jobs; start nothing")] = False,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Run unfinished jobs of a file (train, sft, collect, eval), and print one table, a line per arm."""
    note_reading(file)
    from coderepairrl.report import verdict
    from coderepairrl.stages import jobs as job_runner
    from coderepairrl.stages.jobs_file import read_jobs_file

    if sum([dry_run, commands, table, bool(only)]) > 1:
        raise UsageError("--only, --dry-run, --commands and --table exclude each other", fix="name one of them")
    chosen = output.choose_format(form, as_json=as_json)
    if commands and chosen != "text":
        raise UsageError("--commands prints a script for a shell", fix="leave out --json and --format")
    jobs_of_file = read_jobs_file(file, overrides or [])
    if commands:
        if overrides:
            raise UsageError("--commands cannot pass on JOB.KEY=VALUE", fix=f"write {overrides[0]} into {file}")
        show(job_runner.make_slurm_script(jobs_of_file, note))
        return
    failures: dict[str, str] = {}
    if not table:
        names = [job.name for job in jobs_of_file.jobs]
        if unknown := [each for each in only or [] if each not in names]:
            raise UsageError(f"there is no job {unknown[0]}", fix=f"jobs: {', '.join(names)}")
        planned, problem = job_runner.plan_jobs(jobs_of_file)
        if dry_run:
            show(verdict.render_result(job_runner.format_jobs_plan(jobs_of_file, planned), chosen).strip())
        if problem is not None:
            raise problem
        if dry_run:
            return
        failures = output.run_interruptible(job_runner.run_jobs(jobs_of_file, jobs, note, only or []))
    show(verdict.render_result(job_runner.write_jobs_table(jobs_of_file), chosen))
    note(f"crrl report {shlex.quote(str(jobs_of_file.folder))}  the same as a page")
    if failures:
        raise job_runner.make_failure(failures, jobs_of_file)
