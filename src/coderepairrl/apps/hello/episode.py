"""A few episodes as they happen, in short."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping

from coderepairrl.printable import printable
from coderepairrl.types import Ending, Episode, ToolCall

COLUMNS = 62
"""Columns for the text after a name."""
LINES = 6
"""Lines of an issue or a diff."""
_NAME = 13


class Shown:
    """Choice of episodes: the first with a patch, and the first of training whose patch passes its tests."""

    def __init__(self) -> None:
        self._first = self._repaired = True

    def __call__(self, episode: Episode) -> str:
        """The text for `episode`, empty if it is not shown."""
        if episode.ending is Ending.VOID or not episode.patch:
            return ""
        if self._repaired and episode.phase == "train" and any(score.passed for score in episode.scores):
            self._repaired = self._first = False
            return as_text("the first bug that is repaired in training", episode)
        if self._first:
            self._first = False
            return as_text("an episode, before any training", episode)
        return ""


def as_text(title: str, episode: Episode) -> str:
    """Episode under the line `title`, in at most 80 columns, safe to print."""
    rows = [("issue", _cut(_issue(episode)))]
    rows += [(printable(call.name)[: _NAME - 1], [_call(call)]) for call in episode.tool_calls]
    rows += [("diff", _cut(_changed(episode.patch))), ("reward", [_reward(episode)])]
    text_lines = [f"{title} ({printable(episode.task_id)})"]
    for name, lines in rows:
        text_lines += [f"{name if not number else '':<{_NAME}}{line}".rstrip() for number, line in enumerate(lines)]
    return "\n".join(text_lines)


def _issue(episode: Episode) -> Iterator[str]:
    messages = episode.turns[0].messages if episode.turns else ()
    content = next((each.get("content") for each in messages if each.get("role") == "user"), "")
    parts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
    for line in "\n".join(map(str, parts)).strip().splitlines():
        yield from textwrap.wrap(printable(line), COLUMNS) or [""]


def _changed(patch: bytes) -> Iterator[str]:
    for line in patch.decode(errors="replace").splitlines():
        if line.startswith("+++ b/"):
            yield printable(line.removeprefix("+++ b/"))
        elif line[:1] in ("+", "-") and not line.startswith(("+++", "---")):
            yield printable(line.replace("\t", "    "))


def _call(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    words = " | ".join(map(str, arguments.values())) if isinstance(arguments, Mapping) else str(arguments)
    end = "" if call.ok else "  (failed)"
    return textwrap.shorten(printable(words), COLUMNS - len(end), placeholder=" ...") + end


def _reward(episode: Episode) -> str:
    parts = ", ".join(f"{score.name} {score.value:.2f}" for score in episode.scores if score.weight)
    return f"{episode.reward:.2f} ({parts})"


def _cut(lines: Iterator[str]) -> list[str]:
    short_lines = [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 4]} ..." for line in lines]
    return [
        *short_lines[:LINES],
        *([f"... {len(short_lines) - LINES} more lines"] if len(short_lines) > LINES else []),
    ] or ["none"]
