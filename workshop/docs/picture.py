"""The picture of the README: a recorded episode, every token coloured by where it came from.

crrl hello run.steps=1 run.name=picture eval.tasks=4
python -m workshop.docs.picture runs/picture train-00001-000-04 docs/episode.svg
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from coderepairrl.report.episodes import EpisodeView
from coderepairrl.report.kit import decode_pieces
from coderepairrl.report.run import RunPages, find_episode
from coderepairrl.types import TokenSpan, Turn

COLUMNS, CHARACTER, LINE = 120, 7.25, 18  # characters of a line; pixels of one, and of a line
LEFT, WIDTH = 22, 914
HEAD = 2  # lines kept of the system prompt, before its description of the tools
END = "⏎"

STYLE = """
:root { --card: #fff; --edge: #e4e0d9; --ink: #1f2328; --soft: #6b6f76; --given: #f1efeb; --policy: #b5e3dc; }
@media (prefers-color-scheme: dark) { :root {
  --card: #1c1f23; --edge: #30343a; --ink: #e3e5e8; --soft: #9ba1a9; --given: #2a2e33; --policy: #14615a; } }
text { font: 12px ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--ink); white-space: pre; }
.note { font: 13px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; fill: var(--soft); }
.title { font-weight: 600; fill: var(--ink); }
.given { fill: var(--given); } .policy { fill: var(--policy); }
.card { fill: var(--card); stroke: var(--edge); }
"""


class Piece(NamedTuple):
    """One token, or the part of one that fits on a line."""

    text: str
    origin: str
    """``given`` to the policy, or sampled by the ``policy``."""


Line = list[Piece]


def lines(tokens: Iterator[Piece]) -> Iterator[Line]:
    """Split tokens into lines; consecutive lines that begin with markup share one if they fit."""
    line: Line = []
    for written in _split_at_newlines(tokens):
        joined = (
            _starts_with_markup(line) and _starts_with_markup(written) and _length(line) + _length(written) <= COLUMNS
        )
        if line and not joined:
            yield line
            line = []
        line += written
    yield line


def _split_at_newlines(tokens: Iterator[Piece]) -> Iterator[Line]:
    """Split tokens at line ends and at `COLUMNS`; the marks of a line's end and of empty lines after it stay in it."""
    line: Line = []
    for text, origin in tokens:
        for part in re.split("(\n)", text):
            ended = line and line[-1].text == END
            if part and ((ended and part != "\n") or _length(line) + len(part) > COLUMNS):
                yield line
                line = []
            if part:
                line.append(Piece(part.replace("\n", END), origin))
    yield line


def _length(line: Line) -> int:
    return sum(len(piece.text) for piece in line)


def _starts_with_markup(line: Line) -> bool:
    return "".join(piece.text for piece in line).startswith("<")


def episode_lines(shown: EpisodeView) -> list[Line]:
    """The episode in lines, without the description of the tools in the first prompt."""
    spans = [(span, origin) for turn in shown.episode.turns for span, origin in _spans(turn)]
    tokens = (Piece(text, origin) for span, origin in spans for text in decode_pieces(span.ids, shown.decode))
    whole = list(lines(token for token in tokens if token.text))
    user = next(
        at
        for at, line in enumerate(whole)
        if "user" in "".join(piece.text for piece in line) and _starts_with_markup(line)
    )
    return [*whole[:HEAD], [Piece("... what the tools are, and how to call them ...", "note")], *whole[user:]]


def _spans(turn: Turn) -> tuple[tuple[TokenSpan, str], tuple[TokenSpan, str]]:
    return (turn.given, "given"), (turn.output, "policy")


def draw(shown: EpisodeView) -> str:
    """Draw the picture as SVG for light and dark pages."""
    episode = shown.episode
    trained = sum(len(turn.output) for turn in episode.turns if shown.trained[turn.index] == "trained")
    advantage = "" if shown.advantage is None else f", advantage in its group of attempts {shown.advantage:+.2f}"
    scores = " + ".join(
        f"{score.weight:g} * {score.name} {score.value:.2f}" for score in episode.scores if score.weight
    )
    parts = [
        _note(LEFT, 30, f"One episode, token by token: {episode.task_id}", "note title"),
        _legend(LEFT, 52, "given", "given: prompt, issue, tool results"),
        _legend(LEFT + 260, 52, "policy", f"sampled by the policy: {episode.sampled} tokens, {trained} trained"),
    ]
    y = 82
    for line in episode_lines(shown):
        parts += _line(line, y)
        y += LINE
    parts.append(_note(LEFT, y + 14, f"git diff → {scores} = reward {episode.reward:.2f}{advantage}", "note title"))
    height = y + 34
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="the tokens of one episode"><style>{STYLE}</style>'
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>{"".join(parts)}</svg>\n'
    )


def _line(line: Line, y: int) -> Iterator[str]:
    column = 0
    for text, origin in line:
        x, width = LEFT + column * CHARACTER, len(text) * CHARACTER
        if origin != "note":
            yield f'<rect class="{origin}" x="{x:.2f}" y="{y - 13}" width="{width - 0.8:.2f}" height="16" rx="2"/>'
        if text.strip():
            faint = ' style="fill:var(--soft)"' if origin == "note" or text == END else ""
            yield f'<text x="{x:.2f}" y="{y}" textLength="{width - 0.8:.2f}" lengthAdjust="spacingAndGlyphs"{faint}>'
            yield f"{escape(text)}</text>"
        column += len(text)


def _note(x: int, y: int, text: str, css: str = "note") -> str:
    return f'<text class="{css}" x="{x}" y="{y}">{escape(text)}</text>'


def _legend(x: int, y: int, origin: str, text: str) -> str:
    return f'<rect class="{origin}" x="{x}" y="{y - 11}" width="14" height="14" rx="3"/>{_note(x + 21, y, text)}'


def main() -> None:
    """Draw an episode of a run folder."""
    parser = argparse.ArgumentParser(description="draw the tokens of an episode")
    parser.add_argument("run", type=Path)
    parser.add_argument("episode", help="its id, or the beginning of it")
    parser.add_argument("output", type=Path)
    chosen = parser.parse_args()
    opened = RunPages(chosen.run)
    opened.rows.update()
    view = opened.view_episode(find_episode(opened, chosen.episode))
    chosen.output.write_text(draw(view), encoding="utf-8")


if __name__ == "__main__":
    main()
