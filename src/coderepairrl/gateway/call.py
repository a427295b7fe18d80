"""One model call: it runs by itself, and any number of connections follow it (a client and its retries)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from coderepairrl.gateway.request import ApiError, Message
from coderepairrl.tokens import Delta, FunctionCall
from coderepairrl.types import Turn


class Usage(NamedTuple):
    """Tokens of one call: `prompt` before the reply, of which `cached` were known from earlier calls; `sampled` in the
    reply, of which `reasoning` were thoughts; and the `context` that a next call goes on from."""

    prompt: int
    cached: int
    sampled: int
    reasoning: int
    context: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A committed turn, and what its client is told about it."""

    turn: Turn
    message: Message
    malformed: tuple[str, ...]
    usage: Usage
    stop: str
    """The stop string that ended it, if one did."""
    remaining_tokens: int
    remaining_calls: int
    limit: str


class Call:
    """A generation and its followers. When the last follower leaves early, it is aborted.

    `prompt` counts the tokens before the reply, `cached` those of them that were recorded before, as far as they are
    known while it runs; `Outcome.usage` has them all.
    """

    def __init__(self, digest: str, ordinal: int, *, prompt: int, cached: int) -> None:
        self.digest = digest
        self.ordinal = ordinal
        self.prompt = prompt
        self.cached = cached
        self.created = int(time.time())
        self.deltas: list[Delta] = []
        self.outcome: Outcome | None = None
        self.failure: ApiError | None = None
        self.delivered = False
        """Its whole response was written to a connection."""
        self._followers = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Unique in the session, and the same for whoever follows it: the stem of a dialect's ids."""
        return f"{self.digest[:16]}-{self.ordinal}"

    @property
    def ended(self) -> bool:
        """Committed or failed."""
        return self.outcome is not None or self.failure is not None

    @property
    def aborted(self) -> bool:
        """Told to stop, whether or not it has."""
        return self._work is not None and self._work.cancelling() > 0

    def tool_call_id(self, position: int, call: FunctionCall) -> str:
        """The id of the reply's tool call at `position`: the model's own, or one that is unique in the session."""
        return call.id or f"call_{self.ordinal}_{position}"

    def start(self, work: Coroutine[Any, Any, None], finish: Callable[[BaseException | None], Awaitable[None]]) -> None:
        """Run `work`, which `abort` cancels, then `finish` with its exception, which nothing cancels."""

        async def supervise(task: asyncio.Task[None]) -> None:
            await asyncio.wait({task})
            await finish(asyncio.CancelledError() if task.cancelled() else task.exception())
            self._notify()

        self._work = asyncio.create_task(work)
        self._task = asyncio.create_task(supervise(self._work))

    def abort(self) -> None:
        """Stop sampling; what was sampled is recorded."""
        if self._work is not None and not self._work.done() and not self.aborted:
            self._work.cancel()

    async def wait(self) -> None:
        """Until it is committed or failed."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def ends(self, within: float) -> bool:
        """Whether it is committed or failed in so many seconds."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=within)
        return self.ended

    def publish(self, deltas: list[Delta]) -> None:
        """Hand `deltas` to the followers."""
        if deltas:
            self.deltas += deltas
            self._notify()

    @contextlib.contextmanager
    def follower(self) -> Iterator[None]:
        """A connection that waits for this call."""
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if self._followers == 0 and not self.ended:
                self.abort()

    async def follow(self, heartbeat: float) -> AsyncIterator[Delta | None]:
        """Its deltas from the first on; None after every `heartbeat` seconds of silence. Raises its `ApiError`."""
        position = 0
        while True:
            changed = self._changed
            while position < len(self.deltas):
                yield self.deltas[position]
                position += 1
            if self.failure is not None:
                raise self.failure
            if self.outcome is not None:
                return
            try:
                async with asyncio.timeout(heartbeat):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def result(self) -> Outcome:
        """Its outcome. Raises its `ApiError`."""
        await self.wait()
        if self.failure is not None:
            raise self.failure
        if self.outcome is None:
            raise AssertionError("a call ended without an outcome")
        return self.outcome

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
