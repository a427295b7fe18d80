"""Order of tasks: weighted mixtures of sources, and orders within each.

It is a function of settings and logged outcomes, so a resumed run continues exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from types import MappingProxyType

from coderepairrl.rollout.episodes import derive_seed
from coderepairrl.stats import is_resolved
from coderepairrl.types import Ending, Episode, Task

EXPLORE, OUTSIDE = 0.5, 0.1
"""Parts of a `Band`'s batches: unattempted tasks, and tasks outside the band."""
NEWEST = 16

Outcomes = Mapping[str, Sequence[float]]
"""Outcomes of attempts by task id, oldest first, from 0 to 1 (`outcome`)."""


def outcome(episode: Episode) -> float:
    """1 for a repair that passed its checks, else 0; without checks the reward, clipped to 0..1.

    >>> from coderepairrl.types import Score
    >>> outcome(Episode("", "", "", 0, "", 0, Ending.DONE, scores=(Score("patch_edits", 0.4),)))
    0.4
    """
    passed = is_resolved(episode)
    return min(1.0, max(0.0, episode.reward)) if passed is None else float(passed)


def outcomes(episodes: Iterable[Episode]) -> dict[str, list[float]]:
    """Outcomes by task, without void episodes."""
    by_task: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.ending is not Ending.VOID:
            by_task.setdefault(episode.task_id, []).append(outcome(episode))
    return by_task


@dataclass(frozen=True, slots=True)
class Share:
    """Tasks of one source, with their `weight` in batches."""

    tasks: Sequence[Task]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class EasyFirst:
    """Easiest tasks first, growing to all over `steps` steps, then epochs.

    Every task needs a `difficulty`.
    """

    steps: int

    def pool(self, tasks: Sequence[Task], step: int, least: int) -> list[Task]:
        """Easiest tasks at `step`, at least `least` if available."""
        ordered = sorted(tasks, key=lambda task: (task.difficulty or 0.0, task.id))
        return ordered[: max(least, ceil(len(ordered) * step / self.steps))]


@dataclass(frozen=True, slots=True)
class Band:
    """Tasks with a success rate from `low` to `high`, which teach most.

    `EXPLORE` of a batch are unattempted tasks, `OUTSIDE` those outside the band; an empty part goes to the others.
    """

    low: float
    high: float
    before: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def rate(self, task: str, outcomes: Outcomes) -> float | None:
        """Success rate by Laplace's rule (one success and one failure added); None for an unattempted task.

        >>> band = Band(low=0.15, high=0.85)
        >>> band.rate("a", {"a": [1.0, 0.0, 0.0, 0.0]}), band.rate("b", {})
        (0.3333333333333333, None)
        """
        recent = outcomes.get(task, ())[-NEWEST:]
        attempts, mean = self.before.get(task, (0, 0.0))
        earlier = min(attempts, NEWEST - len(recent))
        if not recent and not earlier:
            return None
        return (1 + sum(recent) + earlier * mean) / (2 + len(recent) + earlier)

    def draw(self, tasks: Sequence[Task], taken: Collection[str], outcomes: Outcomes, rng: Random) -> Task:
        """Draw a task, avoiding those `taken`."""
        rates = {task.id: self.rate(task.id, outcomes) for task in tasks}
        parts: tuple[list[Task], list[Task], list[Task]] = [], [], []
        for task in tasks:
            rate = rates[task.id]
            parts[0 if rate is None else 1 if self.low <= rate <= self.high else 2].append(task)
        weights = (EXPLORE, 1 - EXPLORE - OUTSIDE, OUTSIDE)
        drawable = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part]
        fresh = [([task for task in part if task.id not in taken], weight) for part, weight in drawable]
        left = [(part, weight) for part, weight in fresh if part] or drawable
        [part] = rng.choices([part for part, _ in left], [weight for _, weight in left])
        return rng.choice(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Order of a run's tasks; by default shuffled epochs."""

    sources: tuple[Share, ...]
    per_step: int
    seed: int
    order: EasyFirst | Band | None = None

    def schedule(self, step: int, outcomes: Outcomes = MappingProxyType({}), taken: Iterable[str] = ()) -> list[Task]:
        """Tasks of `step` (1, 2, ...), given earlier `outcomes`.

        Each source gets its share, up to one task. Ids `taken` in the batch are avoided, except in epochs.
        """
        spread = _spread_sources(self.sources, self.per_step, step)
        current = spread[-self.per_step :]
        busy = set(taken)
        picked: list[Task] = []
        for position, (source, number) in enumerate(current):
            tasks = self.sources[source].tasks
            rng = Random(derive_seed(self.seed, "draw", step, position))
            if isinstance(self.order, Band):
                task = self.order.draw(tasks, busy, outcomes, rng)
            elif self.order is not None and step < self.order.steps:
                pool = self.order.pool(tasks, step, self.per_step)
                task = rng.choice([task for task in pool if task.id not in busy] or pool)
            else:
                easy = (self.order.steps - 1) * self.per_step if self.order is not None else 0
                task = self._in_epoch(source, number - sum(other == source for other, _ in spread[:easy]))
            picked.append(task)
            busy.add(task.id)
        return picked

    def _in_epoch(self, source: int, number: int) -> Task:
        tasks = self.sources[source].tasks
        epoch, index = divmod(number, len(tasks))
        order = list(range(len(tasks)))
        Random(derive_seed(self.seed, "epoch", epoch, *([source] if source else []))).shuffle(order)
        return tasks[order[index]]

    def passes(self, steps: int) -> float:
        """Mean repeats of a task in `steps`, in the source with the most."""
        drawn = [source for source, _ in _spread_sources(self.sources, self.per_step, steps)]
        return max(drawn.count(at) / len(source.tasks) for at, source in enumerate(self.sources))


def _spread_sources(sources: Sequence[Share], per_step: int, steps: int) -> list[tuple[int, int]]:
    """Source of each position, and index within it: always the source furthest behind its share.

    >>> [source for source, _ in _spread_sources([Share((), 2.0), Share((), 1.0)], 3, 2)]
    [0, 1, 0, 0, 1, 0]
    """
    drawn = [0] * len(sources)
    spread: list[tuple[int, int]] = []
    total_weight = sum(source.weight for source in sources)
    for position in range(1, steps * per_step + 1):
        lags = [position * source.weight / total_weight - had for source, had in zip(sources, drawn, strict=True)]
        source = lags.index(max(lags))
        spread.append((source, drawn[source]))
        drawn[source] += 1
    return spread
