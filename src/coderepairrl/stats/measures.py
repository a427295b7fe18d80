"""Measures of an episode and their means with intervals; costs of attempts; counts of rewards' notes.

Void episodes are counted, not measured.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coderepairrl.stats.intervals import (
    Interval,
    cluster_episodes,
    is_share,
    mean_interval,
    paired_difference,
    sign_flip_test,
)
from coderepairrl.types import Ending, Episode, Turn

_TOLERANCE = 1e-9  # a smaller gain of a task counts as none


class Prices(NamedTuple):
    """Money per million tokens. Cached tokens cost the same by default."""

    prompt: float
    sampled: float
    cached: float | None = None


class Cost(NamedTuple):
    """Model calls, tokens (cached prompts included), and seconds."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    attempt_seconds: float = 0.0
    unreported: int = 0
    """Calls without reported tokens, missing from the sums."""

    def plus(self, other: Cost) -> Cost:
        """Add `other`."""
        return Cost(*map(operator.add, self, other))

    def money(self, prices: Prices) -> float:
        """Price of the tokens.

        >>> Cost(1, 1_000_000, 500_000, 100_000).money(Prices(2.0, 10.0, cached=1.0))
        2.5
        """
        cached = prices.prompt if prices.cached is None else prices.cached
        fresh = self.prompt_tokens - self.cached_tokens
        return (fresh * prices.prompt + self.cached_tokens * cached + self.sampled_tokens * prices.sampled) / 1e6


def sum_costs(episodes: Iterable[Episode]) -> Cost:
    """Sum the costs of `episodes`, void ones included."""
    total = Cost()
    for episode in episodes:
        lengths: list[int] = []
        for turn in episode.turns:
            total = total.plus(_call_cost(turn, lengths))
        total = total.plus(Cost(attempt_seconds=episode.timings.get("total", 0.0)))
    return total._replace(attempt_seconds=round(total.attempt_seconds, 3))


def _call_cost(turn: Turn, lengths: list[int]) -> Cost:
    """Cost of one call; appends its sequence's length to `lengths`."""
    prompt = len(turn.given)
    if turn.fork is not None:
        prompt += turn.fork.tokens
    elif turn.base is not None:
        prompt += lengths[turn.base] if turn.base < len(lengths) else 0
    lengths.append(prompt + len(turn.output))
    usage: Any = turn.remote.get("usage")
    if turn.remote and not usage:
        return Cost(1, unreported=1)
    if not usage:
        return Cost(1, prompt, 0, turn.sampled)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Cost(1, usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))


COUNTS = frozenset({"calls", "turns", "sampled_tokens"})
"""Numbers per episode; other measures are shares where all values lie in [0, 1]."""

# measures besides scores
NAMES = ("reward", "empty_patches", "limit", "crash", "turns", "sampled_tokens", "calls", "tool_success")


def measure_episode(episode: Episode) -> dict[str, float]:
    """Measure one episode, without undefined or unknown measures."""
    calls = episode.tool_calls
    empty = not episode.patch.strip()
    values = {
        "reward": episode.reward,
        "empty_patches": float(empty),
        "limit": float(episode.ending is Ending.LIMIT),
        "crash": float(episode.ending is Ending.CRASH),
        "turns": float(len(episode.turns)),
    }
    if not (cost := sum_costs([episode])).unreported:
        values["sampled_tokens"] = float(cost.sampled_tokens)
    if episode.calls_known:
        values["calls"] = float(len(calls))
    if calls:
        values["tool_success"] = sum(call.ok for call in calls) / len(calls)
    for score in episode.scores:
        values[score.name] = score.value
        if not empty:  # a rising mean over all may come from fewer empty patches alone
            values[f"{score.name}_per_patch"] = score.value
    return values


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over episodes with 95 % intervals."""

    episodes: int
    tasks: int
    void: int
    values: Mapping[str, Interval]


def summarise(episodes: Iterable[Episode]) -> Summary:
    """Summarise an evaluation or step."""
    everything = list(episodes)
    valid = [episode for episode in everything if episode.ending is not Ending.VOID]
    columns = collect_columns(valid, cluster_episodes(everything), map(measure_episode, valid))
    return Summary(
        episodes=len(valid),
        tasks=len({episode.task_id for episode in valid}),
        void=len(everything) - len(valid),
        values={name: measure_interval(name, values, clusters) for name, (values, clusters) in columns.items()},
    )


def collect_columns(
    episodes: Iterable[Episode], cluster_of: Mapping[str, str], rows: Iterable[Mapping[str, float]]
) -> dict[str, tuple[list[float], list[str]]]:
    """Collect each measure's values, and their clusters, from the `rows` of `episodes`."""
    columns: dict[str, tuple[list[float], list[str]]] = {}
    for episode, row in zip(episodes, rows, strict=True):
        for name, value in row.items():
            values, clusters = columns.setdefault(name, ([], []))
            values.append(value)
            clusters.append(cluster_of[episode.task_id])
    return columns


def is_share_measure(measure: str, values: Iterable[float], counts: Container[str] = COUNTS) -> bool:
    """Whether `values` of a measure are in [0, 1] and not counts."""
    return measure not in counts and is_share(values)


def measure_interval(
    measure: str,
    values: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    share: bool | None = None,
    counts: Container[str] = COUNTS,
) -> Interval:
    """Mean of a measure in `clusters`; `share` defaults to `is_share_measure`."""
    share = is_share_measure(measure, values, counts) if share is None else share
    return mean_interval(values, clusters, share=share, least=0.0 if measure in counts else -math.inf)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A measure before and after, over the tasks that both sides measured."""

    change: Interval
    """Mean of ``after - before``."""
    p: float
    """Two-sided (`sign_flip_test`)."""
    tasks: int
    better: int
    worse: int
    early: Interval = field(repr=False)
    """Mean of `before`."""
    late: Interval = field(repr=False)
    before: Mapping[str, float] = field(repr=False)
    """Means by task, tasks sorted."""
    after: Mapping[str, float] = field(repr=False)


def compare_tasks(
    measure: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    cluster_of: Mapping[str, Hashable],
    *,
    share: bool | None = None,
    counts: Container[str] = COUNTS,
) -> Pairs:
    """Compare a measure's means by task. Raises ValueError without a common task."""
    tasks = sorted(before.keys() & after.keys())  # random flips of signs depend on the order
    first, last = ([side[task] for task in tasks] for side in (before, after))
    clusters = [cluster_of[task] for task in tasks]
    share = is_share_measure(measure, first + last, counts) if share is None else share
    early, late = (measure_interval(measure, side, clusters, share=share, counts=counts) for side in (first, last))
    gains = [new - old for old, new in zip(first, last, strict=True)]
    return Pairs(
        change=paired_difference(first, last, clusters, share=share),
        p=sign_flip_test(first, last, clusters),
        tasks=len(tasks),
        better=sum(gain > _TOLERANCE for gain in gains),
        worse=sum(gain < -_TOLERANCE for gain in gains),
        early=early,
        late=late,
        before=dict(zip(tasks, first, strict=True)),
        after=dict(zip(tasks, last, strict=True)),
    )


def pair_measures(before: Iterable[Episode], after: Iterable[Episode]) -> dict[str, Pairs]:
    """Pair each measure that both sides have for some task."""
    before, after = list(before), list(after)
    cluster_of = cluster_episodes([*before, *after])
    early, late = _average_by_task(before), _average_by_task(after)
    return {
        name: compare_tasks(name, early[name], late[name], cluster_of)
        for name in sorted(early.keys() & late.keys())
        if early[name].keys() & late[name].keys()
    }


def _average_by_task(episodes: Iterable[Episode]) -> dict[str, dict[str, float]]:
    """Means by measure and task."""
    collected: dict[str, dict[str, list[float]]] = {}
    for episode in episodes:
        if episode.ending is not Ending.VOID:
            for name, value in measure_episode(episode).items():
                collected.setdefault(name, {}).setdefault(episode.task_id, []).append(value)
    return {
        name: {task: math.fsum(values) / len(values) for task, values in by_task.items()}
        for name, by_task in collected.items()
    }


_MOST_KINDS = 500
"""Kinds counted separately per reward: notes may quote the policy, and never repeat."""
_WIDEST = 160  # characters of a shown note
_VARIABLE = re.compile(r"""`[^`]*`|"[^"]*"|'[^']*'|\S*/\S*|0x[0-9a-fA-F]+|\d+""")
"""Variable parts of a note: quotations, paths, addresses, numbers."""


@dataclass(slots=True)
class NoteKind:
    """Notes that differ only in names and numbers: an example, their count, and that with score 0."""

    note: str
    count: int = 0
    zeros: int = 0


@dataclass(frozen=True, slots=True)
class RewardNotes:
    """Notes of one reward, kinds most frequent first."""

    scores: int
    zeros: int
    kinds: Sequence[NoteKind]


class Notes:
    """Counter of episodes' notes, in bounded memory."""

    def __init__(self) -> None:
        self._rewards: dict[str, dict[str | None, NoteKind]] = {}
        """Kinds of each reward's notes; None: all its scores."""

    def add(self, episode: Episode) -> None:
        """Count the notes of `episode`."""
        for score in episode.scores:
            kinds = self._rewards.setdefault(score.name, {None: NoteKind("")})
            counted = [kinds[None]]
            if note := fit_one_line(score.note):
                name = get_note_kind(note)
                if name not in kinds and len(kinds) > _MOST_KINDS:
                    name, note = "", "(other notes)"
                counted.append(kinds.setdefault(name, NoteKind(note)))
            for kind in counted:
                kind.count += 1
                kind.zeros += score.value == 0

    def by_reward(self) -> dict[str, RewardNotes]:
        """Count kinds by reward, in order of first scores."""
        noted = {name: list(kinds.values()) for name, kinds in self._rewards.items()}
        return {
            name: RewardNotes(scores.count, scores.zeros, sorted(kinds, key=lambda kind: -kind.count))
            for name, (scores, *kinds) in noted.items()
        }

    def zeros(self, most: int) -> list[str]:
        """Format lines with the `most` most frequent notes of each reward's zeros."""
        lines = []
        for name, noted in self.by_reward().items():
            kinds = sorted((kind for kind in noted.kinds if kind.zeros), key=lambda kind: -kind.zeros)
            if kinds:
                lines.append(f"{name}: {noted.zeros} of {noted.scores} scores are 0, of which")
                lines += [f"{kind.zeros:>8}  {kind.note}" for kind in kinds[:most]]
                if rest := sum(kind.zeros for kind in kinds[most:]):
                    lines.append(f"{rest:>8}  other notes")
        return lines


def fit_one_line(text: str, widest: int = _WIDEST) -> str:
    """Put `text` on one printable line, cut at `widest`."""
    excerpt = text[: 8 * widest]  # of a long text; white space leaves less of it
    line = " ".join("".join(char if char.isprintable() else " " for char in excerpt).split())
    return line if len(line) <= widest else line[: widest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def get_note_kind(note: str) -> str:
    """Common part of a kind's notes.

    >>> get_note_kind("exit code 1: tests/a.py::test_sum") == get_note_kind("exit code 2: tests/b.py::test_mean")
    True
    """
    return _VARIABLE.sub("*", note)
