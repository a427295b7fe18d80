"""Pages of episodes, groups, tasks, and the list of episodes, as pure functions."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from markupsafe import Markup

from coderepairrl import registry, rewards
from coderepairrl.printable import visible
from coderepairrl.report.conversation import (
    Field,
    Message,
    build_conversation,
    build_turn_tree,
    find_unrecorded_calls,
    list_edits,
)
from coderepairrl.report.kit import DiffLine, PageContext, decode_pieces, embed_json, parse_diff_lines, render_page
from coderepairrl.report.plots import draw_figure
from coderepairrl.report.plots.panels import Panel, Series
from coderepairrl.report.rows import CELLS, OPEN, EpisodeRow
from coderepairrl.types import Ending, Episode, Task, TokenSpan, Turn

Decode = Callable[[Sequence[int]], str]  # converts token ids to text, special tokens included

STATES = ("trained", "masked", "dropped", "sampled")
"""States of a sampled token; ``sampled``: no step has consumed it."""
_FULL_COLOUR = 2.0  # an advantage of two standard deviations is shown in full colour
_LANE_WIDTH, _NODE_HEIGHT = 14, 30  # pixels, in the tree of turns; style.css has the same


@dataclass(frozen=True, slots=True)
class TurnView:
    """Turn as the template draws it."""

    turn: Turn
    relation: str  # to earlier turns, in words
    forks: bool  # whether to show the relation; false if the turn only extends another
    state: str  # one of `STATES`
    reason: str
    messages: list[Message]
    versions: str  # policy versions that sampled it


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """Episode with other contents of its page."""

    episode: Episode
    decode: Decode
    trained: Mapping[int, str] = field(default_factory=dict)
    """``trained``, ``masked:REASON``, ``dropped:REASON`` or ``sampled`` by `Turn.index`; default: the turn's mask."""
    advantage: float | None = None
    run: str = ""
    notice: str = ""
    task: Task | None = None
    ending: str = ""
    """`OPEN` or `UNFINISHED` without a verdict."""
    consumed: int | None = None
    """Step that trained on it."""


class AttemptColumn(NamedTuple):
    """Attempt in a group."""

    row: EpisodeRow
    turns: list[tuple[str, list[Field], int, bool | None]]
    """Reply in one line, edits by tool calls, tokens, success of the calls."""
    shared: int
    """Leading turns equal to the first attempt's."""
    diff: list[DiffLine]


def render_episode(view: EpisodeView, context: PageContext, group: Sequence[EpisodeRow] = ()) -> str:
    """Page of an episode; `group` are the attempts of its group."""
    episode = view.episode
    states = {turn.index: _parse_state(turn, view.trained) for turn in episode.turns}
    messages = build_conversation(episode)
    turns = [_view_turn(episode.turns, turn, states[turn.index], messages[turn.index]) for turn in episode.turns]
    attempt = parse_diff_lines(episode.patch)
    reference = parse_diff_lines(view.task.reference) if view.task is not None else []
    nodes = build_turn_tree(episode, messages)
    for turn, turn_view in zip(episode.turns, turns, strict=True):
        if not turn.messages and turn.sampled:  # no recorded messages: the decoded tokens take their place
            reply = visible(view.decode(turn.output.ids))
            turn_view.messages.append(Message("assistant", "", reply, "", []))
    return render_page(
        "episode.html.j2",
        context,
        depth=2,
        script="episode.js",
        episode=episode,
        task=view.task,
        ending=view.ending or str(episode.ending),
        scored=not view.ending and episode.ending is not Ending.VOID,
        open=view.ending == OPEN,
        consumed=view.consumed,
        advantage=view.advantage,
        # opacity from 15 %, to show small advantages, to 70 %, to keep the tokens legible
        strength=f"{15 + 55 * min(1.0, abs(view.advantage or 0.0) / _FULL_COLOUR):.0f}%",
        group=group,
        turns=turns,
        nodes=nodes,
        lane=_LANE_WIDTH,
        height=_NODE_HEIGHT,
        other_calls=find_unrecorded_calls(episode),
        account=_count_tokens_by_state(episode.turns, states),
        timings=_list_time_shares(episode.timings),
        meanings={score.name: describe_reward(score.name) for score in episode.scores},
        attempt=attempt,
        reference=reference,
        same={line for line in {*attempt} & {*reference} if line.kind in ("add", "del")},
        added=sum(line.kind == "add" for line in attempt),
        deleted=sum(line.kind == "del" for line in attempt),
        data=_embed_tokens(turns, view.decode),
    )


def render_group(name: str, attempts: Sequence[AttemptColumn], task: Task | None, context: PageContext) -> str:
    """Page of a group: attempts in columns, turn by turn."""
    return render_page("group.html.j2", context, depth=2, name=name, attempts=attempts, task=task)


def render_task(
    name: str, rows: Sequence[EpisodeRow], diffs: Mapping[str, list[DiffLine]], task: Task | None, context: PageContext
) -> str:
    """Page of a task: all attempts in step order."""
    ordered = sorted(rows, key=lambda row: (row.step, row.phase == "train", row.group, row.attempt))
    series = []
    for colour, title in enumerate(("training", "evaluation")):
        is_training = title == "training"
        scored = [row for row in ordered if row.reward is not None and (row.phase == "train") == is_training]
        ends = [None] * len(scored)  # points without intervals
        steps, values = [row.step for row in scored], [row.reward for row in scored]
        series.append(Series(title, steps, values, colour, low=ends, high=ends, joined=False))
    return render_page(
        "task.html.j2",
        context,
        depth=2,
        name=name,
        rows=ordered,
        diffs=diffs,
        task=task,
        reference=parse_diff_lines(task.reference) if task is not None else [],
        chart=Markup(draw_figure([Panel("reward of each attempt", series, include=(0.0, 1.0))])),
    )


def render_list(rows: Sequence[EpisodeRow], context: PageContext, *, state: int, damage: str) -> str:
    """Page of a run's episodes; `damage` says what cannot be read."""
    data = {"cells": CELLS, "rows": [row.cells() for row in rows], "state": state, "live": context.live}
    return render_page("list.html.j2", context, depth=1, script="list.js", data=embed_json(data), damage=damage)


def make_attempt_column(row: EpisodeRow, episode: Episode, first: Episode | None) -> AttemptColumn:
    """View an attempt, compared with the `first` of its group (None: itself)."""
    messages = build_conversation(episode)
    pairs = zip(first.turns if first is not None else (), episode.turns, strict=False)
    equal = [(a.given.ids, a.output.ids, a.messages) == (b.given.ids, b.output.ids, b.messages) for a, b in pairs]
    turns = [
        (node.title, list_edits(messages[turn.index]), turn.sampled, node.ok)
        for turn, node in zip(episode.turns, build_turn_tree(episode, messages), strict=True)
    ]
    shared = [*equal, False].index(False)  # the first turn that differs
    return AttemptColumn(row, turns, shared, parse_diff_lines(episode.patch))


@cache
def describe_reward(reward: str) -> tuple[str, str]:
    """Read summary and details from a shipped reward's docstring; empty for others."""
    if reward not in rewards.SHIPPED:
        return "", ""
    text = inspect.cleandoc(registry.resolve_class("reward", reward, rewards.SHIPPED).__doc__ or "")
    summary, _, details = text.partition("\n")
    return summary, details.strip()


def _parse_state(turn: Turn, trained: Mapping[int, str]) -> tuple[str, str]:
    mark = trained.get(turn.index, f"masked:{turn.masked}" if turn.masked else "sampled")
    state, _, reason = mark.partition(":")
    if state not in STATES:
        raise ValueError(f"turn {turn.index}: {mark!r} begins with none of {', '.join(STATES)}")
    return state, reason


def _view_turn(turns: Sequence[Turn], turn: Turn, state: tuple[str, str], messages: list[Message]) -> TurnView:
    if turn.fork is not None and turn.fork.messages:
        forks, relation = True, f"forks inside turn {turn.fork.turn}, whose first {turn.fork.tokens} tokens it shares"
    elif turn.base is None:
        forks, relation = turn.index > 0, "new conversation"
    else:
        forks = any(other.base == turn.base for other in turns[: turn.index])
        relation = f"{'forks from' if forks else 'extends'} turn {turn.base}"
    versions = ", ".join(f"v{span.version}" for span in turn.versions)
    return TurnView(turn, relation, forks, *state, list(messages), versions)


def _embed_tokens(turns: Sequence[TurnView], decode: Decode) -> Markup:
    def dump_span(tokens: TokenSpan) -> dict[str, Any]:
        text = [visible(piece) for piece in decode_pieces(tokens.ids, decode)]
        return {"text": text, "ids": tokens.ids, "logprobs": [round(each, 4) for each in tokens.logprobs]}

    return embed_json(
        {
            view.turn.index: {
                "given": dump_span(view.turn.given),
                "output": dump_span(view.turn.output),
                "tail": dump_span(view.turn.tail),
                "versions": [(each.version, each.start, each.end) for each in view.turn.versions],
                "state": view.state,
                "reason": visible(view.reason),
            }
            for view in turns
        }
    )


def _count_tokens_by_state(turns: Sequence[Turn], states: Mapping[int, tuple[str, str]]) -> list[tuple[str, str, int]]:
    counts: Counter[tuple[str, str]] = Counter()
    for turn in turns:
        counts[states[turn.index]] += len(turn.output)
        counts["dropped", "stop_string"] += len(turn.tail)
    order = sorted(counts.items(), key=lambda entry: (STATES.index(entry[0][0]), -entry[1]))
    return [(state, reason, tokens) for (state, reason), tokens in order if tokens]


def _list_time_shares(timings: Mapping[str, float]) -> list[tuple[str, float, float]]:
    parts = {name: seconds for name, seconds in timings.items() if name != "total"}
    total = max(timings.get("total", 0.0), sum(parts.values()))
    if (other := total - sum(parts.values())) > 0.0005:  # half a millisecond, the least that is shown
        parts["other"] = other
    return [(name, seconds, seconds / total) for name, seconds in parts.items() if total > 0]
