"""The `crrl` command: results to stdout, logs to stderr, exit codes of `errors.ExitCode`.

Commands import modules on demand, so that ``crrl --help`` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Annotated

import typer
from typer.models import CommandInfo

from coderepairrl.cli import checking, evaluating, reading, running, serving, tasks
from coderepairrl.cli.output import show
from coderepairrl.errors import ExitCode, exit_on_error
from coderepairrl.printable import LogFormatter, logged
from coderepairrl.version import __version__

app = typer.Typer(
    name="crrl",
    help="Train language models to repair code by doing it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _print_version(requested: bool) -> None:
    if requested:
        show(__version__)
        raise typer.Exit


@app.callback()  # makes typer read options before the command's name
def _root(version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False) -> None:
    pass


COMMANDS: Mapping[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Learn": (running.hello, running.train, running.run, evaluating.collect, running.sft),
    "Measure": (evaluating.eval, evaluating.attempt, evaluating.grade, reading.compare, reading.score),
    "Inspect and use": (reading.report, serving.fix, serving.serve, serving.export),
    "Set up and check": (checking.config, checking.check, tasks.app, checking.app),
}
"""Commands by heading in ``crrl --help``."""
EXAMPLES = {
    "hello": ("hello", "hello run.steps=2"),
    "train": ("train qwen3-0.6b train.lr=1e-5", "train runs/mine --resume"),
    "run": ("run ablations --dry-run", "run jobs.toml --only warm"),
    "collect": (
        "collect hello --policy builtin:tiny -o runs/teacher",
        "collect --select runs/teacher keep.best=1 -o kept",
    ),
    "sft": ("sft sft-tiny data.paths=runs/teacher",),
    "eval": ("eval mutants n=8 --policy builtin:tiny", "eval --merge runs/shard-1 runs/shard-2 -o runs/whole"),
    "attempt": ("attempt handmade handmade/versions --policy builtin:tiny",),
    "grade": ("grade predictions.jsonl swe_bench name=verified",),
    "compare": ("compare runs/before runs/after", "compare logs/a.eval logs/b.eval"),
    "score": ("score --oracle reference.diff --patch mine.diff",),
    "report": ("report runs/hello", "report runs/hello --serve"),
    "fix": ("fix . --issue issue.md --policy runs/hello --apply",),
    "serve": ("serve builtin:tiny --port 8000",),
    "export": ("export runs/hello model", "export runs/hello episodes.parquet --to parquet"),
    "config": ("config hello train.lr=1e-5",),
    "check": ("check", "check sandbox bwrap"),
    "tasks list": ("tasks list", "tasks list jsonl path=tasks.jsonl"),
    "tasks prepare": ("tasks prepare swe_bench name=verified",),
    "tasks verify": ("tasks verify jsonl path=tasks.jsonl -o valid.jsonl", "tasks verify tasks.jsonl --deep"),
    "tasks shell": ("tasks shell handmade handmade/pager", "tasks shell handmade handmade/pager -- git log"),
    "tasks export": ("tasks export mutants bugs.jsonl path=src n=64",),
    "tasks overlap": ("tasks overlap swe_gym swe_bench b.name=verified",),
    "tasks import": ("tasks import nano logs -o logs.parquet --drop swe_bench",),
    "agents list": ("agents list",),
    "agents install": ("agents install mini-swe-agent",),
}
"""Examples at the end of each ``crrl COMMAND -h``."""


def _add_examples(info: CommandInfo, name: str) -> None:
    info.epilog = "\n\n".join(f"Example: crrl {example}" for example in EXAMPLES[name])


for heading, commands in COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=command.info.name, rich_help_panel=heading)
            for inner in command.registered_commands:
                _add_examples(inner, f"{command.info.name} {inner.name}")
        else:
            app.command(rich_help_panel=heading)(command)
            _add_examples(app.registered_commands[-1], command.__name__)


def _interrupt(number: int, frame: object) -> None:
    """Unwind, and ignore further signals while children and temporary folders are removed."""
    # needed since `asyncio.run` replaces Python's own handler by one that lets running code finish first
    _ignore_all_signals()
    raise KeyboardInterrupt


def _ignore_all_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without terminal controls, since it may quote a model."""
    print(logged("".join(traceback.format_exception(kind, error, trace)).rstrip()), file=sys.stderr)


def main() -> None:
    """Run `crrl`; errors become a message, a fix and an exit code."""
    gc.set_threshold(10_000)  # imports make little garbage, and collecting it takes a fifth of a short command's time
    gc.enable()
    atexit.register(gc.freeze)  # no collection at the interpreter's end either
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot write must not raise
    logs = logging.StreamHandler()
    logs.setFormatter(LogFormatter())
    logging.basicConfig(handlers=[logs])
    try:
        with exit_on_error():
            app()
    except BrokenPipeError:  # `crrl report RUN | head`; the flush at the interpreter's end must not raise it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.RUN_FAILED)
    except Exception:
        sys.excepthook = _print_traceback  # in place of typer's
        raise
    finally:
        atexit.register(_ignore_all_signals)  # runs first, so that signals do not disturb the other exit handlers
