"""Live view of an agent's work on stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import indent
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from coderepairrl.printable import logged, printable, visible
from coderepairrl.types import AgentReport, Turn

SHOWN_LINES = 8
SHOWN_COLUMNS = 160


class Trace:
    """Prints an attempt, in colour on a terminal; with `full`, all of each message."""

    def __init__(self, *, quiet: bool = False, full: bool = False) -> None:
        self.full = full
        self.console = Console(stderr=True, quiet=quiet, highlight=False)

    def say(self, name: str, text: str) -> None:
        """Print `text` under a name."""
        self._print(Text.assemble((f"{name:<12}", "bold"), logged(text)))

    def show_turn(self, turn: Turn) -> None:
        """Show the reply and, except in the first turn, its request; of a rewritten history, only the last message."""
        *request_messages, reply = turn.messages
        if turn.index or self.full:
            for message in request_messages if turn.base is not None or self.full else request_messages[-1:]:
                self._show_message(message)
        self._show_message(reply)

    def show_end(self, report: AgentReport, seconds: float) -> None:
        """Show how the attempt ended, and the outcome of calls that no later turn shows."""
        calls = report.tool_calls or ()
        for call in calls if report.exit != "submitted" else ():
            if call.turn == calls[-1].turn:
                self._print(Text(f"  {'ok' if call.ok else 'failed'}, {call.output_chars} characters", "dim"))
        failed = sum(not call.ok for call in calls)
        counted = "" if report.tool_calls is None else f" after {len(calls)} tool calls ({failed} failed)"
        spent = f"{counted}, {seconds:.1f} s"
        match report.exit:
            case "submitted":
                self.say("ended", f"submitted{spent}")
            case "crash":
                self.say("ended", f"the agent crashed: {report.log.strip()}\n{'':<12}{spent}")
            case limit:
                self.say("ended", f"stopped by a limit ({limit}){spent}")

    def show_output(self, text: str) -> None:
        """Show the end of a program's output, for attempts without a patch."""
        lines = text.strip().splitlines()
        self.say("printed", f"{len(lines)} lines, the last of which are" if lines else "nothing")
        self._print(Text(indent(cut_text("\n".join(lines[-SHOWN_LINES:])), "  "), "dim"))

    def _show_message(self, message: Mapping[str, Any]) -> None:
        content, role = message.get("content"), message.get("role")
        if self.full and role != "assistant":
            self._print(Text(f"{role}:", "bold"))
        max_lines = None if self.full else SHOWN_LINES
        if content and role == "assistant":
            self._print(Text("\n".join(f"> {line}" for line in cut_text(content, max_lines).split("\n")), "italic"))
        elif content:
            self._print(Text(indent(cut_text(content, max_lines), "  "), "dim"))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            self._print(
                Text.assemble(("* ", "bold cyan"), format_call(function.get("name"), function.get("arguments")))
            )

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)


def print_bytes(data: bytes, to: TextIO) -> None:
    """Write a patch or output; on a terminal, without control sequences."""
    if to.isatty():
        to.write(visible(data.decode(errors="replace")))
    else:
        to.flush()
        to.buffer.write(data)
        to.buffer.flush()


def cut_text(content: Any, max_lines: int | None = SHOWN_LINES) -> str:
    """Cut a message, text or a list of parts, to its first `max_lines` lines (None: all), safe to print.

    >>> cut_text("one\\n" * 10).endswith("... 2 more lines")
    True
    """
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    lines = visible(str(content)).strip("\n").split("\n")
    if max_lines is None:
        return "\n".join(lines)
    cut_lines = [line if len(line) <= SHOWN_COLUMNS else f"{line[:SHOWN_COLUMNS]}..." for line in lines[:max_lines]]
    more = len(lines) - len(cut_lines)
    return "\n".join([*cut_lines, *([f"... {more} more lines"] if more else [])])


def format_call(name: Any, raw_arguments: Any) -> Text:
    """Format a tool call; several arguments are listed by name."""
    try:
        arguments = json.loads(raw_arguments) if isinstance(raw_arguments, str) else raw_arguments
    except (ValueError, RecursionError):
        arguments = raw_arguments
    values = arguments if isinstance(arguments, Mapping) else {"": arguments}
    cut = {printable(str(key)): indent_value(cut_text(value)) for key, value in values.items()}
    parts = cut.values() if len(cut) == 1 else [indent(f"\n{key}:{value}", "  ") for key, value in cut.items()]
    return Text.assemble((printable(str(name)), "bold cyan"), *parts)


def indent_value(value: str) -> str:
    """Indent `value` to follow a name: behind it, or below if it has several lines."""
    return f"\n{indent(value, '  ')}" if "\n" in value else f" {value}"
