"""``crrl compare``, ``score``, ``report``: reading results."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coderepairrl.cli.output import Format, Json, choose_format, note_reading, show
from coderepairrl.errors import UsageError

if TYPE_CHECKING:
    from coderepairrl.report import Site


def compare(
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B [C]", help="RUN, RUN@NAME-STEP, outcome files, logs of other programs, 36/500, published:NAME"
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="resolved, reward, or the name of a reward or metric")] = "resolved",
    common: Annotated[bool, typer.Option("--common", help="compare only tasks that all have")] = False,
    other_conditions: Annotated[
        bool, typer.Option("--other-conditions", help="compare in spite of different limits or environments")
    ] = False,
    cluster: Annotated[str, typer.Option(help="unit of independence: repository, or task")] = "repository",
    at_least: Annotated[
        float | None, typer.Option(help="gain that must be shown, in points or the metric's unit")
    ] = None,
    pass_at: Annotated[str, typer.Option(help="k of pass@k, as 1,2,4,8 (default: all that attempts allow)")] = "",
    pairs: Annotated[bool, typer.Option("--all-pairs", help="compare all pairs, not only with the first")] = False,
    power: Annotated[float, typer.Option(help="power of the smallest detectable difference")] = 0.8,
    tasks: Annotated[
        Path | None, typer.Option(help="file of the ids of all tasks; those not in a report count as unresolved")
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="list published numbers with sources")] = False,
    form: Format = "text",
    as_json: Json = False,
) -> None:
    """Compare policies on the same tasks: paired tests, intervals, and detectable differences."""
    from coderepairrl.report import verdict
    from coderepairrl.report.comparison import ComparisonOptions

    options = ComparisonOptions(
        metric=metric,
        common=common,
        other_conditions=other_conditions,
        cluster=cluster,
        at_least=at_least,
        pass_at=pass_at,
        power=power,
        tasks=tasks,
        published=published,
        pairs=pairs,
    )
    chosen = choose_format(form, as_json=as_json)
    show(verdict.render_result(verdict.answer_comparison(policies or [], options), chosen))


def score(
    oracle: Annotated[Path, typer.Option(help="file with the reference diff")],
    patch: Annotated[Path, typer.Option(help="file with the diff to judge")],
    reward: Annotated[str, typer.Option(help="reward that compares diffs, or module:Class")] = "patch_edits",
    as_json: Json = False,
) -> None:
    """Score a diff against another with a reward that runs nothing."""
    from coderepairrl import rewards

    value = rewards.score_files(reward, oracle, patch)
    [version] = rewards.collect_spec_versions(reward).values()
    result = {"reward": reward, "version": version, "value": value}
    show(json.dumps(result) if as_json else f"{value:.6f}")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="run folders, or folders that hold runs"),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="folder, or FILE.html for the first page alone (default: RUN/report)"),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="show live pages on this machine, write no files")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="port of --serve (default: any free one)")] = None,
    episode: Annotated[str | None, typer.Option(help="write one episode, by its id, to one file")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="write an SVG of reward and passing tests instead of the pages")
    ] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="horizontal line in --figure, NAME=VALUE")] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write figures as SVG and PDF, numbers as CSV, instead of the pages"),
    ] = None,
    thesis: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write the figures and tables of the thesis, with a page of them"),
    ] = None,
    flow_commands: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="commands and tools in the flow of --thesis (default: those in reports)"),
    ] = None,
    flow_calls: Annotated[
        int | None, typer.Option(min=1, help="calls of an attempt in the flow of --thesis (default: 8)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write pages about runs: verdict, before and after, curves, and every episode, token by token."""
    from coderepairrl import report as reports
    from coderepairrl.report import jobs

    for option, value, main_value, main_option in (  # an option and the one that it needs, each with its value
        ("--baseline", baseline, figure, "--figure FILE.svg"),
        ("--port", port, serve or None, "--serve"),
        ("--flow-commands", flow_commands, thesis, "--thesis FOLDER"),
        ("--flow-calls", flow_calls, thesis, "--thesis FOLDER"),
    ):
        if value is not None and main_value is None:
            fix = f"add {main_option}, or leave out {option}"
            raise UsageError(f"{option} is an option of {main_option.split()[0]}", fix=fix)
    commands = [] if flow_commands is None else [name.strip() for name in flow_commands.split(",")]
    if wrong := [name for name in commands if len(name.split()) != 1]:
        raise UsageError(
            f"--flow-commands: {wrong[0]!r} is not one command", fix="write for example ls,grep,apply_patch"
        )
    writes_files = [each is not None for each in (figure, export, thesis)]
    if sum((as_json, *writes_files, output is not None, serve)) > 1:
        options = "--json, --figure, --export, --thesis, --output and --serve"
        raise UsageError(f"{options} exclude each other", fix="name one of them")
    if episode is not None and (as_json or any(writes_files)):
        raise UsageError("--episode writes one page, so it takes only --output or --serve", fix="leave out the others")
    if jobs_folders := [each for each in runs if jobs.is_jobs_folder(each)]:
        if len(runs) > 1 or any(writes_files) or serve or episode:
            fix = f"crrl report {shlex.quote(str(jobs_folders[0]))}, or name run folders in it"
            raise UsageError("a folder of `crrl run` is reported alone, as one page or with --json", fix=fix)
        show(json.dumps(jobs.summarise_jobs(runs[0]).numbers) if as_json else jobs.write_jobs_page(runs[0], output))
        return
    missing = [run for run in runs[1:] if not run.exists()]
    if missing and runs[0].exists():
        raise UsageError(f"there is no run {missing[0]}", fix=f"for an episode: --episode {missing[0]}")
    if episode is not None and len(runs) > 1:
        raise UsageError("--episode is for one run", fix=f"crrl report {shlex.quote(str(runs[0]))} --episode {episode}")
    if not as_json:
        note_reading(*runs)
    site = reports.Site(runs, live=serve)
    if export is not None:
        reports.export_figures(site.reports(), export)
        show(export)
    elif thesis is not None:
        from coderepairrl.report.thesis import CALLS, write_thesis

        show(write_thesis(site, thesis, commands, flow_calls or CALLS))
    elif as_json:
        show(json.dumps(site.numbers(), allow_nan=False))
    elif figure is not None:
        show(site.write_figure(figure, baseline or []))
    elif serve:
        from coderepairrl.report.server import serve_site

        first = site.choose_first_path(episode)
        asyncio.run(serve_site(site, port or 0, lambda url: show(f"{url}/{first}")))
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
