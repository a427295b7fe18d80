"""Verified repairs as further references for later steps.

A reference is one of many correct repairs, so similarity to it ranks attempts only roughly. Further ones come from
finished steps and are chosen before a step begins: scores do not depend on the order of attempts, and a resumed run has
the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coderepairrl.rewards.edits import PatchEdits
from coderepairrl.rewards.verified import explain_unfit
from coderepairrl.rollout.groups import Group, list_episodes
from coderepairrl.runs import RunFolder, codec
from coderepairrl.stages.history import History
from coderepairrl.types import Ending, Episode, Task, VerifiedRepair


class References:
    """Verified repairs of training tasks: the first `max_per_task` of each that differ in code."""

    def __init__(self, tasks: Iterable[Task], max_per_task: int) -> None:
        self.max_per_task = max_per_task
        self.known: dict[str, tuple[VerifiedRepair, ...]] = {}
        """By task id, without tasks that have none."""
        self._tasks = {task.id: task for task in tasks} if max_per_task else {}

    def before(self, step: int) -> dict[str, tuple[VerifiedRepair, ...]]:
        """Repairs known before `step`, by task id."""
        return {task: tuple(repair for repair in repairs if repair.step < step) for task, repairs in self.known.items()}

    def add(self, step: int, episodes: Iterable[Episode]) -> None:
        """Add a finished step's repairs that passed all their checks; `episodes` are in batch order."""
        for episode in episodes:
            task = self._tasks.get(episode.task_id)
            valid = episode.ending is not Ending.VOID
            passed = {score.passed for score in episode.scores}  # None: a score without checks
            if task is not None and valid and True in passed and False not in passed:
                self._add_repair(task, VerifiedRepair(episode.patch, episode.id, step))

    def _add_repair(self, task: Task, repair: VerifiedRepair) -> None:
        repairs = self.known.get(task.id, ())
        if len(repairs) >= self.max_per_task or explain_unfit(task, repair.patch):
            return
        similarity, known_patches = PatchEdits().compare, [task.reference, *(each.patch for each in repairs)]
        if all(similarity(other, repair.patch, task.language) < 1.0 for other in known_patches if other):
            self.known[task.id] = (*repairs, repair)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Count references: mean per task of a step, tasks with any, and share of attempts nearest to one."""
        if not self.max_per_task:
            return {}
        valid = [episode for episode in list_episodes(groups) if episode.ending is not Ending.VOID]
        nearest = sum(any(score.nearest for score in episode.scores) for episode in valid)
        return {
            "references/per_task": sum(len(self.known.get(group.task.id, ())) for group in groups) / len(groups),
            "references/tasks": float(len(self.known)),
            "references/nearest": nearest / max(len(valid), 1),
        }


def read_references(run: RunFolder, history: History, tasks: Iterable[Task], max_per_task: int) -> References:
    """Read references from the finished steps of `history`."""
    references = References(tasks, max_per_task)
    if not max_per_task:
        return references
    places = {name: (step["step"], at) for step in history.steps for at, name in enumerate(step["episodes"])}
    verdicts = (record["verdict"] for record in run.records() if record["type"] == "verdict")
    consumed = (data for data in verdicts if data["id"] in places)
    passed = [data for data in consumed if any(score.get("passed") for score in data["scores"])]
    for data in sorted(passed, key=lambda data: places[data["id"]]):  # in the order in which `add` first saw them
        step, _ = places[data["id"]]
        references.add(step, [codec.restore(Episode, data)])
    return references
