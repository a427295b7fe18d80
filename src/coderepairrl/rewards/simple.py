"""Simple rewards: a user's function, penalties for costs (for small weights), and scripted values for tests."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Ending, Episode, Score, Task, ToolCall


class FunctionReward(Reward):
    """Value of ``def function(task, episode)``, a number or a `Score`, under the function's name.

    The function runs in a daemon thread. ``async def function(task, episode, sandbox)`` may open sandboxes.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.name = function.__name__
        self._function = function

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(task, episode, sandbox)
        else:
            result = await _run_in_thread(lambda: self._function(task, episode))
        return result if isinstance(result, Score) else Score(self.name, result)


async def _run_in_thread(call: Callable[[], object]) -> object:
    """Run `call` in a thread that does not delay exit, unlike `asyncio.to_thread`'s."""
    done: Future[object] = Future()
    done.set_running_or_notify_cancel()  # a caller that no longer waits cannot cancel it

    def work() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:
            # unwrapped, SystemExit and KeyboardInterrupt would end the event loop
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await asyncio.wrap_future(done)


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


def make_patched_episode(task: Task, patch: bytes, group: str = "exam") -> Episode:
    """Episode of `task` that ended with `patch`."""
    return Episode("exam", task.id, "exam", step=0, group=group, attempt=0, ending=Ending.DONE, patch=patch)


class LengthPenalty(Reward):
    """Minus the thousands of sampled tokens, in (-inf, 0].

    Source: the thesis's efficiency term (future work). Known weakness: doing nothing is cheapest, so a large weight
    teaches to give up.
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

    Repeats have equal tool and arguments, and no new success since.

    Source: the thesis's penalty on repeated failures. Known weakness: misses varied and unreported calls.
    """

    name = "repeats"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        return Score(self.name, -count_repeats_without_progress(episode.tool_calls))


def count_repeats_without_progress(calls: Iterable[ToolCall]) -> int:
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
