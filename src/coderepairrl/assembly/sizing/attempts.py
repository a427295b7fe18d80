"""Attempts for the simulation of the loop: drawn again from a run's, or as the settings let them be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

from coderepairrl.assembly.sizing.engine import DATA_NAMES
from coderepairrl.assembly.sizing.engine import count as count_of
from coderepairrl.assembly.sizing.replica import Server
from coderepairrl.assembly.sizing.simulation import Attempt, Call, Groups, Row
from coderepairrl.config import Config, load
from coderepairrl.errors import UsageError
from coderepairrl.runs import logged_episodes, open_run
from coderepairrl.types import Ending, Episode, Limits

Group = tuple[Attempt, ...]
KindLimits = Mapping[str, Limits]
"""Of the kinds of tasks that have limits of their own."""
Worked = Callable[[float, float], float]
"""Seconds of a core that one got from when to when."""
_MOST = 2000


def assumed(config: Config, seed: int, tasks: Tasks) -> Iterator[Group]:
    """Groups of attempts by the section `plan`: all alike where they go on until a limit ends them, else of a random
    number of calls, as if after each a policy ended with the same chance. `tasks` are what is attempted."""
    plan, half = config.plan, config.plan.attempt_seconds / 2
    for number, kind in enumerate(tasks.kinds(seed)):
        chance = random.Random(f"{seed}/{number}")
        own = tasks.limits.get(kind)
        limits = own or config.rollout
        prompt = min(plan.prompt, limits.tokens // 2)
        tokens = plan.call_tokens or -(-2 * (limits.tokens - prompt) // (2 * limits.calls - 1))
        sampled = (tokens + 1) // 2
        first, other = (Call(given, sampled, plan.call_seconds) for given in (prompt, tokens - sampled))
        group = list[Attempt]()
        for _ in range(tasks.attempts):
            calls = limits.calls + 1 if not plan.calls else geometric(plan.calls, chance)
            group.append(Attempt(half, (first, *(other,) * (calls - 1)), half, own))
        yield tuple(group)


class Tasks(NamedTuple):
    """Tasks that are attempted one after the other: their kinds in order, by a seed, and how often each is."""

    kinds: Callable[[int], Iterable[str]]
    attempts: int
    limits: KindLimits

    @classmethod
    def trained(cls, config: Config, limits: KindLimits) -> Self:
        """Those of training: kinds come as often as the weights of `tasks.sources` have it."""
        sources = config.tasks.sources
        names, weights = [each.kind for each in sources] or [""], [each.weight for each in sources] or [1.0]

        def kinds(seed: int) -> Iterator[str]:
            chance = random.Random(f"{seed}/kinds")
            while True:
                yield chance.choices(names, weights)[0]

        return cls(kinds, config.rollout.group_size, limits)


def geometric(mean: float, chance: random.Random) -> int:
    """A whole number of at least 1, with this mean.

    >>> chance = random.Random(0)
    >>> round(sum(geometric(5, chance) for _ in range(10_000)) / 10_000)
    5
    """
    return 1 if mean <= 1 else 1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / mean))


@dataclass(frozen=True, slots=True)
class Pilot:
    """What a run's log says of how long things took."""

    model: str
    """What it trained."""
    engine: str
    groups: tuple[Group, ...]
    """Its training attempts, as they were."""
    kinds: tuple[str, ...]
    """Of each group."""
    server: Server
    """One replica, as its replies fit."""
    token: float
    """The learner's seconds for each computed token."""
    sync: float
    """Until new weights were live."""
    processes: int
    """Of its learner."""

    def draws(self, seed: int, kinds: KindLimits) -> Iterator[Group]:
        """Groups of it, drawn at random again and again: as they were, for that is how long groups are."""
        for number in count():
            at = random.Random(f"{seed}/{number}").randrange(len(self.groups))
            limits = kinds.get(self.kinds[at])
            yield tuple(each._replace(limits=limits) for each in self.groups[at])

    def evaluated(self, seed: int, tasks: Tasks) -> Iterator[Group]:
        """Attempts at `tasks`, each a random one of a random group that was of the same kind, or of any if none was."""
        for number, kind in enumerate(tasks.kinds(seed)):
            chance, limits = random.Random(f"{seed}/{number}"), tasks.limits.get(kind)
            groups = [group for group, of in zip(self.groups, self.kinds, strict=True) if of == kind] or self.groups
            drawn = chance.choices(chance.choice(groups), k=tasks.attempts)
            yield tuple(each._replace(limits=limits) for each in drawn)


def on_cores(config: Config) -> bool:
    """Whether the engine computes on the cores that agents and graders have, and on one of them."""
    return config.engine.name == "tiny"


def computed(groups: Groups, budget: int, parts: int = 1) -> Iterator[tuple[Row, int, float]]:
    """For each row the tokens that a learner computes of it, and the sum of their positions: what a group shares counts
    once in each of its passes of `budget` tokens, of which each of `parts` minibatches makes at least one
    (`learn.pack`)."""
    for rows in groups:
        prompt = min((row.prompt for row in rows), default=0)
        own = sum(row.tokens - prompt for row in rows)
        passes = parts * max(1, -(-own // (parts * max(1, budget - prompt))))
        for row in rows:
            shared = passes * prompt / len(rows)
            positions = (row.tokens**2 - prompt**2) / 2 + shared * prompt / 2
            yield row, row.tokens - prompt + round(shared), positions


def read(path: str) -> Pilot:
    """Of the run in the folder `path`. Raises `UsageError` where it has no finished step."""
    run = open_run(Path(path))
    steps = [record for record in run.records() if record["type"] == "step"]
    consumed = {name for step in steps for name in step.get("episodes", ())}  # which those of `crrl sft` have not
    logged = logged_episodes(run.records(), consumed.__contains__)
    episodes = [each for each in logged if each.ending is not Ending.VOID]
    if not any(each.sampled for each in episodes):
        raise UsageError(f"{path} has no finished step to plan by", fix="crrl train CONFIG run.steps=3, and its folder")
    config = load(run.config)
    options, replicas = config.engine.options, 1
    if config.engine.name == "vllm":
        replicas = count_of(options.get("args", ()), DATA_NAMES, 1)
    by_group = dict[str, list[Episode]]()
    for each in episodes:
        by_group.setdefault(each.group, []).append(each)
    rows = [[_row(each) for each in group] for group in by_group.values()]
    tokens = sum(count for _, count, _ in computed(rows, config.train.micro_tokens, config.train.minibatches))
    cores = math.inf if config.rollout.executor == "ray" else run.about().get("cpus") or math.inf
    sent = sum(step["metrics"].get("learn/sync_seconds", 0.0) for step in steps)
    learning = [_learning(step) for step in steps]
    beside = on_cores(config) and not config.train.devices  # the learner has the cores of the others, too
    worked = _worked(episodes, cores, engine=on_cores(config), learner=learning if beside else ())
    learned = sum(worked(*each) if beside else each[1] - each[0] for each in learning)
    return Pilot(
        model=config.model.path,
        engine=config.engine.name,
        groups=tuple(tuple(_attempt(each, worked) for each in group) for group in by_group.values()),
        kinds=tuple(group[0].kind for group in by_group.values()),
        server=_server(episodes, replicas, worked if on_cores(config) else None),
        token=learned / max(1, tokens),
        sync=sent / len(steps),
        processes=config.train.processes,
    )


def _learning(step: Mapping[str, Any]) -> tuple[float, float]:
    """From when to when the learner learned in a step, which is recorded when its weights are live."""
    seconds = step["metrics"]
    return step["time"] - seconds["learn_seconds"], step["time"] - seconds.get("learn/sync_seconds", 0.0)


def _row(episode: Episode) -> Row:
    given = len(episode.turns[0].given) if episode.turns else 0
    return Row(given, sum(len(turn.given) + turn.sampled for turn in episode.turns), episode.sampled)


def _attempt(episode: Episode, worked: Worked) -> Attempt:
    """As it was; what it spent before its first call and after its last one, grading aside, comes before it."""
    turns, closing = episode.turns, _closing(episode.timings)
    if not turns:
        return Attempt(max(0.0, episode.timings.get("total", 0.0) - closing), (), closing)
    began, ended = _times(episode)
    pauses = [worked(before.ended, after.started) for before, after in pairwise(turns)]
    calls = (Call(len(turn.given), turn.sampled, pause) for turn, pause in zip(turns, [*pauses, 0.0], strict=True))
    opening, last = worked(began, turns[0].started), worked(ended - closing, ended)
    return Attempt(opening, tuple(calls), last)


def _closing(timings: Mapping[str, float]) -> float:
    return timings.get("diff", 0.0) + timings.get("reward", 0.0)


def _times(episode: Episode) -> tuple[float, float]:
    """When an episode with turns began and ended."""
    first, ended = episode.turns[0].started, episode.turns[-1].ended + _closing(episode.timings)
    return min(first, ended - episode.timings.get("total", 0.0)), ended


def _worked(
    episodes: Sequence[Episode], cores: float, *, engine: bool, learner: Iterable[tuple[float, float]] = ()
) -> Worked:
    """How many seconds of a core one of those who shared `cores` got from when to when: attempts that did not wait for
    a reply and, without a GPU, the `engine` while any did and the `learner` in its times. It is the inverse of what
    `cores` simulates."""
    import numpy as np

    times = list[tuple[float, float, int, int]]()
    for each in (each for each in episodes if each.turns):
        begin, end = _times(each)
        replies = ((turn.started, turn.ended) for turn in each.turns)
        times += [(begin, end, 1, 0), *((a, b, -1, 1) for a, b in replies)]
    times += [(begin, end, 1, 0) for begin, end in learner]
    if not times:
        return lambda begin, end: max(0.0, end - begin)
    changes = sorted([(a, work, ask) for a, _, work, ask in times] + [(b, -work, -ask) for _, b, work, ask in times])
    at, works, asks = np.array(changes).T
    users = np.cumsum(works) + engine * (np.cumsum(asks) > 0)
    rate = np.minimum(1.0, cores / np.maximum(1.0, users))[:-1]
    got = np.concatenate([[0.0], np.cumsum(np.diff(at) * rate)])

    def worked(begin: float, end: float) -> float:
        within = np.interp([begin, max(begin, end)], at, got)
        return float(within[1] - within[0])

    return worked


def _server(episodes: Iterable[Episode], replicas: int, worked: Worked | None) -> Server:
    """The seconds of replies, or of a core that an engine without a GPU got meanwhile (`worked`), fitted by what each
    had to sample, beside how many others at its replica, and what was given meanwhile. Of the first `_MOST` replies,
    since every pair of them is looked at."""
    import numpy as np
    from scipy.optimize import nnls

    turns = [turn for each in episodes for turn in each.turns if turn.sampled and turn.ended > turn.started]
    turns = sorted(turns, key=lambda turn: turn.started)[:_MOST]
    begin, end = (np.array([getattr(turn, name) for turn in turns]) for name in ("started", "ended"))
    took = np.array([worked(*each) for each in zip(begin, end, strict=True)]) if worked else end - begin
    sampled = np.array([float(turn.sampled) for turn in turns])
    given = np.array([float(len(turn.given)) for turn in turns])
    overlap = np.clip(np.minimum(end[:, None], end) - np.maximum(begin[:, None], begin), 0.0, None)
    beside = 1 + (overlap.sum(1) / (end - begin) - 1) / replicas
    meanwhile = given + ((overlap / (end - begin)) @ given - given) / replicas
    (step, sequence, token), _ = nnls(np.stack([sampled, sampled * beside, meanwhile], 1), took)
    return Server(step=float(step), sequence=float(sequence), given=float(token))
