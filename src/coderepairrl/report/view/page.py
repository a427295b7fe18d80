"""Pages as pure functions: an `Episode`, or rows, to HTML.

Everything that a model wrote is escaped by the templates, and the page forbids itself scripts and network access
by its content security policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from coderepairrl.agents.stats import tally
from coderepairrl.printable import visible
from coderepairrl.report.view.text import diff_lines, marked, pieces, templates
from coderepairrl.types import Episode, TokenSpan, ToolCall, Turn

Decode = Callable[[Sequence[int]], str]

STATES = ("trained", "masked", "dropped", "sampled")
"""What can become of a sampled token; ``sampled``: no step has consumed it."""

_FULL_COLOUR = 2.0  # an advantage of two standard deviations is shown in full colour
_SURPRISE = 5.0  # a logprob of -5 is shown in full colour
_COLOURS = 6
_NONE, _MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


class TokenView(NamedTuple):
    """A token as the template draws it."""

    html: Markup
    css: str
    surprise: str
    info: str


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as the template draws it."""

    turn: Turn
    relation: str
    forks: bool
    state: str
    reason: str
    given: list[TokenView]
    output: list[TokenView]
    tail: list[TokenView]
    calls: list[ToolCall]
    versions: str


class Row(NamedTuple):
    """A line of the index."""

    episode: Episode
    advantage: float | None = None
    href: str = ""


def render_episode(
    episode: Episode,
    decode: Decode,
    trained: Mapping[int, str] | None = None,
    advantage: float | None = None,
    *,
    run: str = "",
    notice: str = "",
) -> str:
    """The page of one episode.

    `decode` turns ids into text, special tokens included. `trained` says by `Turn.index` what became of a turn's
    output: ``trained``, ``masked:REASON``, ``dropped:REASON`` or ``sampled``; without it the turn itself says
    whether it is masked. `notice` is shown at the top.
    """
    states = {turn.index: _state(turn, trained) for turn in episode.turns}
    calls: dict[int, list[ToolCall]] = {}
    for call in episode.tool_calls:
        calls.setdefault(call.turn, []).append(call)
    turns = [
        _turn(episode.turns, turn, states[turn.index], calls.pop(turn.index, []), decode) for turn in episode.turns
    ]
    lines = diff_lines(episode.patch)
    return _fill(
        "episode.html.j2",
        episode=episode,
        run=run,
        notice=notice,
        turns=turns,
        versions=sorted({span.version for turn in episode.turns for span in turn.versions}),
        colours=_COLOURS,
        other_calls=[call for rest in calls.values() for call in rest],
        tools=tally(episode.tool_calls),
        advantage=advantage,
        strength=f"{15 + 55 * min(1.0, abs(advantage or 0.0) / _FULL_COLOUR):.0f}%",
        account=_account(episode.turns, states),
        timings=_timings(episode.timings),
        diff=lines,
        added=sum(line.kind == "add" for line in lines),
        deleted=sum(line.kind == "del" for line in lines),
    )


def render_index(rows: Iterable[Row], *, run: str = "", notice: str = "") -> str:
    """The page of all episodes of a run, one line each. A row with an `href` links to its episode's page."""
    listed = sorted(rows, key=lambda row: (row.episode.step, row.episode.phase, row.episode.group, row.episode.attempt))
    endings = Counter(str(row.episode.ending) for row in listed)
    tallies = [tally(row.episode.tool_calls) for row in listed]
    return _fill(
        "index.html.j2",
        rows=list(zip(listed, tallies, strict=True)),
        run=run,
        notice=notice,
        endings=dict(sorted(endings.items())),
    )


def _state(turn: Turn, trained: Mapping[int, str] | None) -> tuple[str, str]:
    """State and reason of a turn's output."""
    mark = (trained or {}).get(turn.index, f"masked:{turn.masked}" if turn.masked else "sampled")
    state, _, reason = mark.partition(":")
    if state not in STATES:
        raise ValueError(f"turn {turn.index}: {mark!r} begins with none of {', '.join(STATES)}")
    return state, reason


def _turn(turns: Sequence[Turn], turn: Turn, state: tuple[str, str], calls: list[ToolCall], decode: Decode) -> TurnView:
    forks = turn.base is not None and any(other.base == turn.base for other in turns[: turn.index])
    relation = "new conversation" if turn.base is None else f"{'forks from' if forks else 'extends'} turn {turn.base}"
    if turn.fork is not None and turn.fork.messages:
        forks, relation = True, f"forks inside turn {turn.fork.turn}, whose first {turn.fork.tokens} tokens it shares"
    output = _sampled(turn, turn.output, 0, state, decode)
    tail = _sampled(turn, turn.tail, len(turn.output), ("dropped", "stop_string"), decode)
    versions = ", ".join(f"v{span.version}" for span in turn.versions)
    given = _given(turn.given, decode)
    return TurnView(turn, relation, forks, *state, given, output, tail, calls, versions)


def _given(span: TokenSpan, decode: Decode) -> list[TokenView]:
    shown = zip(span.ids, pieces(span.ids, decode), strict=True)
    return [
        TokenView(marked(piece.text), "g part" if piece.part else "g", "0", f"given · id {id}") for id, piece in shown
    ]


def _sampled(turn: Turn, span: TokenSpan, start: int, state: tuple[str, str], decode: Decode) -> list[TokenView]:
    versions: dict[int, int] = {
        at: ranged.version for ranged in turn.versions for at in range(ranged.start, ranged.end)
    }
    why = f"{state[0]} ({state[1]})" if state[1] else state[0]
    views = []
    for at, (id, logprob, piece) in enumerate(
        zip(span.ids, span.logprobs, pieces(span.ids, decode), strict=True), start
    ):
        version = versions.get(at)
        css = f"p {state[0]}" + (" part" if piece.part else "")
        css += "" if version is None else f" v{version % _COLOURS}"
        info = (
            f"policy · id {id} · logprob {logprob:.4f} · " + ("" if version is None else f"version {version} · ") + why
        )
        views.append(TokenView(marked(piece.text), css, f"{min(1.0, -logprob / _SURPRISE):.2f}", info))
    return views


def _account(turns: Sequence[Turn], states: Mapping[int, tuple[str, str]]) -> list[tuple[str, str, int]]:
    """State, reason and number of the sampled tokens, largest states first in the order of `STATES`."""
    counts: Counter[tuple[str, str]] = Counter()
    for turn in turns:
        counts[states[turn.index]] += len(turn.output)
        counts["dropped", "stop_string"] += len(turn.tail)
    order = sorted(counts.items(), key=lambda entry: (STATES.index(entry[0][0]), -entry[1]))
    return [(state, reason, tokens) for (state, reason), tokens in order if tokens]


def _timings(timings: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Activity, seconds and share of the whole, the unexplained rest last."""
    parts = {name: seconds for name, seconds in timings.items() if name != "total"}
    total = max(timings.get("total", 0.0), sum(parts.values()))
    if total <= 0:
        return []
    rest = {"other": total - sum(parts.values())} if total - sum(parts.values()) > 0.0005 else {}
    return [(name, seconds, seconds / total) for name, seconds in (parts | rest).items()]


def _number(value: float | None, digits: int = 3) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return _NONE if value is None else f"{value:+.2f}".replace("-", _MINUS)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


@cache
def _environment() -> Environment:
    return templates("coderepairrl.report.view", visible=visible, number=_number, signed=_signed, seconds=_seconds)


def _fill(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)
