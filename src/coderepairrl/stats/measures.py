"""Measures of an episode, and their means with intervals.

Void episodes are counted, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coderepairrl.stats.clusters import clusters_of
from coderepairrl.stats.intervals import Interval, is_share, mean_interval, paired_difference, sign_flip_test
from coderepairrl.stats.spending import spent
from coderepairrl.types import Ending, Episode

COUNTS = frozenset({"calls", "turns", "sampled_tokens"})
"""Numbers per episode; other measures are shares where all values lie in [0, 1]."""


NAMES = ("reward", "empty_patches", "limit", "crash", "turns", "sampled_tokens", "calls", "tool_success")


def measures(episode: Episode) -> dict[str, float]:
    """Measures of one episode, without undefined or unknown ones."""
    # a rising mean may come from fewer empty patches alone
    calls = episode.tool_calls
    empty = not episode.patch.strip()
    values = {
        "reward": episode.reward,
        "empty_patches": float(empty),
        "limit": float(episode.ending is Ending.LIMIT),
        "crash": float(episode.ending is Ending.CRASH),
        "turns": float(len(episode.turns)),
    }
    if not (cost := spent([episode])).unreported:
        values["sampled_tokens"] = float(cost.sampled_tokens)
    if episode.calls_known:
        values["calls"] = float(len(calls))
    if calls:
        values["tool_success"] = sum(call.ok for call in calls) / len(calls)
    for score in episode.scores:
        values[score.name] = score.value
        if not empty:
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
    cluster_of = clusters_of(everything)
    columns: dict[str, tuple[list[float], list[str]]] = {}
    for episode in valid:
        for name, value in measures(episode).items():
            values, clusters = columns.setdefault(name, ([], []))
            values.append(value)
            clusters.append(cluster_of[episode.task_id])
    return Summary(
        episodes=len(valid),
        tasks=len({episode.task_id for episode in valid}),
        void=len(everything) - len(valid),
        values={name: level(name, values, clusters) for name, (values, clusters) in columns.items()},
    )


def shares(measure: str, values: Iterable[float], counts: Container[str] = COUNTS) -> bool:
    """Whether `values` of a measure are in [0, 1] and no counts."""
    return measure not in counts and is_share(values)


def level(
    measure: str,
    values: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    share: bool | None = None,
    counts: Container[str] = COUNTS,
) -> Interval:
    """Mean of a measure in `clusters`; `share` defaults to `shares`."""
    share = shares(measure, values, counts) if share is None else share
    return mean_interval(values, clusters, share=share, least=0.0 if measure in counts else -math.inf)


def compare(before: Iterable[Episode], after: Iterable[Episode]) -> dict[str, Interval]:
    """Paired differences ``after - before`` of per-task means, over tasks that both measured."""
    return {name: pairs.change for name, pairs in pair(before, after).items()}


class Pairs(NamedTuple):
    """A measure's means, before and after, task by task."""

    measure: str
    tasks: list[str]
    before: list[float]
    after: list[float]
    clusters: list[str]

    @property
    def early(self) -> Interval:
        """Mean of ``before``."""
        return level(self.measure, self.before, self.clusters, share=self._share)

    @property
    def late(self) -> Interval:
        """Mean of ``after``."""
        return level(self.measure, self.after, self.clusters, share=self._share)

    @property
    def change(self) -> Interval:
        """Mean of ``after - before``."""
        return paired_difference(self.before, self.after, self.clusters, share=self._share)

    @property
    def _share(self) -> bool:
        return shares(self.measure, self.before + self.after)

    @property
    def p(self) -> float:
        """Two-sided p-value (`sign_flip_test`)."""
        return sign_flip_test(self.before, self.after, self.clusters)


def pair(before: Iterable[Episode], after: Iterable[Episode]) -> dict[str, Pairs]:
    """Pairs behind `compare`, by measure."""
    before, after = list(before), list(after)
    early, late = _by_task(before), _by_task(after)
    cluster_of = clusters_of([*before, *after])
    names = {name for means in early.values() for name in means} & {n for means in late.values() for n in means}
    paired = {}
    for name in sorted(names):
        tasks = [task for task in early if name in early[task] and name in late.get(task, {})]
        if tasks:
            first, last = ([side[task][name] for task in tasks] for side in (early, late))
            paired[name] = Pairs(name, tasks, first, last, [cluster_of[task] for task in tasks])
    return paired


def _by_task(episodes: Iterable[Episode]) -> dict[str, dict[str, float]]:
    collected: dict[str, dict[str, list[float]]] = {}
    for episode in episodes:
        if episode.ending is not Ending.VOID:
            columns = collected.setdefault(episode.task_id, {})
            for name, value in measures(episode).items():
                columns.setdefault(name, []).append(value)
    return {
        task: {name: math.fsum(values) / len(values) for name, values in columns.items()}
        for task, columns in collected.items()
    }
