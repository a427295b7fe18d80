"""Penalties for an episode's costs; use a small weight."""

from __future__ import annotations

from collections.abc import Iterable

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task, ToolCall


class LengthPenalty(Reward):
    """Minus the thousands of sampled tokens, in (-inf, 0].

    Source: the thesis's efficiency term (future work). Known weakness: silence is cheapest, so a large weight teaches
    to give up.
    """

    name = "length"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        return Score(self.name, -episode.sampled / 1000)


class TimePenalty(Reward):
    """Minus the minutes of replies and tool calls, in (-inf, 0].

    Source: the thesis's efficiency term (future work). Known weaknesses: that of `length`; varies with the machine's
    load.
    """

    name = "time"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        seconds = sum(turn.ended - turn.started for turn in episode.turns)
        seconds += sum(call.seconds for call in episode.tool_calls)
        return Score(self.name, -seconds / 60)


class RepeatPenalty(Reward):
    """Minus the number of calls that repeat a failed one, in (-inf, 0].

    Counts same tool and arguments, without a new success since the failure.

    Source: the thesis's penalty on repeated failures. Known weakness: misses varied and unreported calls.
    """

    name = "repeats"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        return Score(self.name, -repeated_failures(episode.tool_calls))


def repeated_failures(calls: Iterable[ToolCall]) -> int:
    """Count calls that fail as before, with no new success in between."""
    repeats, failed, succeeded = 0, set[tuple[str, str]](), set[tuple[str, str]]()
    for call in calls:
        signature = (call.name, call.arguments)
        if not call.ok:
            repeats += signature in failed
            failed.add(signature)
        elif signature not in succeeded:
            succeeded.add(signature)
            failed.clear()
    return repeats
