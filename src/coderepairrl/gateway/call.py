"""A model call, which continues while clients disconnect and retry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from coderepairrl.gateway.request import ApiError, Message, Request
from coderepairrl.processes.meter import unix_time
from coderepairrl.tokens import Delta, FunctionCall
from coderepairrl.types import Turn


class Usage(NamedTuple):
    """Token counts: `cached` is part of `prompt`, `reasoning` of `sampled`; the next call continues from `context`."""

    prompt: int
    cached: int
    sampled: int
    reasoning: int
    context: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A committed turn and its response data."""

    turn: Turn
    message: Message
    malformed: tuple[str, ...]
    usage: Usage
    stop: str
    """The stop string that ended it, or empty."""
    remaining_tokens: int
    remaining_calls: int
    limit: str


FindCall = Callable[[str], "tuple[Request, Call, Completion] | None"]
"""Looks up a completed, stored call by `Call.name`; its request comes without messages."""


class Call:
    """A generation and its followers (connections), aborted when the last follower leaves early.

    `prompt` and `cached` count prompt tokens as soon as they are known.
    """

    def __init__(self, digest: str, ordinal: int) -> None:
        self.digest = digest
        self.ordinal = ordinal
        self.prompt = 0
        self.cached = 0
        self.started = unix_time()
        self.deltas: list[Delta] = []
        self.completion: Completion | None = None
        self.failure: ApiError | None = None
        self.delivered = False
        self.aborted = False
        """Whether `abort` was called; the call may still be finishing."""
        self._followers = 0
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._has_begun = False
        self._finishing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Session-wide unique name, the base of response ids."""
        return f"{self.digest[:16]}-{self.ordinal}"

    @property
    def created(self) -> int:
        """Whole Unix seconds."""
        return int(self.started)

    @property
    def is_ended(self) -> bool:
        """Committed or failed."""
        return self.completion is not None or self.failure is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether the client left before the response was complete."""
        return self._followers == 0 and not self.delivered

    def tool_call_id(self, position: int, call: FunctionCall) -> str:
        """The model's id of a tool call, or a unique one."""
        return call.id or f"call_{self.ordinal}_{position}"

    def start(
        self, work: Callable[[], Awaitable[None]], finish: Callable[[BaseException | None], Awaitable[None]]
    ) -> None:
        """Run `work` (cancelled by `abort`), then `finish` with its exception (never cancelled)."""
        # one task for both: a second one would queue behind calls that arrived meanwhile
        self._task = asyncio.create_task(self._run(work, finish))

    def abort(self) -> None:
        """Stop sampling and record the tokens so far."""
        if not (self._finishing or self.aborted):
            self.aborted = True
            if self._task is not None and self._has_begun:  # cancelled before it began, it would never run `finish`
                self._task.cancel()

    async def wait(self) -> None:
        """Wait for commitment or failure."""
        await self._over.wait()

    async def wait_for_end(self, seconds: float) -> bool:
        """Whether it ends within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    def publish(self, deltas: list[Delta]) -> None:
        """Pass `deltas` to the followers."""
        if deltas:
            self.deltas += deltas
            self._notify()

    @contextlib.contextmanager
    def follower(self) -> Iterator[None]:
        """Count a waiting connection; the last to leave early aborts the call."""
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if self._followers == 0 and not self.is_ended:
                self.abort()

    async def follow(self, heartbeat: float) -> AsyncIterator[Delta | None]:
        """Yield deltas, and None after every `heartbeat` silent seconds. Raises the call's `ApiError`."""
        position = 0
        while True:
            changed = self._changed
            while position < len(self.deltas):
                yield self.deltas[position]
                position += 1
            if self.failure is not None:
                raise self.failure.without_traceback()
            if self.completion is not None:
                return
            try:
                async with asyncio.timeout(heartbeat):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def result(self) -> Completion:
        """Return the completion. Raises the call's `ApiError`."""
        await self.wait()
        if self.failure is not None:
            raise self.failure.without_traceback()
        assert self.completion is not None, "a call ended without a completion"
        return self.completion

    async def _run(
        self, work: Callable[[], Awaitable[None]], finish: Callable[[BaseException | None], Awaitable[None]]
    ) -> None:
        error: BaseException | None = None
        try:
            try:
                if self.aborted:
                    raise asyncio.CancelledError  # before it began
                self._has_begun = True
                await work()
            except asyncio.CancelledError as cancelled:
                if not self.aborted and self._task is not None and self._task.cancelling():
                    raise  # the loop is shutting down, not just this call
                error = cancelled
            except Exception as failed:
                error = failed
            self._finishing = True
            await finish(error)
        finally:
            error = None  # breaks the reference cycle with this frame: see `ApiError.without_traceback`
            self._over.set()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
