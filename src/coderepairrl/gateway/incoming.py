"""Bodies on their way in: how long they may take, how many there may be, and what they will cost."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from coderepairrl.gateway.request import ApiError, Digest

MAX_BODY = 64 << 20
"""Bytes of a request: a context of a million tokens and its JSON. Of all that a session is sending at a time, too."""
BODIES = 16
"""Bodies that a session may be sending at a time."""
CONNECTIONS = 64
"""Connections that a session may have."""
BODY_SECONDS = 60.0
"""What a body may take to come."""
LARGE = 1 << 20
"""Bytes of a body beyond which a session sends one at a time, with pauses: reading it is work, too."""
PAUSE = 0.004
"""Seconds after each piece of a large body: 60 MB/s."""
_PIECE = 1 << 18
_LIGHT = 4000


class Body:
    """A request body as it came, in `pieces` of 256 KiB or so: putting a large one together takes time."""

    def __init__(self, dialect: str) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self._last = bytearray()
        self._named = Digest(dialect)
        self._values = 0

    def add(self, data: bytes) -> None:
        """What came next."""
        self.size += len(data)
        self._named.update(data)
        if self._values < _LIGHT:
            self._values += 8 * data.count(b"{") + data.count(b"[")
        self._last += data
        if len(self._last) >= _PIECE:
            self.end()

    def end(self) -> None:
        """Nothing comes next."""
        if self._last:
            self.pieces.append(bytes(self._last))
            self._last = bytearray()

    @property
    def digest(self) -> str:
        """Its name, by which a retry is recognised (`Digest`)."""
        return self._named.name()

    @property
    def light(self) -> bool:
        """Whether it can be read in 4 ms: microseconds are what a JSON of so many bytes and values took to check."""
        return self._values + self.size // 100 < _LIGHT

    def whole(self) -> bytes:
        """All of it."""
        return b"".join(self.pieces)


class Incoming:
    """What a session is sending, and by which connections; a body of it has at most `most` bytes."""

    def __init__(self, most: int = MAX_BODY) -> None:
        self._most = most
        self._connections: set[web.RequestHandler] = set()
        self._bodies = 0
        self._bytes = 0
        self._large = asyncio.Lock()

    def greet(self, connection: web.RequestHandler) -> None:
        """A request has begun. Raises `ApiError` where its connection is one too many."""
        if connection not in self._connections:
            self._connections = {connection, *(each for each in self._connections if each.transport is not None)}
        if len(self._connections) > CONNECTIONS:
            self._connections.discard(connection)
            raise ApiError(429, "too_many_requests", f"an episode has at most {CONNECTIONS} connections")

    async def body(self, request: web.Request, dialect: str) -> Body:
        """The body of `request`. Raises `ApiError` for one that is too large, too slow, or one too many."""
        if self._bodies >= BODIES:
            raise ApiError(429, "too_many_requests", f"an episode sends at most {BODIES} requests at a time")
        self._bodies += 1
        body = Body(dialect)
        try:
            if (request.content_length or 0) > self._most:
                raise _too_large(self._most)
            async with asyncio.timeout(BODY_SECONDS):
                async for data in request.content.iter_any():
                    self._add(body, data)
                    if body.size > LARGE:
                        break
                async with self._large if body.size > LARGE else contextlib.nullcontext():
                    async for data in request.content.iter_any():
                        self._add(body, data)
                        await asyncio.sleep(PAUSE * len(data) / _PIECE)
        except TimeoutError:
            message = f"the request did not arrive within {BODY_SECONDS:.0f} seconds"
            raise ApiError(408, "request_timeout", message) from None
        finally:
            self._bodies -= 1
            self._bytes -= body.size
        body.end()
        return body

    def _add(self, body: Body, data: bytes) -> None:
        self._bytes += len(data)
        body.add(data)
        if body.size > self._most or self._bytes > MAX_BODY:
            raise _too_large(self._most)


def _too_large(most: int) -> ApiError:
    return ApiError(413, "request_too_large", f"a request has at most {most >> 20} MiB")
