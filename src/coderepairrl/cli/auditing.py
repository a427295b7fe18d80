"""``crrl audit``: whether tasks and their checks can be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coderepairrl.cli.output import Json, Options, Resume, SandboxName, SandboxOptions, backend, note, run, show
from coderepairrl.errors import ExitCode, UsageError
from coderepairrl.printable import counted


def audit(
    dataset: Annotated[str, typer.Argument(help="a task source, a file of tasks or rows, or a folder of Harbor tasks")],
    options: Options = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder for results (default: audits/NAME)")
    ] = None,
    resume: Resume = False,
    limit: Annotated[int, typer.Option(min=0, help="number of tasks to sample (0: all)")] = 0,
    seed: Annotated[int, typer.Option(help="seed of tasks and mutants")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="runs of the checks, to find flaky tests")] = 1,
    mutants: Annotated[int, typer.Option(min=0, help="most mutants per reference")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="concurrent sandboxes")] = 2,
    sandbox: SandboxName = "auto",
    sandbox_option: SandboxOptions = None,
    quarantine: Annotated[Path | None, typer.Option(help="write failing tasks, for select.quarantine=FILE")] = None,
    as_json: Json = False,
) -> None:
    """Audit tasks without model or GPU: whether references pass, no-ops fail, runs agree, the history hides the repair,
    and checks reject mutants of it.
    """
    from coderepairrl import config
    from coderepairrl.checks import audit as auditing
    from coderepairrl.checks import data
    from coderepairrl.runs.folder import write_atomic

    name, source_options = data.recognised(dataset, config.parse_options(options or [], "path"))
    source = data.load(name, source_options)
    tasks = auditing.chosen(source, limit, seed)
    place = backend(sandbox, sandbox_option)
    settings = auditing.Settings(" ".join([dataset, *(options or [])]), place.name, repeat, mutants, seed)
    folder = output or Path("audits") / (Path(dataset).name.partition(".")[0] or name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", fix="name another folder with -o") from error
    rows = folder / "trials.jsonl"
    audited = run(auditing.audit(source, tasks, place, settings, rows, resume=resume, jobs=jobs, say=note))
    plain = auditing.as_json(settings, audited)
    write_atomic(folder / "audit.json", auditing.dumps(plain))
    if quarantine is not None:
        note(f"{quarantine}: {counted(data.write_quarantine(auditing.apart(audited), quarantine), 'task')}")
    show(json.dumps(plain) if as_json else f"{auditing.table(audited)}\n{folder / 'audit.json'}")
    if faulty := sum(bool(each.faults) for each in audited):
        note(f"{counted(faulty, 'task')} not tried, or not whole: mend the cause, and go on with --resume")
        raise typer.Exit(ExitCode.RUN_FAILED)
