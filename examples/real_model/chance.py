"""A random reward: the control of a study (spurious rewards, arXiv 2506.10947)."""

from random import Random

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task


class Chance(Reward):
    """1 for half of all episodes, whatever they did, decided by their ids, so that a resumed run repeats it."""

    name = "chance"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        return Score(self.name, float(Random(episode.id).random() < 0.5))
