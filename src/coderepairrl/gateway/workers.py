"""Limits on incoming bodies, and processes that all sessions share for jobs of over a few milliseconds.

Threads would not help: JSON, templates and most of tokenizing hold the interpreter's lock. A session has one job at a
time; the session that used the least time is next.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from coderepairrl.errors import GatewayFault
from coderepairrl.gateway.request import ApiError, Defaults, Message, PrefixKeys, Request, hash_message
from coderepairrl.gateway.worker import PARSERS, TOO_LARGE
from coderepairrl.processes.children import Child, ChildDied
from coderepairrl.tokens import Codec, TooLong

MAX_BODY = 64 << 20
"""Bytes of one request (a million tokens of context as JSON), and of a session's concurrent requests together."""
BODIES = 16
"""Most concurrent bodies of a session."""
CONNECTIONS = 64
"""Most connections of a session."""
BODY_SECONDS = 60.0
"""Time limit for a body to arrive."""
PAUSE = 0.004
"""Seconds after each `_CHUNK_BYTES` of a large body: 60 MB/s."""
_CHUNK_BYTES = 1 << 18
# longest parsing on the event loop, estimated as 8 µs per object, 1 µs per array, and 0.01 µs per byte
_LIGHT_MICROSECONDS = 4000


class RequestBody:
    """A body in one growing buffer: joining chunks would block the event loop."""

    def __init__(self, dialect: str) -> None:
        self.data = bytearray()
        self._hash = hashlib.sha256(dialect.encode())  # CPUs have instructions for it
        self._microseconds = 0  # to parse its objects and arrays

    def add(self, data: bytes) -> None:
        """Append `data`."""
        self.data += data
        self._hash.update(data)
        if self._microseconds < _LIGHT_MICROSECONDS:
            self._microseconds += 8 * data.count(b"{") + data.count(b"[")

    @property
    def size(self) -> int:
        """Number of bytes so far."""
        return len(self.data)

    @property
    def digest(self) -> str:
        """Hash of dialect and body, the same for a retry."""
        return self._hash.hexdigest()[:32]

    @property
    def is_light(self) -> bool:
        """Whether it is parsed on the event loop."""
        return self._microseconds + self.size // 100 < _LIGHT_MICROSECONDS


class IncomingBodies:
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

    @contextlib.asynccontextmanager
    async def body(self, request: web.Request, dialect: str) -> AsyncIterator[RequestBody]:
        """Read a body; its bytes count until exit. Raises `ApiError` if too large, slow or many."""
        if self._bodies >= BODIES:
            raise ApiError(429, "too_many_requests", f"an episode sends at most {BODIES} requests at a time")
        self._bodies += 1
        body = RequestBody(dialect)
        try:
            try:
                await self._read(request, body)
            finally:
                self._bodies -= 1
            yield body
        finally:
            self._bytes -= body.size

    async def _read(self, request: web.Request, body: RequestBody) -> None:
        if (request.content_length or 0) > self._most:
            raise _too_large(self._most)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for data in request.content.iter_any():
                    self._add(body, data)
                    if body.size > LARGE:
                        break
                async with self._large if body.size > LARGE else contextlib.nullcontext():
                    async for data in request.content.iter_any():
                        self._add(body, data)
                        await asyncio.sleep(PAUSE * len(data) / _CHUNK_BYTES)
        except TimeoutError:
            message = f"the request did not arrive within {BODY_SECONDS:.0f} seconds"
            raise ApiError(408, "request_timeout", message) from None

    def _add(self, body: RequestBody, data: bytes) -> None:
        self._bytes += len(data)
        body.add(data)
        if body.size > self._most or self._bytes > MAX_BODY:
            raise _too_large(self._most)


def _too_large(most: int) -> ApiError:
    return ApiError(413, "request_too_large", f"a request has at most {most >> 20} MiB")


MAX_PROCESSES = max(2, min(4, (os.cpu_count() or 2) // 2))
"""Processes of one gateway; large jobs leave one free."""
LARGE = 1 << 20
"""Bytes beyond which a job leaves one process free, and a session's bodies are read one at a time, with pauses."""
GRACE, MAX_REST = 1.0, 0.1
"""After `GRACE` seconds of use, a session pauses between jobs for as long as the last one took, at most `MAX_REST`."""
JOB_SECONDS = 60.0
"""Job time limit; then its process is killed and the request refused."""
LIGHT_TEXT = 8 << 10
"""Characters tokenized on the event loop: 2 to 8 ms."""
LIGHT_KEYS = 64 << 10
"""Characters hashed on the event loop: 1 ms."""
LIGHT_MESSAGES = 64
"""Messages that are rendered on the event loop."""

log = logging.getLogger(__name__)


class _WaitingJob(NamedTuple):
    processor: RequestProcessor
    is_large: bool


class WorkerPool:
    """Pool of processes, started on demand."""

    def __init__(self, most: int = MAX_PROCESSES) -> None:
        self._most = most
        self._idle: list[Child] = []
        self._running: set[asyncio.Task[bytes]] = set()
        self._children: set[Child] = set()
        self._waiting: list[_WaitingJob] = []
        self._started: list[bool] = []
        """For each job that has a process, whether it is large."""
        self._changed = asyncio.Condition()
        self._closed = False

    async def close(self) -> None:
        """End all processes; pending jobs fail with `GatewayFault`."""
        self._closed = True
        for child in list(self._children):
            child.process.kill()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._children))
        self._children.clear()

    async def call(self, processor: RequestProcessor, job: str, *arguments: Any, body: bytearray | None = None) -> Any:
        """Run `job` of `worker.JOBS` on `arguments`, then `body` if given.

        Raises `ApiError`, `TooLong`, ValueError, `GatewayFault`.
        """
        pieces: list[bytes | bytearray] = [pickle.dumps((job, arguments)), *([] if body is None else [body])]
        begun, is_large = asyncio.Event(), sum(map(len, pieces)) > LARGE
        task = asyncio.create_task(self._run_queued(processor, pieces, is_large, begun))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # reads the exception, which asyncio would log if the caller is gone by then
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            # shielded: a client that disconnects still pays for its job, else large requests would be free
            error, result = pickle.loads(await asyncio.shield(task))
        except asyncio.CancelledError:
            if not begun.is_set():  # it has cost nothing yet, and would hold its body in memory
                task.cancel()
            raise
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # its traceback has this frame: a cycle would wait for the garbage collector

    async def _run_queued(
        self, processor: RequestProcessor, pieces: Sequence[bytes | bytearray], is_large: bool, begun: asyncio.Event
    ) -> bytes:
        async with processor.busy:
            await asyncio.sleep(max(0.0, processor.rests_until - time.monotonic()))
            async with self._reserve_process(processor, is_large):
                begun.set()
                began = time.monotonic()
                try:
                    return await self._run(pieces)
                finally:
                    took = time.monotonic() - began
                    processor.seconds += took
                    if processor.seconds > GRACE:
                        processor.rests_until = time.monotonic() + min(took, MAX_REST)

    @contextlib.asynccontextmanager
    async def _reserve_process(self, processor: RequestProcessor, is_large: bool) -> AsyncIterator[None]:
        """Wait for a process: sessions that used less time come first, and large jobs leave one free."""
        job = _WaitingJob(processor, is_large)

        def is_next() -> bool:
            large_may_start = sum(self._started) < max(1, self._most - 1)
            may_start = [each for each in self._waiting if large_may_start or not each.is_large]
            first = min(may_start, key=lambda each: each.processor.seconds, default=None)
            return len(self._started) < self._most and first is job

        async with self._changed:
            self._waiting.append(job)
            try:
                await self._changed.wait_for(is_next)
                self._started.append(is_large)
            finally:
                self._waiting.remove(job)
                self._changed.notify_all()
        try:
            yield
        finally:
            self._started.remove(is_large)
            async with self._changed:
                self._changed.notify_all()

    async def _run(self, pieces: Sequence[bytes | bytearray]) -> bytes:
        for _ in range(2):  # one death may be chance; after two, the job is to blame
            if self._closed:
                raise GatewayFault("the gateway stops")
            child = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(JOB_SECONDS):
                    await child.send_pieces(pieces)
                    [result] = await child.receive_pieces()
            except BaseException as error:
                child.process.kill()
                await child.close()
                self._children.discard(child)
                if isinstance(error, TimeoutError):
                    break
                if not isinstance(error, ChildDied):
                    raise
            else:
                self._idle.append(child)
                return result
        if self._closed:
            raise GatewayFault("the gateway stops")
        log.warning("a request of %d bytes was given up", sum(map(len, pieces)))
        return TOO_LARGE

    async def _start(self) -> Child:
        try:
            child = await Child.spawn("coderepairrl.gateway.worker", log=Path(os.devnull))
        except OSError as error:
            raise GatewayFault(f"no process for large requests can be started: {error}") from error
        self._children.add(child)
        if self._closed:  # closed meanwhile
            child.process.kill()
        return child


class RequestProcessor:
    """Parses, hashes and renders a session's requests, large ones in `workers`.

    `most` is the longest prompt in tokens.
    """

    def __init__(self, workers: WorkerPool, codec: Codec | None, most: int | None) -> None:
        self.seconds = 0.0
        """Worker time used so far."""
        self.rests_until = 0.0
        """Earliest time of the next job, by `time.monotonic`."""
        self.busy = asyncio.Lock()
        self._workers = workers
        self._codec = codec
        self._most = most

    async def parse(self, name: str, body: RequestBody) -> Request:
        """Parse with `worker.PARSERS[name]`. Raises `ApiError`, and `TooLong` if it cannot fit."""
        if body.is_light:
            return PARSERS[name](bytes(body.data))
        loaded_from = self._codec.loaded_from if self._codec else None
        request: Request = await self._workers.call(self, "parse", name, loaded_from, self._most, body=body.data)
        return request

    async def keys(
        self, prefix_keys: PrefixKeys, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]
    ) -> list[bytes]:
        """Call `prefix_keys.compute`."""
        if _is_light(LIGHT_KEYS, *prefix_keys.list_unhashed(messages, tools)):
            return prefix_keys.compute(messages, tools)
        keys, defaults = await self._workers.call(self, "hash_prefixes", messages, tools)
        prefix_keys.store_keys(messages, keys, defaults)
        return list(keys)

    async def hash_reply(self, reply: Message, defaults: Defaults) -> bytes:
        """Call `hash_message` for a reply alone."""
        if _is_light(LIGHT_KEYS, reply):
            return hash_message(b"", reply, defaults)
        key: bytes = await self._workers.call(self, "hash_message", b"", reply, defaults)
        return key

    async def render(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> list[int]:
        """Call `Codec.render`."""
        is_light = len(messages) <= LIGHT_MESSAGES and _is_light(LIGHT_TEXT, messages, tools)
        ids = await self._call_codec("render", messages, tools, is_light=is_light)
        assert ids is not None, "rendering gives ids or raises"
        return ids

    async def extend(
        self, prompt: Sequence[int], output: Sequence[int], messages: tuple[Message, ...], calls: int
    ) -> list[int] | None:
        """Call `Codec.extend`."""
        is_light = len(messages) <= LIGHT_MESSAGES and _is_light(LIGHT_TEXT, messages)
        return await self._call_codec("extend", list(prompt), list(output), messages, is_light=is_light, calls=calls)

    async def spell(self, reply: Message, calls: int) -> list[int] | None:
        """Call `Codec.spell`."""
        return await self._call_codec("spell", reply, is_light=_is_light(LIGHT_TEXT, reply), calls=calls)

    async def _call_codec(self, method: str, *arguments: Any, is_light: bool, **options: Any) -> list[int] | None:
        """Call `method` of the codec, here if it `is_light`."""
        assert self._codec is not None and self._most is not None, "a remote renders its own prompts"
        options["most"], source = self._most, self._codec.loaded_from
        if source is None or is_light:
            ids: list[int] | None = getattr(self._codec, method)(*arguments, **options)
            return ids
        packed = await self._workers.call(self, "call_codec", source, method, arguments, options)
        return None if packed is None else packed.tolist()

    def check(self, prompt: Sequence[int]) -> None:
        """Raise `TooLong` beyond the limit."""
        if self._most is not None and len(prompt) > self._most:
            raise TooLong(len(prompt))


def _is_light(most: int, *values: object) -> bool:
    # whether `values` have at most `most` characters, each value and mapping key counted as 8 or more
    rest: list[object] = list(values)
    while rest and most >= 0:
        value = rest.pop()
        most -= 8
        if isinstance(value, str):
            most -= len(value)
        elif isinstance(value, Mapping):
            most -= 8 * len(value)
            rest += value.values() if most >= 0 else ()
        elif isinstance(value, (list, tuple)):
            most -= 8 * len(value)
            rest += value if most >= 0 else ()
    return most >= 0
