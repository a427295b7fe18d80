"""``crrl score``, ``view``, ``report``, ``check``: reading results and examining parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from coderepairrl.cli.output import Json, Options, note, run, show
from coderepairrl.errors import ExitCode, UsageError


def score(
    oracle: Annotated[Path, typer.Option(help="the reference diff")],
    patch: Annotated[Path, typer.Option(help="the diff to judge")],
    reward: Annotated[str, typer.Option(help="reward, or module:Class")] = "patch_edits",
    as_json: Json = False,
) -> None:
    """Score a diff against another with a reward that runs nothing."""
    from coderepairrl import rewards

    value = rewards.score_files(reward, oracle, patch)
    [version] = rewards.versions(reward).values()
    result = {"reward": reward, "version": version, "value": value}
    show(json.dumps(result) if as_json else f"{value:.6f}")


def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or folders of them")],
    episode: Annotated[str | None, typer.Option(help="id of one episode, written to one file")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder (default: RUN/report/view); for --episode a file")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="serve live pages to this machine, without files")] = False,
    port: Annotated[int, typer.Option(help="port of --serve (0: any free one)")] = 0,
) -> None:
    """Show every episode: linked pages to filter, sort and compare, token by token."""
    note(f"{'reading':<12}{', '.join(map(str, runs))}")  # imports and thousands of pages take a while
    from coderepairrl.report import view as pages

    missing = [run for run in runs[1:] if not run.exists()]
    if missing and runs[0].exists():
        raise UsageError(f"there is no run {missing[0]}", fix=f"an episode is named so: --episode {missing[0]}")
    if serve:
        from coderepairrl.report.view.server import serve as serving

        if output is not None:
            raise UsageError("--serve writes no files", fix="leave out -o")
        site = pages.Site(runs, live=True)
        first = site.first(episode)
        asyncio.run(serving(site, port, lambda url: show(f"{url}/{first}")))
    elif episode is not None:
        if len(runs) > 1:
            raise UsageError("--episode is of one run", fix="name its run alone")
        show(pages.write_one(runs[0], episode, output))
    else:
        from rich.console import Console
        from rich.progress import Progress

        site = pages.Site(runs)
        if output is None and len(site.runs) > 1:
            raise UsageError("the pages of several runs lie in none of them", fix="name a folder for them: -o FOLDER")
        folder = output or next(iter(site.runs.values())).folder.path / "report" / "view"
        terminal = Console(stderr=True)
        with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
            bar = progress.add_task("writing pages")
            show(site.write(folder, lambda done, of: progress.update(bar, completed=done, total=of)))


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="run folders, shown together; or one of `crrl run`")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="file (default: RUN/report/index.html)")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="write an SVG of reward and passing tests instead of the page")
    ] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="horizontal line in the figure, NAME=VALUE")] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write figures as SVG and PDF, numbers as CSV, instead of the page"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page about runs: curves, before and after with intervals, time, tokens, faults."""
    from coderepairrl import report as reports
    from coderepairrl.report import jobs

    if sum((as_json, figure is not None, export is not None, output is not None)) > 1:
        raise UsageError("--json, --figure, --export and --output are different things", fix="ask for one at a time")
    if any(jobs.is_jobs(each) for each in runs):
        if len(runs) > 1 or figure is not None or export is not None or baseline:
            raise UsageError("jobs have a page, and numbers (--json)", fix="crrl report FOLDER")
        show(json.dumps(jobs.result(runs[0]).numbers) if as_json else jobs.write_page(runs[0], output))
        return
    loaded = reports.load(runs)
    if export is not None:
        reports.export(loaded, export)
        show(export)
    elif as_json:
        show(json.dumps(reports.numbers(loaded), allow_nan=False))
    elif figure is not None:
        show(reports.write_figure(loaded, baseline or [], figure))
    else:
        show(reports.write_page(loaded, output))


def check(
    kind: Annotated[
        str | None,
        typer.Argument(help="sandbox, engine, agent, reward, tasks, environments, model, crash (default: the machine)"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(help="an implementation, module:Class, a task source, a model folder, or the process to kill"),
    ] = None,
    options: Options = None,
    every: Annotated[bool, typer.Option("--all", help="every sandbox that works here (kind: sandbox)")] = False,
    as_json: Json = False,
) -> None:
    """Check what this machine has and lacks; with KIND NAME, examine one implementation."""
    from coderepairrl import config
    from coderepairrl.checks import exams
    from coderepairrl.checks.machine import line, machine
    from coderepairrl.registry import Finding

    if every and (kind != "sandbox" or name is not None or options):
        raise UsageError("--all examines sandboxes, as they are by default", fix="crrl check sandbox --all")
    report: list[Finding] = []

    def tell(finding: Finding) -> None:
        report.append(finding)
        if not as_json:
            show(line(finding))

    async def sit(findings: AsyncIterator[Finding]) -> None:
        async for finding in findings:
            tell(finding)

    if every:
        run(sit(exams.examine_sandboxes()))
    elif kind is not None:
        example = "path" if kind in ("tasks", "environments") else "KEY"
        run(sit(exams.examine(kind, name, config.parse_options(options or [], example))))
    else:
        for finding in machine():
            tell(finding)
    if as_json:
        show(json.dumps([finding._asdict() for finding in report]))
    if not all(finding.ok for finding in report if finding.required):
        raise typer.Exit(ExitCode.PREREQUISITE if kind is None else ExitCode.RUN_FAILED)
