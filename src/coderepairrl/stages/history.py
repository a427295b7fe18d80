"""What a log says has happened, so that a run continues where it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.types import Ending, Episode

Key = tuple[str, int]
"""Group and attempt."""


@dataclass(slots=True)
class History:
    """The finished part of a run, and what an unfinished step already has."""

    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """The ``step`` records, first to last."""
    evaluations: dict[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)
    """The ``eval`` records by name and step."""
    tried: dict[Key, int] = field(default_factory=dict)
    """Attempts begun, by group and attempt."""
    begun: set[tuple[str, int]] = field(default_factory=set)
    """Phase and step of these attempts."""
    stopped: list[str] = field(default_factory=list)
    """Why processes stopped after the last finished step, as the ``stop`` records say."""
    changes: list[Mapping[str, Any]] = field(default_factory=list)
    """The ``change`` records: what was set otherwise when the run was resumed, and after which step."""

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first."""
        return self.steps[-1]["step"] if self.steps else 0


def read_history(run: RunFolder) -> History:
    """The history of `run`. Raises what `RunFolder.records` raises."""
    history = History()
    for record in run.records():
        if record["type"] == "step":
            history.steps.append(record)
            history.stopped = []
        elif record["type"] == "stop":
            history.stopped.append(record["reason"])
        elif record["type"] == "eval":
            history.evaluations[record["name"], record["step"]] = record
        elif record["type"] == "change":
            history.changes.append(record)
        elif record["type"] == "episode":
            key = (record["group"], record["attempt"])
            history.tried[key] = history.tried.get(key, 0) + 1
            history.begun.add((record["phase"], record["step"]))
    return history


def episodes_of(run: RunFolder, phase: str, first: int, last: int) -> dict[int, list[Episode]]:
    """The valid episodes of steps `first` to `last` of `phase`, in the order in which a batch has them.

    A void attempt that was never made good appears as its last void episode.
    """
    found: dict[int, dict[Key, Episode]] = {step: {} for step in range(first, last + 1)}
    for episode in logged_episodes(run.records()):
        if episode.phase == phase and episode.step in found:
            known = found[episode.step].get((episode.group, episode.attempt))
            if known is None or known.ending is Ending.VOID:
                found[episode.step][episode.group, episode.attempt] = episode
    return {step: [episodes[key] for key in sorted(episodes)] for step, episodes in found.items()}
