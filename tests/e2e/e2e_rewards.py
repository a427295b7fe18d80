"""Rewards that a random policy can earn more or less of, so that there is something to learn in a few steps."""

from __future__ import annotations

from coderepairrl.protocols import SandboxBackend
from coderepairrl.types import Episode, Score, Task


class LowBytes:
    """Fraction of the sampled tokens with an id below 128."""

    name = "low_bytes"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        ids = [token for turn in episode.turns for token in turn.output.ids]
        return Score(self.name, sum(token < 128 for token in ids) / max(len(ids), 1))
