"""Order of training tasks: weighted mixtures of sources, and an order within each.

It depends only on settings and logged outcomes, so a resumed run continues exactly. To add an order, write a class like
`Band`, a setting in `config/schema.py`, and its creation in `plan/curriculum.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from types import MappingProxyType

from coderepairrl.rollout.episodes import derive_seed
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import Ending, Episode, Task

EXPLORE, OUTSIDE = 0.5, 0.1
"""Shares of a `Band`'s batches: tasks not attempted yet, and tasks outside the band."""
NEWEST = 16
"""Latest attempts that a task's success rate counts; earlier ones say little about the current policy."""

Outcomes = Mapping[str, Sequence[float]]
"""Outcomes of attempts by task id, oldest first, each from 0 to 1 (`rate_outcome`)."""


def rate_outcome(episode: Episode) -> float:
    """Rate an attempt: 1 if its checks passed, else 0; without checks its reward, clipped to [0, 1].

    >>> from coderepairrl.types import Score
    >>> rate_outcome(Episode("", "", "", 0, "", 0, Ending.DONE, scores=(Score("patch_edits", 0.4),)))
    0.4
    """
    passed = is_resolved(episode)
    return min(1.0, max(0.0, episode.reward)) if passed is None else float(passed)


def collect_outcomes(episodes: Iterable[Episode]) -> dict[str, list[float]]:
    """Collect outcomes by task, without void episodes."""
    by_task: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.ending is not Ending.VOID:
            by_task.setdefault(episode.task_id, []).append(rate_outcome(episode))
    return by_task


@dataclass(frozen=True, slots=True)
class WeightedTasks:
    """Tasks of a source, and its weight in batches."""

    tasks: Sequence[Task]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class EasyFirst:
    """Order that begins with the easiest tasks, adds harder ones over `steps` steps, and then runs epochs over all.

    Every task needs a `difficulty`.
    """

    steps: int

    def choose_pool(self, tasks: Sequence[Task], step: int, least: int) -> list[Task]:
        """Choose the easiest tasks for `step`, at least `least` if there are enough."""
        ordered = sorted(tasks, key=lambda task: (task.difficulty or 0.0, task.id))
        return ordered[: max(least, ceil(len(ordered) * step / self.steps))]


@dataclass(frozen=True, slots=True)
class Band:
    """Order that prefers tasks with a success rate from `low` to `high`, which teach most.

    A share `EXPLORE` of a batch is for tasks not attempted yet, `OUTSIDE` for those outside the band; shares without
    tasks go to the others. `before` has attempts and mean by task from an earlier run.
    """

    low: float
    high: float
    before: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def rate(self, task: str, outcomes: Outcomes) -> float | None:
        """Success rate by Laplace's rule (plus one success and one failure); None for a task that was never attempted.

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
        """Draw a task, if possible not one of `taken`."""
        new, inside, outside = list[Task](), list[Task](), list[Task]()
        for task in tasks:
            rate = self.rate(task.id, outcomes)
            (new if rate is None else inside if self.low <= rate <= self.high else outside).append(task)
        weighted = ((new, EXPLORE), (inside, 1 - EXPLORE - OUTSIDE), (outside, OUTSIDE))
        drawable = [(part, weight) for part, weight in weighted if part]
        not_taken = [([task for task in part if task.id not in taken], weight) for part, weight in drawable]
        choices = [(part, weight) for part, weight in not_taken if part] or drawable
        [part] = rng.choices([part for part, _ in choices], [weight for _, weight in choices])
        return rng.choice(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Order of a run's tasks; by default shuffled epochs."""

    sources: tuple[WeightedTasks, ...]
    per_step: int
    seed: int
    order: EasyFirst | Band | None = None

    def schedule(self, step: int, outcomes: Outcomes = MappingProxyType({}), taken: Iterable[str] = ()) -> list[Task]:
        """Choose the tasks of `step` (1, 2, ...), given earlier `outcomes`.

        Each source gets its share, to within one task. Avoids ids `taken` in the batch, except in epochs.
        """
        spread = spread_sources(self.sources, self.per_step * step)
        current = spread[-self.per_step :]
        used = set(taken)
        picked: list[Task] = []
        for position, (source, number) in enumerate(current):
            tasks = self.sources[source].tasks
            rng = Random(derive_seed(self.seed, "draw", step, position))
            if isinstance(self.order, Band):
                task = self.order.draw(tasks, used, outcomes, rng)
            elif self.order is not None and step < self.order.steps:
                pool = self.order.choose_pool(tasks, step, self.per_step)
                task = rng.choice([task for task in pool if task.id not in used] or pool)
            else:
                # the epochs begin after the steps with easy tasks
                easy_count = (self.order.steps - 1) * self.per_step if self.order is not None else 0
                easy_of_source = sum(other == source for other, _ in spread[:easy_count])
                task = self._task_in_epoch(source, number - easy_of_source)
            picked.append(task)
            used.add(task.id)
        return picked

    def _task_in_epoch(self, source: int, number: int) -> Task:
        tasks = self.sources[source].tasks
        epoch, index = divmod(number, len(tasks))
        order = list(range(len(tasks)))
        Random(derive_seed(self.seed, "epoch", epoch, *([source] if source else []))).shuffle(order)
        return tasks[order[index]]

    def passes(self, steps: int) -> float:
        """Mean number of times that a task occurs in `steps`, for the source with the most."""
        drawn = [source for source, _ in spread_sources(self.sources, self.per_step * steps)]
        return max(drawn.count(at) / len(source.tasks) for at, source in enumerate(self.sources))


def spread_sources(sources: Sequence[WeightedTasks], positions: int, *, repeats: bool = True) -> list[tuple[int, int]]:
    """Choose a source for each position, the one furthest behind its share; return it and the index within it.

    Unless it `repeats` tasks, a source with too few leaves its positions to the others.

    >>> [source for source, _ in spread_sources([WeightedTasks((), 2.0), WeightedTasks((), 1.0)], 6)]
    [0, 1, 0, 0, 1, 0]
    """
    drawn = [0] * len(sources)
    spread: list[tuple[int, int]] = []
    total_weight = sum(source.weight for source in sources)
    for position in range(1, positions + 1):
        lags = {
            at: position * source.weight / total_weight - drawn[at]
            for at, source in enumerate(sources)
            if repeats or drawn[at] < len(source.tasks)
        }
        source = max(lags, key=lags.__getitem__)
        spread.append((source, drawn[source]))
        drawn[source] += 1
    return spread
