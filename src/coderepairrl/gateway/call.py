"""One model call: it runs by itself, and any number of connections follow it (a client and its retries)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from coderepairrl.gateway.request import ApiError, Message, Request
from coderepairrl.processes import clock
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


Find = Callable[[str], "tuple[Request, Call, Outcome] | None"]
"""The stored call of a name (`Call.name`) that has ended with an outcome, with its request but for the messages."""


class Call:
    """A generation and its followers. When the last follower leaves early, it is aborted.

    `prompt` counts the tokens before the reply, `cached` those of them that were recorded before, as far as they are
    known while it runs and has found its place; `Outcome.usage` has them all.
    """

    def __init__(self, digest: str, ordinal: int) -> None:
        self.digest = digest
        self.ordinal = ordinal
        self.prompt = 0
        self.cached = 0
        self.started = clock.now()
        self.deltas: list[Delta] = []
        self.outcome: Outcome | None = None
        self.failure: ApiError | None = None
        self.delivered = False
        """Its whole response was written to a connection."""
        self.aborted = False
        """Told to stop, whether or not it has."""
        self._followers = 0
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._finishing = False
        self._task: asyncio.Task[None] | None = None
        self._work: asyncio.Task[None] | None = None
        """The task, while it may be cancelled."""

    @property
    def name(self) -> str:
        """Unique in the session, and the same for all its followers: the stem of a dialect's ids."""
        return f"{self.digest[:16]}-{self.ordinal}"

    @property
    def created(self) -> int:
        """Whole Unix seconds."""
        return int(self.started)

    @property
    def ended(self) -> bool:
        """Committed or failed."""
        return self.outcome is not None or self.failure is not None

    @property
    def abandoned(self) -> bool:
        """Whether its client went away without the whole response."""
        return self._followers == 0 and not self.delivered

    def tool_call_id(self, position: int, call: FunctionCall) -> str:
        """The id of the reply's tool call at `position`: the model's own, or one that is unique in the session."""
        return call.id or f"call_{self.ordinal}_{position}"

    def start(
        self, work: Callable[[], Awaitable[None]], finish: Callable[[BaseException | None], Awaitable[None]]
    ) -> None:
        """Run `work`, which `abort` cancels, then `finish` with its exception, which nothing cancels."""
        # one task: every further one to be woken stands in line behind the calls that came meanwhile
        self._task = asyncio.create_task(self._run(work, finish))

    def abort(self) -> None:
        """Stop sampling; what was sampled is recorded."""
        if not (self._finishing or self.aborted):
            self.aborted = True
            if self._work is not None:
                self._work.cancel()

    async def wait(self) -> None:
        """Until it is committed or failed."""
        await self._over.wait()

    async def ends(self, within: float) -> bool:
        """Whether it is committed or failed in so many seconds."""
        try:
            async with asyncio.timeout(within):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

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
                raise self.failure.again()
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
            raise self.failure.again()
        if self.outcome is None:
            raise AssertionError("a call ended without an outcome")
        return self.outcome

    async def _run(
        self, work: Callable[[], Awaitable[None]], finish: Callable[[BaseException | None], Awaitable[None]]
    ) -> None:
        error: BaseException | None = None
        try:
            try:
                if self.aborted:
                    raise asyncio.CancelledError  # before it began
                self._work = self._task
                await work()
            except asyncio.CancelledError as cancelled:
                if not self.aborted and self._task is not None and self._task.cancelling():
                    raise  # not this call is cancelled, but everything
                error = cancelled
            except Exception as failed:
                error = failed
            self._finishing = True
            await finish(error)
        finally:
            error = None  # which knows this frame: see `ApiError.again`
            self._over.set()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
