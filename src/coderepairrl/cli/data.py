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
    help="Tasks: which there are; prepare, verify and export them; import trajectories.",
    no_args_is_help=True,
)

Source = Annotated[str, typer.Argument(help="a task source, or module:Class")]


@app.command("list")
def data_list(
    source: Annotated[str | None, typer.Argument(help="a task source, or module:Class; none: those that ship")] = None,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """The tasks of SOURCE by split and id, and whether each is ready; without it the shipped sources, with their tasks
    per split."""
    from coderepairrl import config
    from coderepairrl.certify import data

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
        Path | None, typer.Option(help="a folder in OCI layout, or an archive of docker save, asked before a registry")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="images and environments at a time")] = 2,
    as_json: Json = False,
) -> None:
    """Fetch and build whatever the tasks of SOURCE need, and count them. Afterwards no network is needed."""
    from coderepairrl import config
    from coderepairrl.certify import data
    from coderepairrl.tasks.prepare import prepare

    made = list(data.load(source, config.parse_options(options or [], "path")))
    splits = data.splits(made)
    found = run(prepare(made, images=images, jobs=jobs, say=note))
    if as_json:
        there = {"commits": found.commits, "images": {each.name: each.pinned for each in found.images}}
        folders = [str(each.folder) for each in found.environments]
        show(json.dumps({"source": source, "splits": splits, **there, "environments": folders}))
        return
    about = {"commits": len(found.commits), "environments": len(found.environments)}
    lines = [f"{name} ready: {number}" for name, number in about.items() if number]
    show("\n".join([counts(splits), *lines, *(f"image {each.pinned}" for each in found.images)]))


def _state(lacks: list[str]) -> str:
    return f"lacks {', '.join(lacks)}" if lacks else "ready"


@app.command("verify")
def data_verify(
    source: Source,
    options: Options = None,
    limit: Annotated[int, typer.Option(min=0, help="only the first so many tasks; 0: all")] = 0,
    sandbox: SandboxName = "auto",
    sandbox_option: SandboxOptions = None,
    repeat: Annotated[int, typer.Option(min=1, help="run the checks so often, to find flaky tests")] = 1,
    reward: Annotated[list[str] | None, typer.Option(help="a reward to ask; may be repeated")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the tasks that hold, less flaky tests")
    ] = None,
    quarantine: Annotated[
        Path | None, typer.Option(help="write those that do not hold, with the reason, for select.quarantine=FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask each task: does its check fail, does its reference mend that, do rewards know one from the other?"""
    from coderepairrl import config
    from coderepairrl.certify import data

    made = data.load(source, config.parse_options(options or [], "path"))
    place = backend(sandbox, sandbox_option)
    verdicts = run(data.verify(made, place, limit=limit, repeat=repeat, reward=dict.fromkeys(reward or (), 1.0)))
    if output is not None:
        count = data.export([entry.settled for entry in verdicts if entry.settled is not None], output)
        why = "; ".join(f"{number} {reason}" for reason, number in data.left_out(verdicts).items())
        note(f"{output}: {counted(count, 'task')}; left out: {why or 'none'}")
    if quarantine is not None:
        kept = data.write_quarantine(data.apart(verdicts, made), quarantine)
        note(f"{quarantine}: {counted(kept, 'task')}")
    show(json.dumps([entry.as_json() for entry in verdicts]) if as_json else data.table(verdicts))
    if any(entry.lacks for entry in verdicts):
        raise typer.Exit(ExitCode.PREREQUISITE)
    if not all(entry.ok for entry in verdicts):
        raise typer.Exit(ExitCode.RUN_FAILED)


@app.command("export")
def data_export(
    source: Source,
    file: Annotated[Path, typer.Argument(help="the file to write (docs/guides/tasks.md); of harbor, the folder")],
    options: Options = None,
    form: Annotated[str, typer.Option("--format", help="jsonl, or harbor: a folder per task, in Harbor's format")] = (
        "jsonl"
    ),
    image: Annotated[
        str | None, typer.Option(help="of harbor: what workspaces are copied onto; python:3.12 if not given")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the tasks of SOURCE as JSON lines, or as Harbor tasks; the source `jsonl`, or `harbor`, reads them back."""
    from coderepairrl import config
    from coderepairrl.certify import data

    if form not in ("jsonl", "harbor"):
        raise UsageError(f"tasks are not written as {form!r}", fix="--format jsonl, or --format harbor")
    if image is not None and form != "harbor":
        raise UsageError("--image is for --format harbor", fix="leave it out")
    made = data.load(source, config.parse_options(options or [], "path"))
    count = data.export(made, file) if form == "jsonl" else data.export_harbor(made, file, image or data.IMAGE)
    show(json.dumps({"file": str(file), "tasks": count}) if as_json else f"{file}: {counted(count, 'task')}")


@app.command("overlap")
def data_overlap(
    first: Annotated[str, typer.Argument(help="the source that is trained on")],
    second: Annotated[str, typer.Argument(help="the source that is measured on")],
    options: Options = None,
    as_json: Json = False,
) -> None:
    """What two sources share: ids, commits, near-duplicate issues and patches; and which was created first.

    Options of the first are written as a.KEY=VALUE, those of the second as b.KEY=VALUE.
    """
    from coderepairrl import config
    from coderepairrl.certify import data

    sides = config.parse_options(options or [], "a.path")
    if wrong := next((key for key in sides if key not in ("a", "b") or not isinstance(sides[key], dict)), ""):
        raise UsageError(f"{wrong!r} is an option of neither source", fix=f"write a.{wrong}=... or b.{wrong}=...")
    tasks = (list(data.load(first, sides.get("a", {}))), list(data.load(second, sides.get("b", {}))))
    found = data.overlap(*tasks)
    show(json.dumps(found.as_json()) if as_json else data.shared(found, (first, second)))


@app.command("import")
def data_import(
    form: Annotated[
        str, typer.Argument(metavar="FORMAT", help="openhands, swe-agent, mini-swe-agent, atif, or nano: its own logs")
    ],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="files, or folders of them")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the file of examples to write")],
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="'SOURCE [KEY=VALUE]...'", help="an evaluation set: what overlaps with it is refused"),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="'SOURCE [KEY=VALUE]...'", help="an evaluation set: what overlaps is left out"),
    ] = None,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="compare with no evaluation set")] = False,
    tasks: Annotated[
        str,
        typer.Option(metavar="'SOURCE [KEY=VALUE]...'", help="whose tasks they are: language, repository, reference"),
    ] = "",
    outcomes: Annotated[str, typer.Option(help="reports of SWE-bench's harness, or an outcome file: who passed")] = "",
    after: Annotated[datetime | None, typer.Option(help="of nano: only logs that began then or later")] = None,
    before: Annotated[datetime | None, typer.Option(help="of nano: only logs that began earlier")] = None,
    model: Annotated[str, typer.Option(help="of nano: only models with this in their name")] = "",
    as_json: Json = False,
) -> None:
    """Write trajectories of others as examples to learn from, without those that overlap with what is measured on."""
    from coderepairrl.apps import importing
    from coderepairrl.report.trajectories.others import Window

    asked = importing.Asked(
        against=against or [],
        drop=drop or [],
        unchecked=unchecked,
        tasks=tasks,
        outcomes=outcomes,
        window=Window(after, before, model),
    )
    found = importing.bring_in(form, paths, output, asked)
    show(json.dumps(found) if as_json else importing.as_text(found))
