"""Pages as pure functions: an `Episode`, a group or a task, to HTML.

Everything that a model wrote is escaped by the templates or is data (`embedded`), and a page's content security policy
allows no scripts but ours, and no network but the page's own server.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from coderepairrl import registry, rewards
from coderepairrl.errors import ConfigError
from coderepairrl.printable import counted, visible
from coderepairrl.report.view.conversation import Field, Message, conversation, edits, gist, is_long, tree, unheard
from coderepairrl.report.view.rows import CELLS, OPEN, Row, file_name
from coderepairrl.report.view.text import DiffLine, diff_lines, pieces, templates
from coderepairrl.types import Ending, Episode, Task, TokenSpan, Turn

Decode = Callable[[Sequence[int]], str]

STATES = ("trained", "masked", "dropped", "sampled")
"""What can become of a sampled token; ``sampled``: no step has consumed it."""
ASSETS = ("style.css", "list.js", "episode.js")
_FULL_COLOUR = 2.0  # an advantage of two standard deviations is shown in full colour
_COLOURS = 6
_LANE, _NODE = 14, 30  # pixels between lanes of the tree of turns, and between its turns
_NONE, _MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Around:
    """What a page is part of."""

    run: str = ""
    """The name of the run."""
    run_page: str = ""
    """Its folder of pages; with none the page stands alone, with everything in it."""
    live: bool = False
    """Whether a server renders it, from a run that may go on."""
    single: bool = True
    """Whether no other run is shown beside it."""
    notice: str = ""
    """What is missing, such as the tokenizer."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as the template draws it."""

    turn: Turn
    relation: str
    forks: bool
    state: str
    reason: str
    messages: list[Message]
    versions: str


@dataclass(frozen=True, slots=True)
class Shown:
    """An episode with what a page says about it besides."""

    episode: Episode
    decode: Decode
    """Ids to text, special tokens included."""
    trained: Mapping[int, str] = field(default_factory=dict)
    """By `Turn.index`, what became of a turn's output: ``trained``, ``masked:REASON``, ``dropped:REASON`` or
    ``sampled``; a turn that is not here says itself whether it is masked."""
    advantage: float | None = None
    run: str = ""
    notice: str = ""
    """What is missing, such as the tokenizer; else empty."""
    task: Task | None = None
    ending: str = ""
    """`OPEN` or `UNFINISHED` of one without a verdict."""
    consumed: int | None = None
    """The step that trained on it."""


class Attempt(NamedTuple):
    """An attempt in a group."""

    row: Row
    turns: list[tuple[str, list[Field], int, bool | None]]
    """The reply in one line, what its tool calls replace by what, the tokens, and whether its tool calls succeeded."""
    shared: int
    """So many turns from the first on are those of the first attempt of the group."""
    diff: list[DiffLine]


def render_episode(shown: Shown, around: Around, group: Sequence[Row] = ()) -> str:
    """The page of one episode; `group` are the attempts that it is one of."""
    episode = shown.episode
    states = {turn.index: _state(turn, shown.trained) for turn in episode.turns}
    messages = conversation(episode)
    turns = [_turn(episode.turns, turn, states[turn.index], messages[turn.index]) for turn in episode.turns]
    attempt = diff_lines(episode.patch)
    reference = diff_lines(shown.task.reference) if shown.task is not None else []
    nodes = tree(episode, messages)
    for node in nodes:  # one that has no recorded messages is shown by its tokens
        turn = episode.turns[node.turn]
        if not turn.messages and turn.sampled:
            said = visible(shown.decode(turn.output.ids))
            turns[node.turn].messages.append(Message("assistant", "", said, "", []))
    return _fill(
        "episode.html.j2",
        around,
        depth=2,
        script="episode.js",
        episode=episode,
        task=shown.task,
        ending=shown.ending or str(episode.ending),
        scored=not shown.ending and episode.ending is not Ending.VOID,
        open=shown.ending == OPEN,
        consumed=shown.consumed,
        advantage=shown.advantage,
        strength=f"{15 + 55 * min(1.0, abs(shown.advantage or 0.0) / _FULL_COLOUR):.0f}%",
        group=group,
        turns=turns,
        nodes=nodes,
        lane=_LANE,
        height=_NODE,
        other_calls=unheard(episode),
        account=_account(episode.turns, states),
        timings=_timings(episode.timings),
        meanings={score.name: meaning(score.name) for score in episode.scores},
        attempt=attempt,
        reference=reference,
        same=_both(attempt, reference),
        added=sum(line.kind == "add" for line in attempt),
        deleted=sum(line.kind == "del" for line in attempt),
        data=_tokens(turns, shown.decode),
    )


def render_group(name: str, attempts: Sequence[Attempt], task: Task | None, around: Around) -> str:
    """The page of a group: its attempts side by side, turn by turn."""
    return _fill("group.html.j2", around, depth=2, name=name, attempts=attempts, task=task)


def render_task(
    name: str, rows: Sequence[Row], patches: Mapping[str, list[DiffLine]], task: Task | None, around: Around
) -> str:
    """The page of a task: every attempt at it, in the order of the steps."""
    ordered = sorted(rows, key=lambda row: (row.step, row.phase == "train", row.group, row.attempt))
    reference = diff_lines(task.reference) if task is not None else []
    steps = max((row.step for row in rows), default=0)
    rewards = [row.reward for row in ordered if row.reward is not None]
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    return _fill(
        "task.html.j2",
        around,
        depth=2,
        name=name,
        rows=ordered,
        patches=patches,
        task=task,
        reference=reference,
        steps=steps,
        low=low,
        high=high,
    )


def render_run(rows: Sequence[Row], around: Around, *, about: Mapping[str, Any], state: int, damage: str) -> str:
    """The page of a run: the list of its episodes."""
    data = {"cells": CELLS, "rows": [row.cells() for row in rows], "state": state, "live": around.live}
    return _fill("run.html.j2", around, depth=1, script="list.js", data=embedded(data), about=about, damage=damage)


def render_runs(runs: Sequence[Mapping[str, Any]], *, live: bool = False) -> str:
    """The page of several runs."""
    return _fill("runs.html.j2", Around(live=live, run_page=".", single=False), depth=0, runs=runs)


def asset(name: str) -> str:
    """One of `ASSETS`."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def embedded(data: Any) -> Markup:
    """`data` as JSON that may stand in a page: nothing in it ends the element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def to_attempt(row: Row, episode: Episode, first: Episode | None) -> Attempt:
    """`episode` beside the `first` of its group, with which it may begin alike."""
    messages = conversation(episode)
    shared = 0
    if first is not None:
        pairs = zip(first.turns, episode.turns, strict=False)
        alike = [(a.given.ids, a.output.ids, a.messages) == (b.given.ids, b.output.ids, b.messages) for a, b in pairs]
        shared = alike.index(False) if False in alike else len(alike)
    oks: dict[int, bool] = {}
    for call in episode.tool_calls:
        oks[call.turn] = oks.get(call.turn, True) and call.ok
    turns = [
        (gist(said := messages[turn.index], turn.index), edits(said), turn.sampled, oks.get(turn.index))
        for turn in episode.turns
    ]
    return Attempt(row, turns, shared, diff_lines(episode.patch))


@cache
def meaning(reward: str) -> tuple[str, str]:
    """What a reward that ships measures: in a sentence, and all that is known of it; empty for others."""
    if reward not in rewards.SHIPPED:
        return "", ""
    try:
        first, _, rest = (registry.resolve("reward", reward, rewards.SHIPPED).__doc__ or "").partition("\n")
    except ConfigError:
        return "", ""
    lines = [line.removeprefix("    ") for line in rest.strip("\n").split("\n")]
    return first, "\n".join(lines).strip("\n").rstrip()


def _state(turn: Turn, trained: Mapping[int, str]) -> tuple[str, str]:
    """State and reason of a turn's output."""
    mark = trained.get(turn.index, f"masked:{turn.masked}" if turn.masked else "sampled")
    state, _, reason = mark.partition(":")
    if state not in STATES:
        raise ValueError(f"turn {turn.index}: {mark!r} begins with none of {', '.join(STATES)}")
    return state, reason


def _turn(turns: Sequence[Turn], turn: Turn, state: tuple[str, str], messages: list[Message]) -> TurnView:
    forks = turn.base is not None and any(other.base == turn.base for other in turns[: turn.index])
    relation = "new conversation" if turn.base is None else f"{'forks from' if forks else 'extends'} turn {turn.base}"
    if turn.fork is not None and turn.fork.messages:
        forks, relation = True, f"forks inside turn {turn.fork.turn}, whose first {turn.fork.tokens} tokens it shares"
    versions = ", ".join(f"v{span.version}" for span in turn.versions)
    return TurnView(turn, relation, forks or (turn.base is None and turn.index > 0), *state, list(messages), versions)


def _tokens(turns: Sequence[TurnView], decode: Decode) -> Markup:
    """What the script draws tokens from: by turn, text, id and logprob of each."""

    def span(tokens: TokenSpan) -> dict[str, Any]:
        text = [visible(piece.text) for piece in pieces(tokens.ids, decode)]
        return {"text": text, "ids": tokens.ids, "logprobs": [round(each, 4) for each in tokens.logprobs]}

    return embedded(
        {
            view.turn.index: {
                "given": span(view.turn.given),
                "output": span(view.turn.output),
                "tail": span(view.turn.tail),
                "versions": [(each.version, each.start, each.end) for each in view.turn.versions],
                "state": view.state,
                "reason": visible(view.reason),
            }
            for view in turns
        }
    )


def _both(attempt: Sequence[DiffLine], reference: Sequence[DiffLine]) -> frozenset[DiffLine]:
    """Changed lines that both patches have."""
    return frozenset(line for line in {*attempt} & {*reference} if line.kind in ("add", "del"))


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
    return _NONE if value is None else f"{value:.{digits}f}".replace("-", _MINUS)


def _signed(value: float | None) -> str:
    return _NONE if value is None else f"{value:+.2f}".replace("-", _MINUS)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


@cache
def _environment() -> Environment:
    return templates(
        "coderepairrl.report.view",
        visible=visible,
        number=_number,
        signed=_signed,
        seconds=_seconds,
        file_name=file_name,
        long=is_long,
        counted=lambda noun, count: counted(count, noun),
        commas=lambda number: f"{number:,}",
    )


def _fill(template: str, around: Around, *, depth: int, script: str = "", **values: Any) -> str:
    """A page `depth` folders below the first one."""
    alone = not around.run_page
    code = asset(script) if script and alone else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return (
        _environment()
        .get_template(template)
        .render(
            around=around,
            alone=alone,
            root="../" * depth,
            script=script,
            style=Markup(asset("style.css")) if alone else "",
            code=Markup(code),
            scripts=f"'sha256-{digest}'" if code else "'self'" if script else "'none'",
            **values,
        )
    )
