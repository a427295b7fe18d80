"""History of a run, read from its log."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coderepairrl.errors import RunError
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.types import Episode


class BegunGroup(NamedTuple):
    """Group with attempts: schedule, and first policy version."""

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
    """Groups of these attempts, without those in `given_up`."""
    given_up: set[str] = field(default_factory=set)
    """Episodes of groups that became too stale, and were begun again."""
    consumed: set[str] = field(default_factory=set)
    """Groups consumed by steps."""
    outcomes: dict[str, list[float]] = field(default_factory=dict)
    """Outcomes (`rollout.outcomes`) by task in finished steps, oldest first."""
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
            begun = BegunGroup(record["phase"], record["step"], record["task"], version)
            history.begun.setdefault(record["group"], begun)
            groups[record["id"]] = record["group"]
        elif record["type"] == "shed":
            history.given_up.update(name for name, group in groups.items() if group in record["groups"])
            history.forget(record["groups"])
    return history


def read_consumed_episodes(run: RunFolder, steps: Sequence[Mapping[str, Any]]) -> dict[int, list[Episode]]:
    """Read episodes by step, in batch order. Raises `RunError` if one is missing."""
    named = {name for step in steps for name in step["episodes"]}
    episodes = {episode.id: episode for episode in logged_episodes(run.records(), named.__contains__)}
    if lost := sorted(named - episodes.keys()):
        raise RunError(f"{run.log} has no verdict on {lost[0]}, which a step consumed", fix="restore it from a copy")
    return {step["step"]: [episodes[name] for name in step["episodes"]] for step in steps}


def read_finished_episodes(run: RunFolder, groups: Collection[str], given_up: Container[str] = ()) -> list[Episode]:
    """Read judged episodes of `groups`, including void ones, without `given_up`."""
    named = tuple(f"{group}-" for group in groups)
    if not named:
        return []
    return list(logged_episodes(run.records(), lambda name: name.startswith(named) and name not in given_up))
