"""``crrl score``, ``report``, ``check``: reading results and examining parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coderepairrl.cli.output import Json, Options, note, run_tidily, show
from coderepairrl.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from coderepairrl.report import Site


def score(
    oracle: Annotated[Path, typer.Option(help="file with the reference diff")],
    patch: Annotated[Path, typer.Option(help="file with the diff to judge")],
    reward: Annotated[str, typer.Option(help="reward that compares diffs, or module:Class")] = "patch_edits",
    as_json: Json = False,
) -> None:
    """Score a diff against another with a reward that runs nothing."""
    from coderepairrl import rewards

    value = rewards.score_files(reward, oracle, patch)
    [version] = rewards.reward_versions(reward).values()
    result = {"reward": reward, "version": version, "value": value}
    show(json.dumps(result) if as_json else f"{value:.6f}")


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="run folders, folders of runs, or one folder of `crrl run`")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="folder, or FILE.html for the first page alone (default: RUN/report)"),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="show live pages on this machine, write no files")] = False,
    port: Annotated[int, typer.Option(help="port of --serve (0: any free one)")] = 0,
    episode: Annotated[str | None, typer.Option(help="write one episode, by its id, to one file")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="write an SVG of reward and passing tests instead of the pages")
    ] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="horizontal line in --figure, NAME=VALUE")] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write figures as SVG and PDF, numbers as CSV, instead of the pages"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write pages about runs: verdict, before and after, curves, and every episode, token by token."""
    from coderepairrl import report as reports
    from coderepairrl.report import jobs

    if sum((as_json, figure is not None, export is not None, output is not None, serve)) > 1:
        raise UsageError("--json, --figure, --export, --output and --serve exclude each other", fix="name one of them")
    if any(jobs.is_jobs(each) for each in runs):
        if len(runs) > 1 or figure is not None or export is not None or baseline or serve or episode:
            raise UsageError("a folder of `crrl run` has one page, and --json", fix=f"crrl report {runs[0]}")
        show(json.dumps(jobs.result(runs[0]).numbers) if as_json else jobs.write_page(runs[0], output))
        return
    missing = [run for run in runs[1:] if not run.exists()]
    if missing and runs[0].exists():
        raise UsageError(f"there is no run {missing[0]}", fix=f"for an episode: --episode {missing[0]}")
    if episode is not None and len(runs) > 1:
        raise UsageError("--episode is for one run", fix=f"crrl report {runs[0]} --episode {episode}")
    if not as_json:
        note(f"{'reading':<12}{', '.join(map(str, runs))}")  # imports and thousands of pages take a while
    site = reports.Site(runs, live=serve)
    if export is not None:
        reports.export_figures(site.reports(), export)
        show(export)
    elif as_json:
        show(json.dumps(site.numbers(), allow_nan=False))
    elif figure is not None:
        show(site.write_figure(figure, baseline or []))
    elif serve:
        from coderepairrl.report.server import serve as serving

        first = site.first(episode)
        asyncio.run(serving(site, port, lambda url: show(f"{url}/{first}")))
    elif episode is not None:
        show(site.write_episode(episode, output))
    else:
        _write_pages(site, output)


def _write_pages(site: Site, output: Path | None) -> None:
    from rich.console import Console
    from rich.progress import Progress

    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        bar = progress.add_task("writing pages")
        show(site.write(output, lambda done, of: progress.update(bar, completed=done, total=of)))


def check(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="sandbox, engine, agent, reward, tasks, environments, model, crash (default: the machine)",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="an implementation, module:Class, a task source, a model folder, or the process to kill",
        ),
    ] = None,
    options: Options = None,
    every: Annotated[bool, typer.Option("--all", help="with KIND sandbox: every sandbox that works here")] = False,
    as_json: Json = False,
) -> None:
    """Check what this machine has and lacks; with KIND NAME, examine one implementation."""
    from coderepairrl import config
    from coderepairrl.checks import exams
    from coderepairrl.checks.machine import format_finding, machine
    from coderepairrl.registry import Finding

    if every and (kind != "sandbox" or name is not None or options):
        raise UsageError("--all is for sandboxes, without name and options", fix="crrl check sandbox --all")
    report: list[Finding] = []

    def tell(finding: Finding) -> None:
        report.append(finding)
        if not as_json:
            show(format_finding(finding))

    async def sit(findings: AsyncIterator[Finding]) -> None:
        async for finding in findings:
            tell(finding)

    if every:
        run_tidily(sit(exams.examine_sandboxes()))
    elif kind is not None:
        example = "path" if kind in ("tasks", "environments") else "KEY"
        run_tidily(sit(exams.run_exam(kind, name, config.parse_options(options or [], example))))
    else:
        for finding in machine():
            tell(finding)
    if as_json:
        show(json.dumps([finding._asdict() for finding in report]))
    if not all(finding.ok for finding in report if finding.required):
        raise typer.Exit(ExitCode.PREREQUISITE if kind is None else ExitCode.RUN_FAILED)
