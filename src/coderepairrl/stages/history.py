"""What a log says has happened, so that a run continues where it stopped."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coderepairrl.errors import RunError
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.types import Episode

Key = tuple[str, int]
"""Group and attempt."""


class Begun(NamedTuple):
    """A group that has attempts: what it was scheduled for, and the policy's version at the first of them."""

    phase: str
    step: int
    task: str
    version: int


@dataclass(slots=True)
class History:
    """The finished part of a run, and what an unfinished step already has."""

    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """The ``step`` records, first to last."""
    evaluations: dict[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)
    """The ``eval`` records by name and step."""
    tried: dict[Key, int] = field(default_factory=dict)
    """Attempts begun, by group and attempt."""
    begun: dict[str, Begun] = field(default_factory=dict)
    """The groups of these attempts, but for those that were given up since."""
    given_up: set[str] = field(default_factory=set)
    """Episodes of groups that were begun anew, for no step could consume them in time."""
    consumed: set[str] = field(default_factory=set)
    """The groups that a step has consumed."""
    outcomes: dict[str, list[float]] = field(default_factory=dict)
    """By task, what the attempts at it in finished steps came to (`rollout.outcomes`), oldest first."""
    stopped: list[str] = field(default_factory=list)
    """Why processes stopped after the last finished step, as the ``stop`` records say."""
    changes: list[Mapping[str, Any]] = field(default_factory=list)
    """The ``change`` records: what was set otherwise when the run was resumed, and after which step."""

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first."""
        return self.steps[-1]["step"] if self.steps else 0

    def add_step(self, record: Mapping[str, Any], groups: Iterable[str]) -> None:
        """Take a finished step, which has consumed `groups`."""
        self.steps.append(record)
        self.consumed.update(groups)
        for task, came_to in record.get("outcomes", {}).items():
            self.outcomes.setdefault(task, []).extend(came_to)

    def forget(self, groups: Iterable[str]) -> None:
        """Take that `groups` will be begun anew."""
        for group in groups:
            self.begun.pop(group, None)


def read_history(run: RunFolder) -> History:
    """The history of `run`. Raises what `RunFolder.records` raises."""
    history = History()
    groups: dict[str, str] = {}
    version = 0
    for record in run.records():
        if record["type"] == "step":
            history.add_step(record, (groups[name] for name in record.get("episodes", ()) if name in groups))
            history.stopped = []
            version = record.get("version", version)
        elif record["type"] == "stop":
            history.stopped.append(record["reason"])
        elif record["type"] == "eval":
            history.evaluations[record["name"], record["step"]] = record
        elif record["type"] == "change":
            history.changes.append(record)
        elif record["type"] == "episode":
            key = (record["group"], record["attempt"])
            history.tried[key] = history.tried.get(key, 0) + 1
            begun = Begun(record["phase"], record["step"], record["task"], version)
            history.begun.setdefault(record["group"], begun)
            groups[record["id"]] = record["group"]
        elif record["type"] == "shed":
            history.given_up.update(name for name, group in groups.items() if group in record["groups"])
            history.forget(record["groups"])
    return history


def consumed(run: RunFolder, steps: Sequence[Mapping[str, Any]]) -> dict[int, list[Episode]]:
    """The episodes that the records of `steps` name, by step, in the order in which the batch had them.

    Raises `RunError` where the log lacks one.
    """
    named = {name for step in steps for name in step["episodes"]}
    found = {episode.id: episode for episode in logged_episodes(run.records(), named.__contains__)}
    if lost := sorted(named - found.keys()):
        raise RunError(f"{run.log} has no verdict on {lost[0]}, which a step consumed", fix="restore it from a copy")
    return {step["step"]: [found[name] for name in step["episodes"]] for step in steps}


def finished(run: RunFolder, groups: Collection[str], given_up: Container[str] = ()) -> list[Episode]:
    """The episodes of `groups` that have a verdict, void ones among them, without those `given_up`."""
    named = tuple(f"{group}-" for group in groups)
    if not named:
        return []
    return list(logged_episodes(run.records(), lambda name: name.startswith(named) and name not in given_up))
