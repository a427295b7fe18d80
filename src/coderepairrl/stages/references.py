"""Verified repairs as further references: what passed its checks in one step is what later steps are compared with.

A task's own reference is one repair of many, so that similarity to it alone cannot rank repairs beyond a point. Further
ones are fixed before a step's first attempt and come from finished steps only: no score depends on which attempt ends
first, and a resumed run has the same ones, for they are a function of the log's verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coderepairrl import rewards
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError
from coderepairrl.rewards.verified import Identity, identity, unfit
from coderepairrl.rollout import Group
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
        valid = [episode for group in groups for episode in group.episodes if episode.ending is not Ending.VOID]
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


def check_references(config: Config, tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` where ``tasks.verified_references`` cannot have an effect."""
    if not (most := config.tasks.verified_references):
        return
    key, made = f"tasks.verified_references={most}", rewards.make(config.reward)
    if not any(getattr(reward, "runs_checks", False) for reward, _ in made):
        raise ConfigError(
            f"{key}, and no reward runs the tasks' checks, so no repair is ever verified",
            fix="measure them: reward.tests=0, or reward.sampled_tests=0 for a quarter of the groups",
        )
    if not any(weight and getattr(reward, "takes_verified", False) for reward, weight in made):
        raise ConfigError(
            f"{key}, and no reward with a weight compares patches with further references",
            fix="pay for patch_edits, patch_lines or hybrid, or leave it out",
        )
    attempts = config.run.steps * config.rollout.tasks_per_step
    if 0 < attempts <= len(tasks):
        raise ConfigError(
            f"{key}, and none of the {len(tasks)} training tasks is attempted in two steps: {config.run.steps} steps of"
            f" {config.rollout.tasks_per_step} tasks end before the second epoch",
            fix="train on fewer tasks or for more steps, or leave it out",
        )
