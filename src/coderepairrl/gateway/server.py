"""An HTTP server with the APIs of model providers, which records the policy's prompts and replies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import json
import logging
import re
import secrets
import socket as sockets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from coderepairrl.errors import Fault, GatewayFault, UsageError
from coderepairrl.gateway import dialects, responses
from coderepairrl.gateway.body import Dialect
from coderepairrl.gateway.dialects import DIALECTS
from coderepairrl.gateway.request import ApiError, Counter
from coderepairrl.gateway.session import OnTurn, Session
from coderepairrl.gateway.source import ReplySource
from coderepairrl.gateway.workers import LARGE, IncomingBodies, RequestBody, WorkerPool
from coderepairrl.processes.signals import raise_open_file_limit
from coderepairrl.types import Endpoint, Limits, Sampling, Turn

MODEL = "policy"
"""Name of the model; requests may name any other."""
KEYLESS_CONNECTIONS = 512
"""Most connections without a valid key; one more closes the oldest."""
BACKLOG = 1024
"""Connections that the kernel may hold before acceptance."""
KEY_SECONDS = 10.0
"""Seconds before a connection without a valid key is closed."""
REMEMBERED = 1 << 16
"""Number of closed sessions whose keys get `episode_closed` instead of `invalid_api_key`."""

log = logging.getLogger(__name__)


ChooseSession = Callable[[Mapping[str, Any], bool], Session]
"""Chooses the session of a request without a key, given its body and whether it is marked as a retry."""
_UNLIMITED = Limits(tokens=1 << 30)
_KEY = re.compile("[0-9a-f]{32}")  # as `Gateway.open` makes it
_LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)


class Gateway:
    """Serves sessions over TCP and a Unix socket.

    A session's key is in the base URL (``/s/KEY/v1``) or the API key (``/v1``). `sampling` overrides clients' settings;
    `on_turn` is awaited with every turn before the client sees the reply's end; `keyless_session`, if set, chooses the
    session of keyless requests from this machine.

        async with Gateway(source, sampling=Sampling(), on_turn=record).listening() as gateway:
            session = gateway.open("episode", limits=Limits(), seed=7)
            ...  # an agent talks to session.endpoint
            turns = await gateway.close(session)
    """

    def __init__(self, source: ReplySource, *, sampling: Sampling, on_turn: OnTurn) -> None:
        self.source = source
        self.sampling = sampling
        self.url = ""
        self.socket: Path | None = None
        self.keyless_session: ChooseSession | None = None
        self._keyless_incoming = IncomingBodies(LARGE)  # small: they are parsed in this process
        self._on_turn = on_turn
        self._sessions: dict[str, Session] = {}
        self._closed: dict[str, None] = {}  # keys of closed sessions, in order
        self._runner: web.AppRunner | None = None
        self._listeners: list[asyncio.Server] = []
        # connections without a valid key yet, oldest first, and the timers that will close them
        self._keyless: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._workers = WorkerPool()

    @contextlib.asynccontextmanager
    async def listening(self, socket: Path | None = None) -> AsyncIterator[Self]:
        """Call `start`, and `stop` on exit. Raises `UsageError`."""
        try:
            await self.start(socket=socket)
            yield self
        finally:
            await self.stop()

    async def start(self, host: str = "127.0.0.1", port: int = 0, socket: Path | None = None) -> None:
        """Listen on `host`:`port` (0: any free port) and `socket`. Raises `UsageError` if in use."""
        app = web.Application(middlewares=[dialects.format_errors])
        for prefix in ("", "/s/{key}"):
            for dialect in DIALECTS:
                app.router.add_post(f"{prefix}/v1{dialect.path}", self._make_completion_handler(dialect))
                if dialect.counter is not None:
                    app.router.add_post(f"{prefix}/v1{dialect.counter.path}", self._make_count_handler(dialect.counter))
            app.router.add_get(f"{prefix}/v1/responses/{{response:resp_[^/]+}}", self._get_response)
            app.router.add_delete(f"{prefix}/v1/responses/{{response:resp_[^/]+}}", self._delete_response)
            app.router.add_get(f"{prefix}/v1/models", self._list_models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._get_model)
            for root in {f"{prefix}/", prefix or "/", f"{prefix}/v1"}:  # a set: two are equal without a prefix
                app.router.add_get(root, _answer_probe)
        app.router.add_get("/health", self._get_health)
        # cancels the handler when its client disconnects, which aborts the call in the engine
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_QuietLogger(log, {})
        )
        await self._runner.setup()
        raise_open_file_limit()
        loop = asyncio.get_running_loop()
        try:
            self._listeners.append(_raise_backlog(await loop.create_server(self._accept, host, port, backlog=1)))
            if socket is not None:
                check_socket_free(socket)
                socket.unlink(missing_ok=True)
                self._listeners.append(
                    _raise_backlog(await loop.create_unix_server(self._accept, str(socket), backlog=1))
                )
                socket.chmod(0o666)  # guests run as another user; requests need a key
        except OSError as error:
            where = f"{host}:{port}" if not self._listeners else str(socket)
            await self.stop()
            raise _listen_error(error, where) from error
        # Exempt everything loaded so far from garbage collection: scanning it would stall all calls for 0.2 s.
        gc.freeze()
        self.url = f"http://{host}:{self._listeners[0].sockets[0].getsockname()[1]}"
        self.socket = socket

    def open(self, episode_id: str, *, limits: Limits, seed: int, sampling: Sampling | None = None) -> Session:
        """Open a session for `limits.seconds` from now or `Session.start_clock`.

        `sampling` replaces the gateway's.
        """
        key = secrets.token_hex(16)  # hex: a program would take a key with a leading dash for an option
        endpoint = Endpoint(
            base_url=f"{self.url}/s/{key}/v1",
            api_key=key,
            model=MODEL,
            limits=limits,
            socket=str(self.socket or ""),
        )
        session = self._sessions[key] = Session(
            episode_id,
            endpoint,
            source=self.source,
            workers=self._workers,
            sampling=sampling or self.sampling,
            seed=seed,
            on_turn=self._on_turn,
        )
        return session

    async def close(self, session: Session) -> tuple[Turn, ...]:
        """End a session and return its turns; running calls are aborted and recorded."""
        turns = await session.close()
        self._sessions.pop(session.key, None)
        self._closed[session.key] = None
        if len(self._closed) > REMEMBERED:
            del self._closed[next(iter(self._closed))]
        return turns

    async def stop(self) -> None:
        """Close every session and the server."""
        for session in list(self._sessions.values()):
            await self.close(session)
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for timer in self._keyless.values():
            timer.cancel()
        self._keyless.clear()
        await self._workers.close()

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None and self._runner.server is not None, "the server does not run"
        handler = self._runner.server()
        if len(self._keyless) >= KEYLESS_CONNECTIONS:
            self._close_keyless(next(iter(self._keyless)))
        self._keyless[handler] = asyncio.get_running_loop().call_later(KEY_SECONDS, self._close_keyless, handler)
        return handler

    def _cancel_key_timer(self, request: web.Request) -> None:
        if (timer := self._keyless.pop(request.protocol, None)) is not None:
            timer.cancel()

    def _close_keyless(self, handler: web.RequestHandler) -> None:
        self._keyless.pop(handler).cancel()
        handler.force_close()

    def _find_session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = request.match_info.get("key") or request.headers.get("x-api-key") or bearer
        if session := self._sessions.get(key):
            self._cancel_key_timer(request)
            session.incoming.admit_connection(request.protocol)
            return session
        if key in self._closed:
            raise ApiError(410, "episode_closed", "the episode is over")
        raise ApiError(401, "invalid_api_key", "no such key: use the base URL or the API key of an open episode")

    def _is_keyless_allowed(self, request: web.Request) -> bool:
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        keys = (request.headers.get("x-api-key", ""), bearer)
        return (
            self.keyless_session is not None
            and "key" not in request.match_info
            and not any(_KEY.fullmatch(key) for key in keys)
            and "Origin" not in request.headers
            and _LOCAL.fullmatch(request.host) is not None  # against DNS rebinding by web pages
            and isinstance(peer, tuple)
            and ipaddress.ip_address(peer[0]).is_loopback
        )

    async def _open_session_and_body(
        self, request: web.Request, dialect: Dialect
    ) -> tuple[Session, RequestBody | None]:
        # return the request's session, and its body if the session was chosen by it
        if self.keyless_session is None or not self._is_keyless_allowed(request):
            return self._find_session(request), None
        self._cancel_key_timer(request)
        async with self._keyless_incoming.body(request, dialect.name) as body:
            await asyncio.to_thread(dialect.parse, bytes(body.data))  # a malformed request opens no session
            data = await asyncio.to_thread(json.loads, body.data.decode(errors="replace"))
        session = self.keyless_session(data, bool(dialects.read_retry_count(request)))
        session.incoming.admit_connection(request.protocol)
        return session, body

    def _make_completion_handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session, received = await self._open_session_and_body(request, dialect)
            with _void_on_bug(session):
                with _count_refusals(session):
                    reading = session.incoming.body(request, dialect.name)
                    async with contextlib.nullcontext(received) if received else reading as body:
                        model_request, digest = await session.parse(dialect.name, body), body.digest
                    del body, received  # else they are held until the call ends
                    call = session.admit(model_request, digest, dialects.read_retry_count(request))
                with call.follower():
                    return await dialects.send_reply(request, dialect, model_request, call)

        return handle

    def _make_count_handler(self, counter: Counter) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            keyless = self._is_keyless_allowed(request)
            # without a key, a count is not part of a conversation: its session is closed afterwards
            session = self.open("count", limits=_UNLIMITED, seed=0) if keyless else self._find_session(request)
            incoming = self._keyless_incoming if keyless else session.incoming
            try:
                with _void_on_bug(session), _count_refusals(session):
                    async with incoming.body(request, counter.path) as body:
                        model_request = await session.parse(counter.path, body)
                    return web.json_response(counter.reply(await session.count(model_request)))
            finally:
                if keyless:
                    await self.close(session)

        return handle

    async def _get_response(self, request: web.Request) -> web.Response:
        session = self._find_session(request)
        if request.query.get("stream") == "true":
            raise ApiError(400, "unsupported_value", "a stored response is not streamed", param="stream")
        with _void_on_bug(session):
            return web.json_response(responses.find_response(request.match_info["response"], session.find))

    async def _delete_response(self, request: web.Request) -> web.Response:
        session, response = self._find_session(request), request.match_info["response"]
        with _void_on_bug(session):
            responses.find_response(response, session.find)
            session.forget(responses.read_call_name(response))
            return web.json_response({"id": response, "object": "response", "deleted": True})

    def _require_key(self, request: web.Request) -> None:
        if not self._is_keyless_allowed(request):
            self._find_session(request)

    async def _list_models(self, request: web.Request) -> web.Response:
        self._require_key(request)
        ends = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return web.json_response({"object": "list", "data": [self._model_card(MODEL)], **ends})

    async def _get_model(self, request: web.Request) -> web.Response:
        self._require_key(request)
        return web.json_response(self._model_card(request.match_info["model"]))

    def _model_card(self, name: str) -> dict[str, Any]:
        context = self.source.context
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "coderepairrl",
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
            **({} if context is None else {"max_model_len": context, "max_input_tokens": context}),
        }

    async def _get_health(self, request: web.Request) -> web.Response:
        try:
            await self.source.health()
        except Fault as fault:
            # without details, since sandboxed agents can ask
            raise ApiError(503, f"{fault.boundary}_fault", f"the {fault.boundary} failed") from fault
        return web.json_response({"status": "ok"})


@contextlib.contextmanager
def _count_refusals(session: Session) -> Iterator[None]:
    # count a request; if it is refused, charge the episode's calls for it
    session.count_request()
    try:
        yield
    except ApiError as error:
        session.charge_refusal(error)
        raise


@contextlib.contextmanager
def _void_on_bug(session: Session) -> Iterator[None]:
    # record an exception that no client causes as the session's fault
    try:
        yield
    except (ApiError, web.HTTPException, web.RequestPayloadError, ConnectionError, TimeoutError):
        raise
    except Exception as error:
        session.fault = session.fault or GatewayFault(f"{type(error).__name__}: {error}")
        raise


def _raise_backlog(listener: asyncio.Server) -> asyncio.Server:
    # asyncio accepts up to the original backlog (1) per turn of the event loop; with more, clients that connect and
    # hang up would stall all calls
    for each in listener.sockets:
        with sockets.fromfd(each.fileno(), each.family, each.type) as duplicate:
            duplicate.listen(BACKLOG)
    return listener


def check_socket_free(path: Path) -> None:
    """Raise OSError if a server listens on `path`."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise OSError(errno.EADDRINUSE, "it is in use")


def _listen_error(error: OSError, where: str) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"{where} is in use", fix="choose another one; port 0 takes any that is free")
    return UsageError(f"the gateway cannot listen on {where}: {error.strerror or error}")


class _QuietLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Logs malformed HTTP of clients at debug level, without a traceback."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):  # a client's mistake
            self.debug("bad HTTP: %s", type(exc_info).__name__)
        else:
            super().exception(msg, *args, exc_info=exc_info, **more)


async def _answer_probe(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})
