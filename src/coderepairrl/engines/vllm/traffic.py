"""Requests at a vLLM server, and those that wait for room there or for a load to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Stream:
    """A request that is open at the server."""

    def __init__(self, model: str, version: int) -> None:
        self.model = model
        self.version = version
        self.straddles = False
        """Whether weights changed under it: which token is whose, the server says at the end."""


class Traffic:
    """At most so many streams as there are `slots`; none begins while they are `held`."""

    def __init__(self, slots: int) -> None:
        self.streams: set[Stream] = set()
        self.queued = 0
        """Requests that wait here."""
        self.heard = time.monotonic()
        """When the server last said anything, or had nothing to say."""
        self.fewer = asyncio.Event()
        """Set whenever a stream ends."""
        self._room = asyncio.Semaphore(slots)
        self._admit = asyncio.Event()
        self._admit.set()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for room, and for a load in progress: no request begins under weights that are about to go."""
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
        """While it is in `streams`."""
        if not self.streams:
            self.heard = time.monotonic()
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
        """While no request begins: the server is busy with weights."""
        self._admit.clear()
        try:
            yield
        finally:
            self._admit.set()

    def silence(self) -> float:
        """Seconds for which the server has had work and said nothing."""
        if not self.streams or self.holding:
            self.heard = time.monotonic()
        return time.monotonic() - self.heard
