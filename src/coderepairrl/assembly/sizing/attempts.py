"""Attempts for the simulation of the loop: drawn again from a run's, or as the settings let them be."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise
from pathlib import Path

from coderepairrl.assembly.sizing.engine import DATA_NAMES
from coderepairrl.assembly.sizing.engine import count as count_of
from coderepairrl.assembly.sizing.replica import Server
from coderepairrl.assembly.sizing.simulation import Attempt, Call, Groups, Row
from coderepairrl.config import Config, load
from coderepairrl.engines.vllm.options import addresses
from coderepairrl.errors import UsageError
from coderepairrl.runs import logged_episodes, open_run
from coderepairrl.types import Ending, Episode, Limits

Group = tuple[Attempt, ...]
KindLimits = Mapping[str, Limits]
"""Of the kinds of tasks that have limits of their own."""
_MOST = 2000


def assumed(config: Config, seed: int, kinds: KindLimits) -> Iterator[Group]:
    """Groups of attempts by the section `plan`: all alike where they go on until a limit ends them, else of a random
    number of calls, as if after each a policy ended with the same chance. Their `kinds` come as often as the weights of
    `tasks.sources` have it."""
    plan, half = config.plan, config.plan.attempt_seconds / 2
    for number in count():
        chance = random.Random(f"{seed}/{number}")
        own = kinds.get(_kind(config, chance))
        limits = own or config.rollout
        prompt = min(plan.prompt, limits.tokens // 2)
        tokens = plan.call_tokens or -(-2 * (limits.tokens - prompt) // (2 * limits.calls - 1))
        sampled = (tokens + 1) // 2
        first, other = (Call(given, sampled, plan.call_seconds) for given in (prompt, tokens - sampled))
        group = list[Attempt]()
        for _ in range(config.rollout.group_size):
            calls = limits.calls + 1 if not plan.calls else geometric(plan.calls, chance)
            group.append(Attempt(half, (first, *(other,) * (calls - 1)), half, own))
        yield tuple(group)


def _kind(config: Config, chance: random.Random) -> str:
    sources = config.tasks.sources
    return chance.choices([each.kind for each in sources], [each.weight for each in sources])[0] if sources else ""


def of(groups: Iterator[Group], size: int) -> Iterator[Group]:
    """The same attempts one after the other, in groups of `size`."""
    attempts = chain.from_iterable(groups)
    while True:
        yield tuple(islice(attempts, size))


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
        """Groups of it, drawn at random again and again."""
        for number in count():
            at = random.Random(f"{seed}/{number}").randrange(len(self.groups))
            limits = kinds.get(self.kinds[at])
            yield tuple(each._replace(limits=limits) for each in self.groups[at])


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
        joined = len(addresses(options.get("url", "")))
        replicas = joined or count_of(options.get("args", ()), DATA_NAMES, 1)
    byname = dict[str, list[Episode]]()
    for each in episodes:
        byname.setdefault(each.group, []).append(each)
    rows = [[_row(each) for each in group] for group in byname.values()]
    tokens = sum(count for _, count, _ in computed(rows, config.train.micro_tokens, config.train.minibatches))
    sent = sum(step["metrics"].get("learn/sync_seconds", 0.0) for step in steps)
    learned = sum(step["metrics"]["learn_seconds"] for step in steps) - sent
    return Pilot(
        model=config.model.path,
        engine=config.engine.name,
        groups=tuple(tuple(_attempt(each) for each in group) for group in byname.values()),
        kinds=tuple(group[0].kind for group in byname.values()),
        server=_server(episodes, replicas),
        token=learned / max(1, tokens),
        sync=sent / len(steps),
        processes=config.train.processes,
    )


def _row(episode: Episode) -> Row:
    given = len(episode.turns[0].given) if episode.turns else 0
    return Row(given, sum(len(turn.given) + turn.sampled for turn in episode.turns), episode.sampled)


def _attempt(episode: Episode) -> Attempt:
    """As it was; what it spent before its first call and after its last one, grading aside, comes before it."""
    turns, timings = episode.turns, episode.timings
    closing = timings.get("diff", 0.0) + timings.get("reward", 0.0)
    between = turns[-1].ended - turns[0].started if turns else 0.0
    pauses = [max(0.0, after.started - before.ended) for before, after in pairwise(turns)]
    calls = (Call(len(turn.given), turn.sampled, pause) for turn, pause in zip(turns, [*pauses, 0.0], strict=True))
    return Attempt(max(0.0, timings.get("total", 0.0) - between - closing), tuple(calls), closing)


def _server(episodes: Iterable[Episode], replicas: int) -> Server:
    """The seconds of replies, fitted by what each had to sample, beside how many others at its replica, and what was
    given meanwhile. Of the first `_MOST` replies, since every pair of them is looked at."""
    import numpy as np
    from scipy.optimize import nnls

    turns = [turn for each in episodes for turn in each.turns if turn.sampled and turn.ended > turn.started]
    turns = sorted(turns, key=lambda turn: turn.started)[:_MOST]
    begin, end = (np.array([getattr(turn, name) for turn in turns]) for name in ("started", "ended"))
    sampled = np.array([float(turn.sampled) for turn in turns])
    given = np.array([float(len(turn.given)) for turn in turns])
    overlap = np.clip(np.minimum(end[:, None], end) - np.maximum(begin[:, None], begin), 0.0, None)
    beside = 1 + (overlap.sum(1) / (end - begin) - 1) / replicas
    meanwhile = given + ((overlap / (end - begin)) @ given - given) / replicas
    (step, sequence, token), _ = nnls(np.stack([sampled, sampled * beside, meanwhile], 1), end - begin)
    return Server(step=float(step), sequence=float(sequence), given=float(token))
