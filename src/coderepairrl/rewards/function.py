"""User functions as rewards."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable

from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.types import Episode, Score, Task


class FunctionReward(Reward):
    """Value of ``def function(task, episode)``, a number or a `Score`, under the function's name.

    Runs in a daemon thread. ``async def function(task, episode, sandbox)`` is awaited and may open sandboxes.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.name = function.__name__
        self._function = function

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        """Score the episode."""
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(task, episode, sandbox)
        else:
            result = await _in_thread(lambda: self._function(task, episode))
        return result if isinstance(result, Score) else Score(self.name, result)


async def _in_thread(call: Callable[[], object]) -> object:
    """Run `call` in a thread that does not delay exit, unlike `asyncio.to_thread`'s."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def deliver(value: object, error: BaseException | None) -> None:
        if done.cancelled():
            return  # the caller no longer waits
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, problem = None, None
        try:
            value = call()
        except BaseException as error:
            # a future cannot hold SystemExit or KeyboardInterrupt, which end an event loop
            problem = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has been closed, so no caller waits
            loop.call_soon_threadsafe(deliver, value, problem)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await done
