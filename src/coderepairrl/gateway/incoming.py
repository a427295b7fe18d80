"""Limits on arriving request bodies, and estimated parsing cost."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from coderepairrl.gateway.request import ApiError, Digest

MAX_BODY = 64 << 20
"""Bytes of one request (a million tokens of context as JSON), and of a session's concurrent requests."""
BODIES = 16
"""Concurrent bodies per session."""
CONNECTIONS = 64
"""Connections that a session may have."""
BODY_SECONDS = 60.0
"""Within which a body must have arrived."""
LARGE = 1 << 20
"""Bytes beyond which a session's bodies are read one at a time with pauses, since reading blocks the loop."""
PAUSE = 0.004
"""Seconds after each piece of a large body: 60 MB/s."""
_PIECE = 1 << 18
_LIGHT = 4000


class Body:
    """A body in `pieces` of about 256 KiB; joining a large one blocks the event loop."""

    def __init__(self, dialect: str) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self._last = bytearray()
        self._digest = Digest(dialect)
        self._values = 0

    def add(self, data: bytes) -> None:
        """Append `data`."""
        self.size += len(data)
        self._digest.update(data)
        if self._values < _LIGHT:
            self._values += 8 * data.count(b"{") + data.count(b"[")
        self._last += data
        if len(self._last) >= _PIECE:
            self.end()

    def end(self) -> None:
        """Flush the last piece."""
        if self._last:
            self.pieces.append(bytes(self._last))
            self._last = bytearray()

    @property
    def digest(self) -> str:
        """Identifies retries (`Digest`)."""
        return self._digest.hexdigest()

    @property
    def light(self) -> bool:
        """Whether parsing takes an estimated 4 ms at most."""
        return self._values + self.size // 100 < _LIGHT

    def whole(self) -> bytes:
        """Join the pieces."""
        return b"".join(self.pieces)


class Incoming:
    """A session's connections and unfinished bodies of up to `most` bytes."""

    def __init__(self, most: int = MAX_BODY) -> None:
        self._most = most
        self._connections: set[web.RequestHandler] = set()
        self._bodies = 0
        self._bytes = 0
        self._large = asyncio.Lock()

    def admit_connection(self, connection: web.RequestHandler) -> None:
        """Register a connection. Raises `ApiError` (429) beyond the limit."""
        if connection not in self._connections:
            self._connections = {connection, *(each for each in self._connections if each.transport is not None)}
        if len(self._connections) > CONNECTIONS:
            self._connections.discard(connection)
            raise ApiError(429, "too_many_requests", f"an episode has at most {CONNECTIONS} connections")

    async def body(self, request: web.Request, dialect: str) -> Body:
        """Read a body. Raises `ApiError` if too large, too slow, or one too many."""
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
