"""A reward of your own: a class derived from `Reward`, named in a config as ``module:Class``."""

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task


class Brief(Reward):
    """1 for an episode in which the policy says nothing, 0 for one that fills every reply of 64 tokens."""

    name = "brief"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        said = sum(len(turn.output) for turn in episode.turns)
        return Score(self.name, 1 - said / (64 * max(1, len(episode.turns))))  # some end before the first reply
