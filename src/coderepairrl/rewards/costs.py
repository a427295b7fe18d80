"""What an episode spends, as penalties: name one beside a reward, with a small weight."""

from __future__ import annotations

from collections.abc import Iterable

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task, ToolCall


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


class RepeatPenalty(Reward):
    """Minus the number of calls that repeat one that has failed, in (-inf, 0].

    A call counts if it fails, and one of the same tool with the same arguments failed before, and nothing new has
    succeeded since: tests that are run again after an edit may fail again. ``reward = { tests = 1.0, repeats = 0.05 }``
    takes 0.05 for each.

    Unit: calls. Source: the penalty on repeated failures of the thesis' reward for exploration. Known weaknesses: an
    agent that varies its failing call slightly repeats nothing; of an agent that does not say which tools it called,
    nothing is counted.
    """

    name = "repeats"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """The penalty."""
        return Score(self.name, -repeated_failures(episode.tool_calls))


def repeated_failures(calls: Iterable[ToolCall]) -> int:
    """How many of `calls`, in their order, fail as they have failed before, with no new success in between."""
    repeats, failed, succeeded = 0, set[tuple[str, str]](), set[tuple[str, str]]()
    for call in calls:
        what = (call.name, call.arguments)
        if not call.ok:
            repeats += what in failed
            failed.add(what)
        elif what not in succeeded:
            succeeded.add(what)
            failed.clear()
    return repeats
