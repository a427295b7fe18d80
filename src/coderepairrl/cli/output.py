"""Printing of results, and options that commands share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from coderepairrl.errors import UsageError
from coderepairrl.printable import logged, printable, visible

if TYPE_CHECKING:
    from coderepairrl.protocols import SandboxBackend

T = TypeVar("T")
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings: docs/reference/config.md")
]
Options = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="options, such as select.n=8")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line of stdout")]
Format = Annotated[
    Literal["text", "markdown", "latex", "json"], typer.Option("--format", help="text, markdown, latex or json")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, print the plan, start nothing")]
Verbose = Annotated[bool, typer.Option("--verbose", help="with --dry-run: all numbers of the plan")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="options of the source (select.n=8), settings")
]
PoliciesAtOnce = Annotated[int, typer.Option("--jobs", min=1, help="policies measured at a time")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="a run, a checkpoint, a model folder, builtin:NAME, or a URL (default: the file's); repeatable. "
        "On a task source, agent and limits are those of the policy's run, else the file's",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="number of tasks, sampled with run.seed (default: all)")]
Agents = Annotated[
    list[str] | None,
    typer.Option("--agent", help="agent, or recipe file (default: the file's); repeatable, to compare agents"),
]
NewRun = Annotated[Path | None, typer.Option("--output", "-o", help="new run folder (default: in run.dir)")]
Resume = Annotated[bool, typer.Option("--resume", help="continue where the last call stopped")]
ModelName = Annotated[str, typer.Option(help="the model's name at the URL (default: the only one that it serves)")]
KeyEnv = Annotated[str | None, typer.Option(help="environment variable with the URL's key (default: OPENAI_API_KEY)")]
PriceList = Annotated[
    str | None, typer.Option(metavar="PROMPT,REPLY[,CACHED]", help="prices of a URL per million tokens")
]
SandboxName = Annotated[str, typer.Option("--sandbox", help="sandbox by name (crrl check lists them)")]
SandboxOptions = Annotated[
    list[str] | None, typer.Option("--sandbox-option", metavar="KEY=VALUE", help="option of the sandbox; repeatable")
]


def show(text: object) -> None:
    """Print text that may be untrusted; JSON is already escaped."""
    print(visible(str(text)), flush=True)


def note(line: str) -> None:
    """Print a line of progress to stderr."""
    print(logged(line), file=sys.stderr, flush=True)


def note_reading(*names: object) -> None:
    """Print what will be read, since imports and plans take seconds."""
    note(f"{'reading':<12}{', '.join(map(str, names))}")


def choose_format(form: str, *, as_json: bool) -> str:
    """Choose the format of a result. Raises `UsageError` for --json with another one."""
    if as_json and form not in ("text", "json"):
        raise UsageError(f"--json and --format {form} exclude each other", fix="name one of them")
    return "json" if as_json else form


def select_backend(name: str, options: list[str] | None) -> SandboxBackend:
    """Make the sandbox backend `name`; print a fallback. Raises as `choose_backend` and `make_backend`."""
    from coderepairrl import config, sandbox

    choice = sandbox.choose_backend(name)
    if choice.fix:
        note(str(choice))
    return sandbox.make_backend(choice.name, **config.parse_options(options or []))


def format_split_counts(splits: dict[str, int]) -> str:
    """Tasks per split, in words.

    >>> format_split_counts({"train": 3, "test": 1})
    '3 train, 1 test'
    """
    return ", ".join(f"{count} {split}" for split, count in splits.items())


def run_interruptible(job: Coroutine[Any, Any, T]) -> T:
    """Run `job`, which cleans up when a signal stops it."""
    from coderepairrl.processes.signals import run_until_interrupted

    return asyncio.run(run_until_interrupted(job))


def format_nested(data: dict[Any, Any], indent: str = "") -> str:
    """Format names and values of nested tables, one per line."""
    lines = []
    for key, value in data.items():
        name = f"{indent}{printable(str(key))}"
        if isinstance(value, dict) and value:
            lines.append(f"{name}\n{format_nested(value, indent + '  ')}")
        elif isinstance(value, float):
            lines.append(f"{name:<28} {value:.6g}")
        else:
            lines.append(f"{name:<28} {logged(format_value(value))}".rstrip())
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """Format a value.

    >>> format_value(None), format_value(True), format_value((0.9, 0.95)), format_value([]), format_value("x")
    ('-', 'yes', '0.9, 0.95', 'none', 'x')
    """
    if value is None or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value)) or "none"
    return str(value)
