"""Open and waiting requests of a vLLM server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Stream:
    """An open request that samples from `model`, the server's name for the weights of `version`."""

    model: str
    version: int
    salt: str
    """Parts the server's prefix cache: an adapter may come again by the same name with other weights."""
    straddles: bool = False
    """Whether weights changed while it ran: the server reports the version of each token at its end."""


class Traffic:
    """At most `slots` open streams; none begins from `hold` until `release`."""

    def __init__(self, slots: int) -> None:
        self.streams: set[Stream] = set()
        self.queued = 0
        """Number of requests that wait here."""
        self.last_event = time.monotonic()
        """When the server last sent anything, or had no reason to."""
        self.fewer = asyncio.Event()
        """Set whenever a stream ends."""
        self._room = asyncio.Semaphore(slots)
        self._holds = 0
        self._ended = False
        self._admit = asyncio.Event()
        self._admit.set()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and for a load in progress."""
        self.queued += 1
        try:
            await self._room.acquire()
        finally:
            self.queued -= 1
        try:
            while self.holding:
                await self._admit.wait()
            yield
        finally:
            self._room.release()

    @contextmanager
    def open(self, stream: Stream) -> Iterator[None]:
        """Keep `stream` in `streams` until exit."""
        if not self.streams:
            self.last_event = time.monotonic()
        self.streams.add(stream)
        try:
            yield
        finally:
            self.streams.discard(stream)
            self.fewer.set()

    @property
    def holding(self) -> bool:
        """Whether no request may begin."""
        return not self._admit.is_set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no request begin until exit."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Let no request begin until a `release` for each `hold`."""
        self._holds += 1
        if not self._ended:
            self._admit.clear()

    def release(self) -> None:
        """See `hold`."""
        self._holds -= 1
        if not self._holds:
            self._admit.set()

    def end(self) -> None:
        """Stop holding, so that waiting requests fail: the server is dead."""
        self._ended = True
        self._admit.set()

    def silence(self) -> float:
        """Seconds without events while the server had requests."""
        if not self.streams or self.holding:
            self.last_event = time.monotonic()
        return time.monotonic() - self.last_event
