"""Verified repairs as further references: what passed its checks in one step is what later steps are compared with.

A task's own reference is one repair of many, so that similarity to it alone cannot rank repairs beyond a point. Further
ones are fixed before a step's first attempt and come from finished steps only: no score depends on which attempt ends
first, and a resumed run has the same ones, for they are a function of the log's verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coderepairrl.rewards.verified import Identity, identity, unfit
from coderepairrl.rollout import Group, episodes_of
from coderepairrl.runs import RunFolder, codec
from coderepairrl.stages.history import History
from coderepairrl.types import Ending, Episode, Task, Verified


class References:
    """The verified repairs of training tasks: of each the first `most` that differ, by step and place in the batch."""

    def __init__(self, tasks: Iterable[Task], most: int) -> None:
        self.most = most
        self.known: dict[str, tuple[Verified, ...]] = {}
        """By task id; tasks without any are absent."""
        self._tasks = {task.id: task for task in tasks} if most else {}
        self._seen: dict[str, set[Identity]] = {}

    def before(self, step: int) -> dict[str, tuple[Verified, ...]]:
        """Those that were known when `step` began, by task id."""
        return {task: tuple(repair for repair in own if repair.step < step) for task, own in self.known.items()}

    def add(self, step: int, episodes: Iterable[Episode]) -> None:
        """Take what a finished step verified; `episodes` are in the order of its batch."""
        for episode in episodes:
            task = self._tasks.get(episode.task_id)
            valid = episode.ending is not Ending.VOID
            if task is not None and valid and any(score.passed for score in episode.scores):
                self._take(task, Verified(episode.patch, episode.id, step))

    def _take(self, task: Task, repair: Verified) -> None:
        known = self.known.get(task.id, ())
        if len(known) >= self.most or unfit(task, repair.patch):
            return
        seen = self._seen.setdefault(task.id, {identity(task.reference)})
        if (what := identity(repair.patch)) not in seen:
            seen.add(what)
            self.known[task.id] = (*known, repair)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """For the record of a step that had these references: how many its tasks had on average, how many training
        tasks have any, and the share of attempts that were nearest to one. Empty where none are kept."""
        if not self.most:
            return {}
        valid = [episode for episode in episodes_of(groups) if episode.ending is not Ending.VOID]
        nearest = sum(any(score.nearest for score in episode.scores) for episode in valid)
        return {
            "references/per_task": sum(len(self.known.get(group.task.id, ())) for group in groups) / len(groups),
            "references/tasks": float(len(self.known)),
            "references/nearest": nearest / max(len(valid), 1),
        }


def read_references(run: RunFolder, history: History, tasks: Iterable[Task], most: int) -> References:
    """The references after the finished steps of `history`."""
    references = References(tasks, most)
    if not most:
        return references
    places = {name: (step["step"], at) for step in history.steps for at, name in enumerate(step["episodes"])}
    verdicts = (record["verdict"] for record in run.records() if record["type"] == "verdict")
    consumed = (data for data in verdicts if data["id"] in places)
    passed = [data for data in consumed if any(score.get("passed") for score in data["scores"])]
    for data in sorted(passed, key=lambda data: places[data["id"]]):
        references.add(places[data["id"]][0], [codec.load(Episode, data)])
    return references
