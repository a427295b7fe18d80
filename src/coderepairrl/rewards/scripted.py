"""Reward with scripted values, for tests."""

from __future__ import annotations

from collections.abc import Mapping

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Ending, Episode, Score, Task


class ScriptedReward(Reward):
    """Scores each patch with its value in `values` (an exception is raised), else `default`."""

    name = "scripted"

    def __init__(self, values: Mapping[bytes, float | Exception] | None = None, default: float = 0.0) -> None:
        self.values = dict(values or {})
        self.default = default
        self.seen: list[Episode] = []

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        self.seen.append(episode)
        value = self.values.get(episode.patch, self.default)
        if isinstance(value, Exception):
            raise value
        return Score(self.name, value)


def with_patch(task: Task, patch: bytes, group: str = "exam") -> Episode:
    """Episode of `task` that ended with `patch`."""
    return Episode("exam", task.id, "exam", step=0, group=group, attempt=0, ending=Ending.DONE, patch=patch)
