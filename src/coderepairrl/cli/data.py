"""``crrl data``: task sources and their tasks."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from coderepairrl.cli.output import Json, Options, SandboxName, SandboxOptions, backend, counts, note, run, show, table
from coderepairrl.errors import ExitCode, UsageError
from coderepairrl.printable import counted

app = typer.Typer(
    name="data",
    help="List, prepare, verify and export tasks; import trajectories.",
    no_args_is_help=True,
)

Source = Annotated[str, typer.Argument(help="a task source, or module:Class")]


@app.command("list")
def data_list(
    source: Annotated[
        str | None, typer.Argument(help="a task source, or module:Class (default: list shipped sources)")
    ] = None,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """List the tasks of SOURCE by split and id, and whether each is ready; else the shipped sources."""
    from coderepairrl import config
    from coderepairrl.checks import data

    if source is not None:
        tasks = data.listed(data.load(source, config.parse_options(options or [], "path")))
        lines = [f"{each['split']:<8} {each['id']:<40} {_state(each['lacks'])}" for each in tasks]
        show(json.dumps(tasks) if as_json else "\n".join(lines))
        if unready := sum(bool(each["lacks"]) for each in tasks):
            note(f"{unready} of {counted(len(tasks), 'task')} not ready: crrl data prepare fetches what they lack")
        return
    listing = data.shipped()
    rows = {entry.source: f"{counts(entry.splits) or 'none of its own':<40} {entry.about}" for entry in listing}
    show(json.dumps([entry._asdict() for entry in listing]) if as_json else table(rows))


@app.command("prepare")
def data_prepare(
    source: Source,
    options: Options = None,
    images: Annotated[
        Path | None, typer.Option(help="a folder in OCI layout, or an archive of docker save, tried before a registry")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="concurrent images and environments")] = 2,
    as_json: Json = False,
) -> None:
    """Fetch and build what the tasks of SOURCE need, for use without a network, and count them."""
    from coderepairrl import config
    from coderepairrl.checks import data
    from coderepairrl.tasks.prepare import prepare

    tasks = list(data.load(source, config.parse_options(options or [], "path")))
    splits = data.splits(tasks)
    prepared = run(prepare(tasks, images=images, jobs=jobs, say=note))
    if as_json:
        fetched = {"commits": prepared.commits, "images": {each.name: each.pinned for each in prepared.images}}
        folders = [str(each.folder) for each in prepared.environments]
        show(json.dumps({"source": source, "splits": splits, **fetched, "environments": folders}))
        return
    numbers = {"commits": len(prepared.commits), "environments": len(prepared.environments)}
    lines = [f"{name} ready: {number}" for name, number in numbers.items() if number]
    show("\n".join([counts(splits), *lines, *(f"image {each.pinned}" for each in prepared.images)]))


def _state(lacks: list[str]) -> str:
    return f"lacks {', '.join(lacks)}" if lacks else "ready"


@app.command("verify")
def data_verify(
    source: Source,
    options: Options = None,
    limit: Annotated[int, typer.Option(min=0, help="number of first tasks (0: all)")] = 0,
    sandbox: SandboxName = "auto",
    sandbox_option: SandboxOptions = None,
    repeat: Annotated[int, typer.Option(min=1, help="runs of the checks, to find flaky tests")] = 1,
    reward: Annotated[list[str] | None, typer.Option(help="reward to verify; repeatable")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write valid tasks, without flaky tests")
    ] = None,
    quarantine: Annotated[
        Path | None, typer.Option(help="write failing tasks with reasons, for select.quarantine=FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify tasks: checks fail before and pass after the reference, and rewards tell these apart."""
    from coderepairrl import config
    from coderepairrl.checks import data

    tasks = data.load(source, config.parse_options(options or [], "path"))
    place = backend(sandbox, sandbox_option)
    verdicts = run(data.verify(tasks, place, limit=limit, repeat=repeat, reward=dict.fromkeys(reward or (), 1.0)))
    if output is not None:
        count = data.export([entry.settled for entry in verdicts if entry.settled is not None], output)
        reasons = "; ".join(f"{number} {reason}" for reason, number in data.left_out(verdicts).items())
        note(f"{output}: {counted(count, 'task')}; left out: {reasons or 'none'}")
    if quarantine is not None:
        quarantined = data.write_quarantine(data.apart(verdicts, tasks), quarantine)
        note(f"{quarantine}: {counted(quarantined, 'task')}")
    show(json.dumps([entry.as_json() for entry in verdicts]) if as_json else data.table(verdicts))
    if any(entry.lacks for entry in verdicts):
        raise typer.Exit(ExitCode.PREREQUISITE)
    if not all(entry.ok for entry in verdicts):
        raise typer.Exit(ExitCode.RUN_FAILED)


@app.command("export")
def data_export(
    source: Source,
    file: Annotated[Path, typer.Argument(help="file to write (docs/guides/tasks.md); for harbor, folder")],
    options: Options = None,
    form: Annotated[str, typer.Option("--format", help="jsonl, or harbor: a folder per task, in Harbor's format")] = (
        "jsonl"
    ),
    image: Annotated[str | None, typer.Option(help="base image of harbor tasks (default: python:3.12)")] = None,
    as_json: Json = False,
) -> None:
    """Write the tasks of SOURCE as JSON lines or Harbor tasks, which `jsonl` and `harbor` read."""
    from coderepairrl import config
    from coderepairrl.checks import data

    if form not in ("jsonl", "harbor"):
        raise UsageError(f"tasks are not written as {form!r}", fix="--format jsonl, or --format harbor")
    if image is not None and form != "harbor":
        raise UsageError("--image is for --format harbor", fix="leave it out")
    tasks = data.load(source, config.parse_options(options or [], "path"))
    count = data.export(tasks, file) if form == "jsonl" else data.export_harbor(tasks, file, image or data.IMAGE)
    show(json.dumps({"file": str(file), "tasks": count}) if as_json else f"{file}: {counted(count, 'task')}")


@app.command("overlap")
def data_overlap(
    first: Annotated[str, typer.Argument(help="training source")],
    second: Annotated[str, typer.Argument(help="evaluation source")],
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Compare two sources: shared ids, commits, near-duplicate issues and patches, and dates.

    Options of the first are a.KEY=VALUE, of the second b.KEY=VALUE.
    """
    from coderepairrl import config
    from coderepairrl.checks import data

    sides = config.parse_options(options or [], "a.path")
    if wrong := next((key for key in sides if key not in ("a", "b") or not isinstance(sides[key], dict)), ""):
        raise UsageError(f"{wrong!r} is an option of neither source", fix=f"write a.{wrong}=... or b.{wrong}=...")
    tasks = (list(data.load(first, sides.get("a", {}))), list(data.load(second, sides.get("b", {}))))
    overlaps = data.overlap(*tasks)
    show(json.dumps(overlaps.as_json()) if as_json else data.shared(overlaps, (first, second)))


@app.command("import")
def data_import(
    form: Annotated[
        str, typer.Argument(metavar="FORMAT", help="openhands, swe-agent, mini-swe-agent, atif, or nano (its logs)")
    ],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="files or folders")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file of examples to write")],
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="'SOURCE [KEY=VALUE]...'", help="evaluation set; overlap is refused"),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="'SOURCE [KEY=VALUE]...'", help="evaluation set; overlap is left out"),
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
    from coderepairrl.report.trajectories.others import Window
    from coderepairrl.stages import importing

    request = importing.ImportOptions(
        against=against or [],
        drop=drop or [],
        unchecked=unchecked,
        tasks=tasks,
        outcomes=outcomes,
        window=Window(after, before, model),
    )
    summary = importing.import_trajectories(form, paths, output, request)
    show(json.dumps(summary) if as_json else importing.as_text(summary))
