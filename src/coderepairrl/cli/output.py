"""What commands share: how results are printed, and the options that many have."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from coderepairrl.printable import logged, printable, rounded, visible

if TYPE_CHECKING:
    from coderepairrl.protocols import SandboxBackend

T = TypeVar("T")
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings: docs/reference/config.md")
]
Options = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="for example path=tasks.jsonl")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line of stdout")]
Format = Annotated[
    Literal["text", "markdown", "latex", "json"], typer.Option("--format", help="text, markdown, latex or json")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the resolved plan and stop")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="options of the source, and settings")
]
PoliciesAtOnce = Annotated[int, typer.Option("--jobs", min=1, help="policies measured at once")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="a run, a checkpoint, a model folder, builtin:NAME, or a URL; else the file's; several times: each",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="so many tasks, drawn by run.seed; else all")]
Agents = Annotated[
    list[str] | None,
    typer.Option("--agent", help="who works on the tasks; several times: side by side, same limits"),
]
NewRun = Annotated[Path | None, typer.Option("--output", "-o", help="a new run folder; else in run.dir")]
Resume = Annotated[bool, typer.Option("--resume", help="continue where it stopped")]
ModelName = Annotated[str, typer.Option(help="of the URL; not needed where there is only one")]
KeyEnv = Annotated[str | None, typer.Option(help="variable with the URL's key, else OPENAI_API_KEY")]
PriceList = Annotated[
    str | None, typer.Option(metavar="PROMPT,REPLY[,CACHED]", help="of a URL, money per million tokens")
]
SandboxName = Annotated[str, typer.Option("--sandbox", help="where the checks run")]
SandboxOptions = Annotated[
    list[str] | None, typer.Option("--sandbox-option", metavar="KEY=VALUE", help="of the sandbox")
]


def show(text: object) -> None:
    """Print what may be somebody else's words; JSON has its own escapes."""
    print(visible(str(text)), flush=True)


def note(line: str) -> None:
    """A line of progress, which may have somebody else's words in it, to stderr."""
    print(logged(line), file=sys.stderr, flush=True)


def backend(name: str, options: list[str] | None) -> SandboxBackend:
    """Where checks run; a choice that is not the best there is, where checks may fail that pass elsewhere, is noted.
    Raises what `sandbox.choose` and `make` raise."""
    from coderepairrl import config, sandbox

    choice = sandbox.choose(name)
    if choice.fix:
        note(str(choice))
    return sandbox.make(choice.name, **config.parse_options(options or []))


def counts(splits: dict[str, int]) -> str:
    """Tasks per split, in words.

    >>> counts({"train": 3, "test": 1})
    '3 train, 1 test'
    """
    return ", ".join(f"{count} {split}" for split, count in splits.items())


def run(job: Coroutine[Any, Any, T]) -> T:
    """What `job` returns; a signal that stops it lets it tidy up. Raises what it raises."""
    from coderepairrl.stages import until_interrupted

    return asyncio.run(until_interrupted(job))


def table(data: dict[Any, Any], indent: str = "") -> str:
    """Names and values of nested tables, a line each."""
    from coderepairrl.stats import Interval

    lines = []
    for key, value in data.items():
        name = f"{indent}{printable(str(key))}"
        if isinstance(value, dict) and {"value", "low", "high"} == set(value):
            lines.append(f"{name:<28} {Interval(**value)}")
        elif isinstance(value, dict) and value:
            lines.append(f"{name}\n{table(value, indent + '  ')}")
        elif isinstance(value, float):
            lines.append(f"{name:<28} {rounded(value, 6) if key == 'learn/loss' else f'{value:.6g}'}")
        else:
            lines.append(f"{name:<28} {logged(in_words(value))}".rstrip())
    return "\n".join(lines)


def in_words(value: Any) -> str:
    """A value for people, not for Python.

    >>> in_words(None), in_words(True), in_words((0.9, 0.95)), in_words([]), in_words("x")
    ('-', 'yes', '0.9, 0.95', 'none', 'x')
    """
    if value is None or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(in_words, value)) or "none"
    return str(value)
