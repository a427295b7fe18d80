"""Penalties for what an episode spends; combine one with a reward, at a small weight."""

from __future__ import annotations

from collections.abc import Iterable

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task, ToolCall


class LengthPenalty(Reward):
    """Minus the thousands of tokens that the policy sampled, in (-inf, 0].

    ``reward = { patch_edits = 1.0, length = 0.01 }`` subtracts 0.01 per thousand tokens.

    Unit: thousands of tokens. Source: the thesis's efficiency term (future work). Known weakness: silence is cheapest,
    so a large weight teaches to give up.
    """

    name = "length"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """The penalty."""
        return Score(self.name, -episode.sampled / 1000)


class TimePenalty(Reward):
    """Minus the minutes of the model's replies and tools, in (-inf, 0].

    Unit: minutes. Source: the thesis's efficiency term (future work). Known weaknesses: that of `length`; the machine's
    load counts, so values vary for reasons outside the policy.
    """

    name = "time"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """The penalty."""
        seconds = sum(turn.ended - turn.started for turn in episode.turns)
        seconds += sum(call.seconds for call in episode.tool_calls)
        return Score(self.name, -seconds / 60)


class RepeatPenalty(Reward):
    """Minus the number of calls that repeat a failed one, in (-inf, 0].

    A failing call counts if the same tool with the same arguments failed before and nothing new has succeeded since:
    tests run again after an edit may fail again.

    Unit: calls. Source: the thesis's penalty on repeated failures. Known weaknesses: a slightly varied failing call is
    no repeat; agents that do not report tool calls have none.
    """

    name = "repeats"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """The penalty."""
        return Score(self.name, -repeated_failures(episode.tool_calls))


def repeated_failures(calls: Iterable[ToolCall]) -> int:
    """Number of `calls` that fail as before, with no new success in between."""
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
