"""``crrl tasks``: task sources and their tasks."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coderepairrl.cli.output import (
    Json,
    Options,
    Resume,
    SandboxName,
    SandboxOptions,
    format_nested,
    format_split_counts,
    note,
    run_interruptible,
    select_backend,
    show,
)
from coderepairrl.errors import ExitCode, UsageError
from coderepairrl.printable import format_count

if TYPE_CHECKING:
    from coderepairrl.protocols import TaskSource
    from coderepairrl.tasks.select import VerifiedTask

app = typer.Typer(
    name="tasks", help="List, prepare, verify, export and open tasks; import trajectories.", no_args_is_help=True
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="a task source, module:Class, a file of tasks or rows, or a folder of Harbor tasks"
    ),
]
Concurrent = Annotated[int | None, typer.Option("--jobs", min=1, help="concurrent sandboxes or downloads (default: 2)")]


def _load_source(source: str, options: list[str] | None) -> TaskSource:
    from coderepairrl import config
    from coderepairrl.tasks import catalog

    return catalog.load_source(*catalog.resolve_source(source, config.parse_options(options or [], "path")))


@app.command("list")
def tasks_list(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="as for `crrl tasks verify` (default: list shipped sources)")
    ] = None,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """List the tasks of SOURCE: split, id, and what each lacks; without SOURCE, the shipped sources."""
    from coderepairrl.tasks import catalog

    if source is not None:
        tasks = catalog.list_tasks(_load_source(source, options))
        states = [f"lacks {', '.join(each['lacks'])}" if each["lacks"] else "ready" for each in tasks]
        lines = [f"{each['split']:<8} {each['id']:<40} {state}" for each, state in zip(tasks, states, strict=True)]
        show(json.dumps(tasks) if as_json else "\n".join(lines))
        if unready := sum(bool(each["lacks"]) for each in tasks):
            note(
                f"{unready} of {format_count(len(tasks), 'task')} not ready: crrl tasks prepare fetches what they lack"
            )
        return
    listing = catalog.list_sources()
    rows = {
        entry.source: f"{format_split_counts(entry.splits) or 'none shipped':<40} {entry.about}" for entry in listing
    }
    show(json.dumps([entry._asdict() for entry in listing]) if as_json else format_nested(rows))


@app.command("prepare")
def tasks_prepare(
    source: Source,
    options: Options = None,
    images: Annotated[
        Path | None, typer.Option(help="a folder in OCI layout, or an archive of docker save, tried before a registry")
    ] = None,
    jobs: Concurrent = None,
    as_json: Json = False,
) -> None:
    """Fetch and build what the tasks of SOURCE need, for use without a network, and count them."""
    from coderepairrl.tasks import catalog
    from coderepairrl.tasks.prepare import prepare_tasks

    tasks = list(_load_source(source, options))
    splits = catalog.count_splits(tasks)
    prepared = run_interruptible(prepare_tasks(tasks, images=images, jobs=jobs or 2, say=note))
    if as_json:
        fetched = {"commits": prepared.commits, "images": {each.name: each.pinned for each in prepared.images}}
        folders = [str(each.folder) for each in prepared.environments]
        show(json.dumps({"source": source, "splits": splits, **fetched, "environments": folders}))
        return
    numbers = {"commits": len(prepared.commits), "environments": len(prepared.environments)}
    lines = [f"{name} ready: {number}" for name, number in numbers.items() if number]
    show("\n".join([format_split_counts(splits), *lines, *(f"image {each.pinned}" for each in prepared.images)]))


@app.command("verify")
def tasks_verify(
    source: Source,
    options: Options = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="audit with mutants, repeated runs and history: docs/guides/audit.md")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="number of tasks, with --deep drawn by --seed (0: all)")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="times to run the checks, to find flaky tests")] = 1,
    reward: Annotated[list[str] | None, typer.Option(help="reward to verify; repeatable")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="file for valid tasks; with --deep folder of results (audits/NAME)"),
    ] = None,
    quarantine: Annotated[
        Path | None, typer.Option(help="write failing tasks with reasons, for select.quarantine=FILE")
    ] = None,
    mutants: Annotated[int | None, typer.Option(min=0, help="--deep: most mutants per reference (default: 5)")] = None,
    seed: Annotated[int | None, typer.Option(help="--deep: seed of tasks and mutants (default: 0)")] = None,
    jobs: Concurrent = None,
    resume: Resume = False,
    sandbox: SandboxName = "auto",
    sandbox_option: SandboxOptions = None,
    as_json: Json = False,
) -> None:
    """Verify tasks: checks fail before and pass after the reference, and rewards tell these apart."""
    from coderepairrl.checks import audit, task_source
    from coderepairrl.checks.audit import trials
    from coderepairrl.tasks import catalog

    deep_only = {"--mutants": mutants, "--seed": seed, "--jobs": jobs, "--resume": resume or None}
    for name, value in ({"--reward": reward} if deep else deep_only).items():
        if value is not None:
            raise UsageError(f"{name} is {'not ' if deep else ''}for --deep", fix=f"leave out {name}")
    tasks, backend = _load_source(source, options), select_backend(sandbox, sandbox_option)
    if deep:
        settings = trials.Settings(
            " ".join([source, *(options or [])]), backend.name, repeat, 5 if mutants is None else mutants, seed or 0
        )
        folder = output or Path("audits") / (Path(source).name.partition(".")[0] or tasks.name)
        drawn = trials.draw_tasks(tasks, limit, settings.seed)
        audited = run_interruptible(
            audit.audit_into(folder, tasks, drawn, backend, settings, resume=resume, jobs=jobs or 2, say=note)
        )
        _write_quarantine(trials.list_verified_tasks(audited), quarantine)
        show(
            json.dumps(audit.audit_as_json(settings, audited))
            if as_json
            else f"{audit.format_rates_table(audited)}\n{folder / 'audit.json'}"
        )
        if faulty := sum(bool(each.faults) for each in audited):
            note(f"{format_count(faulty, 'task')} not tried, or in part: remove the cause, and continue with --resume")
            raise typer.Exit(ExitCode.RUN_FAILED)
        return
    rewards = dict.fromkeys(reward or (), 1.0)
    say = note if sys.stderr.isatty() else lambda line: None
    verdicts = run_interruptible(
        task_source.verify_tasks(tasks, backend, limit=limit, repeat=repeat, reward=rewards, say=say)
    )
    if output is not None:
        count = catalog.export_tasks_jsonl([entry.settled for entry in verdicts if entry.settled is not None], output)
        reasons = "; ".join(f"{number} {reason}" for reason, number in task_source.count_left_out(verdicts).items())
        note(f"{output}: {format_count(count, 'task')}; left out: {reasons or 'none'}")
    _write_quarantine(task_source.list_unusable(verdicts, tasks), quarantine)
    show(json.dumps([entry.as_json() for entry in verdicts]) if as_json else task_source.format_exams(verdicts))
    if any(entry.lacks for entry in verdicts):
        raise typer.Exit(ExitCode.PREREQUISITE)
    if not all(entry.ok for entry in verdicts):
        raise typer.Exit(ExitCode.RUN_FAILED)


def _write_quarantine(verified: list[VerifiedTask], file: Path | None) -> None:
    from coderepairrl.tasks.select import write_quarantine

    if file is not None:
        note(f"{file}: {format_count(write_quarantine(verified, file), 'task')}")


@app.command("shell")
def tasks_shell(
    source: Source,
    task: Annotated[str, typer.Argument(metavar="ID", help="id of one of its tasks (crrl tasks list SOURCE)")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]... [-- COMMAND]", help="options of the source; a command to run instead"),
    ] = None,
    checks: Annotated[bool, typer.Option("--checks", help="open what graders see, with the checks' files")] = False,
    sandbox: SandboxName = "auto",
    sandbox_option: SandboxOptions = None,
) -> None:
    """Open a shell in the sandbox that an agent sees, at the task's repository; its changes are discarded.

    The exit code is the shell's. Without a terminal, stdin is run as a script.
    """
    from coderepairrl.stages import shell

    options = list(itertools.takewhile(lambda word: "=" in word, words or []))
    command = (words or [])[len(options) :]
    quoted_source = shlex.join([source, *options])
    opened = shell.find_task(_load_source(source, options), quoted_source, task, checks=checks)
    backend = select_backend(sandbox, sandbox_option)
    raise typer.Exit(run_interruptible(shell.open_shell(opened, backend, command, checks=checks, say=note)))


@app.command("export")
def tasks_export(
    source: Source,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="file to write (docs/guides/tasks.md); for harbor, a folder")
    ],
    options: Options = None,
    form: Annotated[
        Literal["jsonl", "harbor"], typer.Option("--format", help="JSON lines, or a folder per task for Harbor")
    ] = "jsonl",
    image: Annotated[str | None, typer.Option(help="base image of harbor tasks (default: python:3.12)")] = None,
    as_json: Json = False,
) -> None:
    """Write the tasks of SOURCE as JSON lines or Harbor tasks, which `jsonl` and `harbor` read."""
    from coderepairrl.tasks import catalog
    from coderepairrl.tasks.sources import harbor

    if image is not None and form != "harbor":
        raise UsageError("--image is for --format harbor", fix="leave it out")
    tasks = _load_source(source, options)
    count = (
        catalog.export_tasks_jsonl(tasks, file)
        if form == "jsonl"
        else harbor.export_harbor(tasks, file, image or harbor.IMAGE)
    )
    show(json.dumps({"file": str(file), "tasks": count}) if as_json else f"{file}: {format_count(count, 'task')}")


@app.command("overlap")
def tasks_overlap(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="training source")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="evaluation source")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[a.KEY=VALUE|b.KEY=VALUE]...", help="a. options of the first source, b. of the second"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two sources: shared ids, commits, near-duplicate issues and patches, and dates."""
    from coderepairrl import config
    from coderepairrl.tasks import catalog
    from coderepairrl.tasks.overlap import find_overlap, format_overlap

    sides = config.parse_options(options or [], "a.path")
    if wrong := next((key for key in sides if key not in ("a", "b") or not isinstance(sides[key], dict)), ""):
        raise UsageError(f"{wrong!r} is an option of neither source", fix=f"write a.{wrong}=... or b.{wrong}=...")
    sources = ((first, sides.get("a", {})), (second, sides.get("b", {})))
    overlaps = find_overlap(*(list(catalog.load_source(*catalog.resolve_source(*each))) for each in sources))
    show(json.dumps(overlaps.as_json()) if as_json else format_overlap(overlaps, (first, second)))


@app.command("import")
def tasks_import(
    form: Annotated[
        str, typer.Argument(metavar="FORMAT", help="openhands, swe-agent, mini-swe-agent, atif, or nano (its logs)")
    ],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="files or folders")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file of examples to write")],
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="'SOURCE [KEY=VALUE]...'", help="evaluation set; overlap with it is refused"),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="'SOURCE [KEY=VALUE]...'", help="evaluation set; overlap with it is left out"),
    ] = None,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="skip the comparison with evaluation sets")] = False,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="'SOURCE [KEY=VALUE]...'", help="source of the tasks, for language, repository, reference"
        ),
    ] = "",
    outcomes: Annotated[str, typer.Option(help="reports of SWE-bench's harness, or an outcome file")] = "",
    after: Annotated[datetime | None, typer.Option(help="nano: only logs that began then or later")] = None,
    before: Annotated[datetime | None, typer.Option(help="nano: only logs that began earlier")] = None,
    model: Annotated[str, typer.Option(help="nano: only models with this in their name")] = "",
    as_json: Json = False,
) -> None:
    """Import trajectories as examples to learn from, without those that overlap evaluation sets."""
    from coderepairrl.report.trajectories.others import LogFilter
    from coderepairrl.stages import importing

    summary = importing.import_trajectories(
        form,
        paths,
        output,
        against=against or [],
        drop=drop or [],
        unchecked=unchecked,
        tasks=tasks,
        outcomes=outcomes,
        log_filter=LogFilter(after, before, model),
    )
    show(json.dumps(summary) if as_json else importing.format_import(summary))
