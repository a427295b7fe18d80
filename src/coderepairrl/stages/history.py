"""History of a run, read from its log."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coderepairrl.errors import RunError
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.types import Episode


class BegunGroup(NamedTuple):
    """Group whose attempts have begun: its schedule, and the policy version then."""

    phase: str
    step: int
    task: str
    version: int


@dataclass(slots=True)
class History:
    """Finished part of a run, and attempts of an unfinished step."""

    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """``step`` records in order."""
    evaluations: dict[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)
    """``eval`` records by name and step."""
    tried: dict[tuple[str, int], int] = field(default_factory=dict)
    """How often each attempt began, by group and number."""
    begun: dict[str, BegunGroup] = field(default_factory=dict)
    """Begun groups by name, without those to begin again."""
    given_up: set[str] = field(default_factory=set)
    """Episodes of groups that became too stale and begin again."""
    consumed: set[str] = field(default_factory=set)
    """Groups consumed by steps."""
    outcomes: dict[str, list[float]] = field(default_factory=dict)
    """`rollout.curriculum.Outcomes` of finished steps."""
    stopped: list[str] = field(default_factory=list)
    """Reasons of ``stop`` records after the last finished step."""
    changes: list[Mapping[str, Any]] = field(default_factory=list)
    """``change`` records: settings changed at resumptions."""

    @property
    def step(self) -> int:
        """Last finished step, or 0."""
        return self.steps[-1]["step"] if self.steps else 0

    def add_step(self, record: Mapping[str, Any], groups: Iterable[str]) -> None:
        """Add a finished step that consumed `groups`."""
        self.steps.append(record)
        self.consumed.update(groups)
        for task, outcomes in record.get("outcomes", {}).items():
            self.outcomes.setdefault(task, []).extend(outcomes)

    def forget(self, groups: Iterable[str]) -> None:
        """Forget `groups`, to begin them again."""
        for group in groups:
            self.begun.pop(group, None)


def read_history(run: RunFolder) -> History:
    """Read the history of `run`. Raises like `RunFolder.records`."""
    history = History()
    group_of: dict[str, str] = {}  # by episode
    version = 0
    for record in run.records():
        if record["type"] == "step":
            history.add_step(record, (group_of[name] for name in record.get("episodes", ()) if name in group_of))
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
            begun = BegunGroup(record["phase"], record["step"], record["task"], version)
            history.begun.setdefault(record["group"], begun)
            group_of[record["id"]] = record["group"]
        elif record["type"] == "shed":
            history.given_up.update(name for name, group in group_of.items() if group in record["groups"])
            history.forget(record["groups"])
    return history


def read_consumed_episodes(run: RunFolder, steps: Sequence[Mapping[str, Any]]) -> dict[int, list[Episode]]:
    """Read the episodes of `steps`, by step, in batch order. Raises `RunError` if one is missing."""
    names = {name for step in steps for name in step["episodes"]}
    episodes = {episode.id: episode for episode in logged_episodes(run.records(), names.__contains__)}
    if missing := sorted(names - episodes.keys()):
        raise RunError(f"{run.log} has no verdict on {missing[0]}, which a step consumed", fix="restore it from a copy")
    return {step["step"]: [episodes[name] for name in step["episodes"]] for step in steps}


def read_finished_episodes(run: RunFolder, groups: Collection[str], given_up: Container[str] = ()) -> list[Episode]:
    """Read judged episodes of `groups`, including void ones, without `given_up`."""
    prefixes = tuple(f"{group}-" for group in groups)
    if not prefixes:  # spares reading the log
        return []
    return list(logged_episodes(run.records(), lambda name: name.startswith(prefixes) and name not in given_up))
