"""The `crrl` command. Results go to stdout, logs to stderr; exit codes are those of `errors.ExitCode`.

Commands import what they need when they run, so that ``crrl --help`` answers at once.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TypeVar

import typer

from coderepairrl import __version__
from coderepairrl.errors import ExitCode, UsageError, told
from coderepairrl.printable import LogFormatter, logged, printable, visible

app = typer.Typer(
    name="crrl",
    help="Train language models to repair code by doing it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings: docs/reference/config.md")
]
Options = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="for example path=tasks.jsonl")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line of stdout")]
Resume = Annotated[bool, typer.Option("--resume", help="continue where the run of this name stopped")]


def _version(wanted: bool) -> None:
    if wanted:
        _show(__version__)
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


@app.command()
def hello(overrides: Overrides = None, resume: Resume = False, as_json: Json = False) -> None:
    """The main job on this machine: reinforcement learning of a tiny policy, nothing else needed."""
    from coderepairrl.apps.hello import hello as run

    _show(run(overrides or [], resume=resume, as_json=as_json))


@app.command()
def train(
    file: Annotated[str, typer.Argument(help="a TOML file, a shipped config, or a run folder to resume")],
    overrides: Overrides = None,
    resume: Resume = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved plan and stop")] = False,
    as_json: Json = False,
) -> None:
    """Train a policy: tasks, groups of episodes, rewards, advantages, update, weights live, next step."""
    from coderepairrl import config, stages

    resolved = config.load(file, overrides or [])
    folder = stages.named(file, resolved) if resume else stages.folder_of(resolved)
    if dry_run:
        plan: dict[str, Any] = {}
        try:
            plan["needs"] = stages.needs(resolved)
            if lacking := stages.missing(resolved):
                plan["missing"] = {"what": str(lacking), "fix": lacking.fix}
            plan |= stages.plan(resolved, folder)
        finally:  # what is known, though the rest is refused
            if plan:
                _show(json.dumps(plan) if as_json else f"{config.to_toml(resolved)}\n{_table(plan)}")
        if lacking:
            raise lacking
        return
    result = asyncio.run(stages.run(resolved, resume=resume, folder=folder))
    _show(json.dumps(result) if as_json else _table(result))


@app.command()
def fix(
    repo: Annotated[Path, typer.Argument(help="a clean git repository")],
    issue: Annotated[Path, typer.Option(help="a file that says what is wrong")],
    model: Annotated[str, typer.Option(help="a run folder, a TOML file, a model folder, builtin:NAME, or a URL")],
    overrides: Overrides = None,
    agent_option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="docs/guides/agents.md")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy")] = 0.0,
    model_name: Annotated[str, typer.Option(help="of the URL; not needed where there is only one")] = "",
    key_env: Annotated[str | None, typer.Option(help="variable with the URL's key, else OPENAI_API_KEY")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="apply the patch to the working tree")] = False,
    as_json: Json = False,
) -> None:
    """Let a model repair your own repository: its work on stderr, the diff on stdout."""
    from coderepairrl.apps import fix, serve

    repository, text = fix.open_repository(repo), fix.read_issue(issue)
    given = [*(overrides or []), *(f"agent.options.{option}" for option in agent_option or [])]
    choice = serve.choose(
        model,
        [*given, *serve.relayed(model_name, key_env)],
        command="crrl fix",
        used=fix.USED,
        defaults=fix.DEFAULTS,
    )
    fixed = _run(fix.fix(repository, text, choice, temperature=temperature, trace=fix.Trace()))
    if not as_json:
        fix.show(fixed.patch, sys.stdout)  # before it is applied: a patch that git refuses is not lost
    applied = False
    try:
        applied = apply and fix.apply(repository, fixed.patch)
    finally:
        if as_json:
            _show(json.dumps({**fixed.as_json(), "applied": applied}))
    if not fixed.patch:
        raise typer.Exit(ExitCode.RUN_FAILED)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="a run folder, a TOML file, a model folder, builtin:NAME, or a URL")],
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="where the gateway listens; it asks agents for a session's key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the gateway; 0: any that is free")] = 8000,
    socket: Annotated[Path | None, typer.Option(help="a Unix socket of the gateway, for sandboxes")] = None,
    admin: Annotated[Path | None, typer.Option(help="the host's own Unix socket; else in a new folder")] = None,
    admin_port: Annotated[int | None, typer.Option(min=0, max=65535, help="with a token, instead of --admin")] = None,
    log: Annotated[Path | None, typer.Option(help="a new run folder: every turn, as it is committed")] = None,
    model_name: Annotated[str, typer.Option(help="of the URL; not needed where there is only one")] = "",
    key_env: Annotated[str | None, typer.Option(help="variable with the URL's key, else OPENAI_API_KEY")] = None,
    as_json: Json = False,
) -> None:
    """The gateway alone, for a trainer of your own: sessions for agents, their turns as JSON (docs/guides/serve.md)."""
    from coderepairrl.apps import serve as served

    if admin is not None and admin_port is not None:
        raise UsageError("--admin and --admin-port are two places for one thing", fix="choose one")
    choice = served.choose(
        model,
        [*(overrides or []), *served.relayed(model_name, key_env)],
        command="crrl serve",
        used=served.USED,
        defaults=served.DEFAULTS,
    )

    def ready(where: dict[str, Any]) -> None:
        _show(json.dumps(where) if as_json else _table(where))

    def say(text: str) -> None:
        print(logged(text), file=sys.stderr)

    places = served.Places(host, port, socket, admin, admin_port)
    asyncio.run(served.serve(choice, places, log=log, ready=ready, say=say))


@app.command()
def score(
    oracle: Annotated[Path, typer.Option(help="the reference diff")],
    patch: Annotated[Path, typer.Option(help="the diff to judge")],
    reward: Annotated[str, typer.Option(help="name of the reward, or module:Class")] = "patch_edits",
    as_json: Json = False,
) -> None:
    """Score one diff against another with a reward that needs no execution."""
    from coderepairrl import rewards

    value = rewards.score_files(reward, oracle, patch)
    [version] = rewards.versions(reward).values()
    found = {"reward": reward, "version": version, "value": value}
    _show(json.dumps(found) if as_json else f"{value:.6f}")


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    episode: Annotated[str | None, typer.Argument(help="id of an episode; without it, the index of all")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the page here, not to stdout")] = None,
) -> None:
    """A static page: an episode with every token coloured by origin, mask and advantage, or the index of a run."""
    from coderepairrl.report import view

    page = view.render(run, episode)
    if output is None:
        if sys.stdout.isatty():
            command = shlex.join(["crrl", "view", str(run), *([episode] if episode else [])])
            raise UsageError(
                "the page is HTML, which a terminal does not show",
                fix=f"{command} -o {'episode' if episode else 'index'}.html, and open it in a browser",
            )
        _show(page)
    else:
        try:
            output.write_text(page)
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}", fix="name another file with -o") from error
        _show(output)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders; several are put side by side")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="not RUN/report/index.html")] = None,
    figure: Annotated[Path | None, typer.Option(help="write an SVG of reward and tests passing, not the page")] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, a horizontal line in the figure")] = None,
    as_json: Json = False,
) -> None:
    """What a run has come to: curves, before and after with intervals, time, tokens, faults, on one page."""
    from coderepairrl import report as reports

    loaded = reports.load(runs)
    if as_json:
        _show(json.dumps(reports.numbers(loaded), allow_nan=False))
    elif figure is not None:
        _show(reports.write_figure(loaded, baseline or [], figure))
    else:
        _show(reports.write_page(loaded, output))


@app.command()
def check(
    kind: Annotated[
        str | None, typer.Argument(help="sandbox, engine, agent, reward, tasks, model, crash; none: the machine")
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="an implementation, module:Class, a model's folder, or whom to kill")
    ] = None,
    options: Options = None,
    every: Annotated[bool, typer.Option("--all", help="every sandbox that works here (kind: sandbox)")] = False,
    as_json: Json = False,
) -> None:
    """What this machine has and lacks; with KIND NAME, the exam of one implementation."""
    from coderepairrl import certify as checks
    from coderepairrl import config

    if every and (kind != "sandbox" or name is not None or options):
        raise UsageError("--all examines sandboxes, as they are by default", fix="crrl check sandbox --all")
    report: list[checks.Entry] = []

    def show(entry: checks.Entry) -> None:
        report.append(entry)
        if not as_json:
            _show(checks.line(entry))

    async def sit(entries: AsyncIterator[checks.Entry]) -> None:
        async for entry in entries:
            show(entry)

    if every:
        _run(sit(checks.examine_sandboxes()))
    elif kind is not None:
        _run(sit(checks.examine(kind, name, config.parse_options(options or []))))
    else:
        for entry in checks.machine():
            show(entry)
    if as_json:
        _show(json.dumps([entry._asdict() for entry in report]))
    if not all(entry.ok for entry in report if entry.required):
        raise typer.Exit(ExitCode.PREREQUISITE if kind is None else ExitCode.RUN_FAILED)


data = typer.Typer(help="Tasks: which there are; prepare, verify and export them.", no_args_is_help=True)
app.add_typer(data, name="data")
Source = Annotated[str, typer.Argument(help="a task source, or module:Class")]


@data.command("list")
def data_list(as_json: Json = False) -> None:
    """The shipped task sources, with their tasks per split."""
    from coderepairrl.certify import data

    listing = data.shipped()
    rows = {entry.source: f"{_counts(entry.splits) or 'none of its own':<40} {entry.about}" for entry in listing}
    _show(json.dumps([entry._asdict() for entry in listing]) if as_json else _table(rows))


@data.command("prepare")
def data_prepare(source: Source, options: Options = None, as_json: Json = False) -> None:
    """Fetch and make whatever the tasks of SOURCE need, and count them."""
    from coderepairrl import config
    from coderepairrl.certify import data

    splits = data.splits(data.load(source, config.parse_options(options or [])))
    _show(json.dumps({"source": source, "splits": splits}) if as_json else _counts(splits))


@data.command("verify")
def data_verify(
    source: Source,
    options: Options = None,
    limit: Annotated[int, typer.Option(min=0, help="only the first so many tasks; 0: all")] = 0,
    sandbox: Annotated[str, typer.Option(help="where the checks run")] = "auto",
    sandbox_option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="of the sandbox")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="run the checks so often, to find flaky tests")] = 1,
    reward: Annotated[list[str] | None, typer.Option(help="a reward to ask; may be repeated")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the tasks that hold, less flaky tests")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask each task: does its check fail, does its reference mend that, do rewards know one from the other?"""
    from coderepairrl import config
    from coderepairrl import sandbox as sandboxes
    from coderepairrl.certify import data

    made = data.load(source, config.parse_options(options or []))
    choice = sandboxes.choose(sandbox)
    if choice.fix:  # checks may fail there that pass elsewhere
        print(logged(str(choice)), file=sys.stderr)
    backend = sandboxes.make(choice.name, **config.parse_options(sandbox_option or []))
    verdicts = _run(data.verify(made, backend, limit=limit, repeat=repeat, reward=dict.fromkeys(reward or (), 1.0)))
    if output is not None:
        data.export([entry.settled for entry in verdicts if entry.settled is not None], output)
    _show(json.dumps([entry.as_json() for entry in verdicts]) if as_json else data.table(verdicts))
    if any(entry.lacks for entry in verdicts):
        raise typer.Exit(ExitCode.PREREQUISITE)
    if not all(entry.ok for entry in verdicts):
        raise typer.Exit(ExitCode.RUN_FAILED)


@data.command("audit")
def data_audit(
    file: Annotated[Path, typer.Argument(help="patches with test outcomes, as JSON lines (docs/guides/rewards.md)")],
    reward: Annotated[list[str] | None, typer.Option(help="a reward that compares diffs; may be repeated")] = None,
    figure: Annotated[Path | None, typer.Option(help="write an SVG of ranking against what junk earns")] = None,
    as_json: Json = False,
) -> None:
    """Ask of rewards: do patches that pass rank above those that fail, and what do cheap edits earn?"""
    from coderepairrl.certify import data

    rows = data.read(file)
    verdicts = data.audit(rows, reward or ["patch_similarity", "patch_lines", "patch_edits"])
    if figure is not None:
        figure.write_text(data.figure(verdicts))
    _show(json.dumps([found.as_json() for found in verdicts]) if as_json else data.report(rows, verdicts))


@data.command("export")
def data_export(
    source: Source,
    file: Annotated[Path, typer.Argument(help="the file to write, in the schema of docs/guides/tasks.md")],
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Write the tasks of SOURCE as JSON lines, which the source `jsonl` reads back."""
    from coderepairrl import config
    from coderepairrl.certify import data

    count = data.export(data.load(source, config.parse_options(options or [])), file)
    _show(json.dumps({"file": str(file), "tasks": count}) if as_json else f"{file}: {count} tasks")


agents = typer.Typer(help="Agents: which there are; install the programs of others.", no_args_is_help=True)
app.add_typer(agents, name="agents")


@agents.command("list")
def agents_list(as_json: Json = False) -> None:
    """The agents that ship: where they work, what they speak, and whether their programs are installed."""
    from coderepairrl.agents import listing

    entries = listing.listing()
    _show(json.dumps([entry._asdict() for entry in entries]) if as_json else listing.table(entries))


@agents.command("install")
def agents_install(
    name: Annotated[str, typer.Argument(help="an agent of `crrl agents list`, or a recipe file")],
    as_json: Json = False,
) -> None:
    """Install the program of an agent into an environment of its own, which sandboxes see read-only."""
    from coderepairrl.agents import install, recipe

    folder, versions = install.install_named(name)
    _show(json.dumps({"agent": recipe.label(name), "folder": str(folder), **versions}) if as_json else folder)


def _show(text: object) -> None:
    """Print what may be somebody else's words; JSON has its own escapes."""
    print(visible(str(text)), flush=True)


def _counts(splits: dict[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in splits.items())


def _run(job: Coroutine[Any, Any, T]) -> T:
    from coderepairrl.stages import until_told

    return asyncio.run(until_told(job))


def _table(data: dict[Any, Any], indent: str = "") -> str:
    from coderepairrl.stats import Interval

    lines = []
    for key, value in data.items():
        name = f"{indent}{printable(str(key))}"
        if isinstance(value, dict) and {"value", "low", "high"} == set(value):
            lines.append(f"{name:<28} {Interval(**value)}")
        elif isinstance(value, dict) and value:
            lines.append(f"{name}\n{_table(value, indent + '  ')}")
        else:
            lines.append(f"{name:<28} {value:.6g}" if isinstance(value, float) else f"{name:<28} {logged(str(value))}")
    return "\n".join(lines)


def _interrupt(number: int, frame: object) -> None:
    """Unwind, wherever we are, so that children and temporary folders go, too; `train.signals` has gentler ways.

    Once: a second signal must not tear what the first is tidying up.

    Not Python's own handler, which `asyncio.run` would replace by one that waits for the code that runs just now.
    """
    _deafen()
    raise KeyboardInterrupt


def _deafen() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback as Python prints it, but for what would command the terminal: it may quote a model."""
    print(logged("".join(traceback.format_exception(kind, error, trace)).rstrip()), file=sys.stderr)


def main() -> None:
    """Entry point: turns this project's errors into a message, a fix and an exit code."""
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    logs = logging.StreamHandler()
    logs.setFormatter(LogFormatter())
    logging.basicConfig(handlers=[logs])
    try:
        with told():
            app()
    except BrokenPipeError:  # `crrl view RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.RUN_FAILED)
    except Exception:
        sys.excepthook = _unexpected  # typer has set its own
        raise
    finally:
        atexit.register(_deafen)  # before all that was registered earlier: what is done at exit is done


if __name__ == "__main__":
    main()
