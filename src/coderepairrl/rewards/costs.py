"""What an episode spends, as penalties: name one beside a reward, with a small weight."""

from __future__ import annotations

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task


class LengthPenalty(Reward):
    """Minus the thousands of tokens that the policy sampled, in (-inf, 0].

    ``reward = { patch_edits = 1.0, length = 0.01 }`` takes 0.01 for every thousand tokens.

    Unit: thousands of tokens. Source: the efficiency term that the thesis proposes as future work. Known weakness:
    saying and trying nothing is cheapest, so a weight that matters beside the reward of a repair teaches to give up.
    """

    name = "length"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """The penalty."""
        return Score(self.name, -episode.sampled / 1000)


class TimePenalty(Reward):
    """Minus the minutes that the model's replies and its tools took, in (-inf, 0].

    Unit: minutes. Source: the efficiency term that the thesis proposes as future work. Known weaknesses: that of
    `length`; the machine's load counts, so it is not the same twice and differs within a group for reasons that the
    policy does not have.
    """

    name = "time"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """The penalty."""
        seconds = sum(turn.ended - turn.started for turn in episode.turns)
        seconds += sum(call.seconds for call in episode.tool_calls)
        return Score(self.name, -seconds / 60)
