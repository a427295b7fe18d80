"""The gateway: an HTTP server that looks like a model provider and records what the policy saw and said."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import json
import logging
import re
import resource
import secrets
import socket as sockets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from coderepairrl.errors import Fault, GatewayFault, UsageError
from coderepairrl.gateway import chat, messages, responses
from coderepairrl.gateway.body import stream
from coderepairrl.gateway.call import Call
from coderepairrl.gateway.dialects import DIALECTS, Dialect
from coderepairrl.gateway.incoming import LARGE, Body, Incoming
from coderepairrl.gateway.request import ApiError, Counter, Request
from coderepairrl.gateway.session import OnTurn, Session
from coderepairrl.gateway.source import Policy, Source
from coderepairrl.gateway.workers import Workers
from coderepairrl.printable import printable
from coderepairrl.protocols import Engine
from coderepairrl.tokens import Codec
from coderepairrl.types import Endpoint, HistoryPolicy, Limits, Sampling, Turn

HEARTBEAT = 10.0
"""Seconds of silence after which a response says that it is alive."""
STRANGERS = 512
"""Connections that have not shown a key yet: of more, the oldest are closed."""
STRANGE_SECONDS = 10.0
"""How long one may do without."""
OPEN_FILES = 1 << 16
"""That this process may have, as far as the system lets it: a connection is one."""
REMEMBERED = 1 << 16
"""Keys of closed sessions that are told from made-up ones."""
CLOSING = 408, 410, 413, 429
"""Statuses after which a connection is closed: what else is on its way there is of no use."""
_NO_RETRY = {"x-should-retry": "false"}

log = logging.getLogger(__name__)


class _Quiet(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Bytes that are no HTTP are their sender's mistake: a line at level debug, not a traceback."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        """As `Logger.exception`, unless the bytes were at fault."""
        if isinstance(exc_info, HttpProcessingError):
            self.debug("bad HTTP: %s", type(exc_info).__name__)
        else:
            super().exception(msg, *args, exc_info=exc_info, **more)


Visit = Callable[[Mapping[str, Any], bool], Session]
"""The session of a request without a key, by its body and whether its client says that it sent it before."""
_KEY = re.compile("[0-9a-f]{32}")
_LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)


class Server:
    """Serves sessions over HTTP, by TCP and by a Unix socket; `source` is who replies in them.

    A session's key is 128 random bits, in the base URL (``/s/KEY/v1``) or as API key (``/v1``). `sampling` is the
    run's and overrides its clients'; `on_turn` is awaited with every turn before its client learns of its end. The
    model is called `model_name`, and answers to every other name, too, or to those of `accept` if there are any.
    With `visit` set, who comes over the loopback without a session's key is let into the session that it chooses.

        server = Server(source, sampling=Sampling(), on_turn=record)
        await server.start()
        session = server.open("episode", limits=Limits(), seed=7)
        ...  # an agent talks to session.endpoint
        turns = await server.close(session)
        await server.stop()
    """

    def __init__(
        self,
        source: Source,
        *,
        sampling: Sampling,
        on_turn: OnTurn,
        model_name: str = "policy",
        accept: Collection[str] = (),
    ) -> None:
        self.source = source
        self.sampling = sampling
        self.model_name = model_name
        self.accept = frozenset(accept)
        self.url = ""
        self.socket: Path | None = None
        self.visit: Visit | None = None
        self._visiting = Incoming(LARGE)  # they are read here, and all sessions wait meanwhile
        self._on_turn = on_turn
        self._sessions: dict[str, Session] = {}
        self._closed: dict[str, None] = {}
        self._runner: web.AppRunner | None = None
        self._doors: list[asyncio.Server] = []
        self._strangers: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._workers = Workers()

    async def start(self, host: str = "127.0.0.1", port: int = 0, socket: Path | None = None) -> None:
        """Listen on `host`:`port` (0: any free one) and on `socket`. Raises `UsageError` when one is taken."""
        app = web.Application(middlewares=[_errors])
        for prefix in ("", "/s/{key}"):
            for dialect in DIALECTS:
                app.router.add_post(f"{prefix}/v1{dialect.path}", self._completion(dialect))
                if dialect.counter is not None:
                    app.router.add_post(f"{prefix}/v1{dialect.counter.path}", self._count(dialect.counter))
            app.router.add_get(f"{prefix}/v1/responses/{{response:resp_[^/]+}}", self._stored)
            app.router.add_delete(f"{prefix}/v1/responses/{{response:resp_[^/]+}}", self._delete)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)
            for root in {f"{prefix}/", prefix or "/", f"{prefix}/v1"}:
                app.router.add_get(root, _present)
        app.router.add_get("/health", self._health)
        # a handler is cancelled when its client goes away: that is how a disconnect reaches the engine
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_Quiet(log, {})
        )
        await self._runner.setup()
        _allow_connections()
        loop = asyncio.get_running_loop()
        try:
            self._doors.append(await loop.create_server(self._greet, host, port, backlog=1024))
            if socket is not None:
                check_free(socket)
                socket.unlink(missing_ok=True)
                self._doors.append(await loop.create_unix_server(self._greet, str(socket), backlog=1024))
                socket.chmod(0o666)  # guests run as another user; who gets in without a key gets nothing
        except OSError as error:
            where = f"{host}:{port}" if not self._doors else str(socket)
            await self.stop()
            raise _cannot_listen(error, where) from error
        # What is there by now stays: scanning it for garbage again and again would stall every call for 0.2 s.
        gc.freeze()
        self.url = f"http://{host}:{self._doors[0].sockets[0].getsockname()[1]}"
        self.socket = socket

    def open(self, episode_id: str, *, limits: Limits, seed: int, sampling: Sampling | None = None) -> Session:
        """A session for an episode, from now on and for `limits.seconds`; `sampling` may replace the gateway's."""
        key = secrets.token_hex(16)  # no key may begin with a dash: programs are given theirs as an argument
        endpoint = Endpoint(
            base_url=f"{self.url}/s/{key}/v1",
            api_key=key,
            model=self.model_name,
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
        """End a session: running calls are aborted and recorded, later ones refused; all its turns."""
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
        for door in self._doors:
            door.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for timer in self._strangers.values():
            timer.cancel()
        self._strangers.clear()
        await self._workers.close()

    def _greet(self) -> asyncio.Protocol:
        """A new connection, which has some seconds to show a key: one that sends half a line forever is closed."""
        if self._runner is None or self._runner.server is None:
            raise AssertionError("the server does not run")
        handler = self._runner.server()
        if len(self._strangers) >= STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        later = asyncio.get_running_loop().call_later(STRANGE_SECONDS, self._dismiss, handler)
        self._strangers[handler] = later
        return handler

    def _dismiss(self, handler: asyncio.BaseProtocol) -> None:
        self._strangers.pop(handler).cancel()
        if isinstance(handler, web.RequestHandler):
            handler.force_close()

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = request.match_info.get("key") or request.headers.get("x-api-key") or bearer
        if session := self._sessions.get(key):
            if (timer := self._strangers.pop(request.protocol, None)) is not None:
                timer.cancel()
            session.incoming.greet(request.protocol)
            return session
        if key in self._closed:
            raise ApiError(410, "episode_closed", "the episode is over")
        raise ApiError(401, "invalid_api_key", "no such key: use the base URL or the API key of an open episode")

    def _visits(self, request: web.Request) -> bool:
        """Whether it comes from this machine, from no web page, and with nothing that looks like a session's key."""
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        keys = (request.headers.get("x-api-key", ""), bearer)
        return (
            self.visit is not None
            and "key" not in request.match_info
            and not any(_KEY.fullmatch(key) for key in keys)
            and "Origin" not in request.headers
            and _LOCAL.fullmatch(request.host) is not None  # a web page can let its own name lead here
            and isinstance(peer, tuple)
            and ipaddress.ip_address(peer[0]).is_loopback
        )

    async def _enter(self, request: web.Request, dialect: Dialect) -> tuple[Session, Body | None]:
        """The session of a call, and its body if that had to be read to know it.

        Who has no key gets a session only for what would be answered.
        """
        if self.visit is None or not self._visits(request):
            return self._session(request), None
        if (timer := self._strangers.pop(request.protocol, None)) is not None:
            timer.cancel()
        body = await self._visiting.body(request, dialect.name)
        self._known((await asyncio.to_thread(dialect.parse, body.whole())).model)
        data = await asyncio.to_thread(json.loads, body.whole())
        session = self.visit(data, bool(_retry_count(request)))
        session.incoming.greet(request.protocol)
        return session, body

    def _completion(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session, body = await self._enter(request, dialect)
            with _ours(session):
                with _charged(session):
                    body = body or await session.incoming.body(request, dialect.name)
                    asked = await session.read(dialect.name, body)
                    self._known(asked.model)
                    asked = responses.recalled(asked, session.find) if asked.unread else asked
                    call = session.admit(asked, body.digest, _retry_count(request))
                with call.follower():
                    return await (_stream if asked.stream else _plain)(request, dialect, asked, call)

        return handle

    def _count(self, counter: Counter) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            with _ours(session), _charged(session):
                asked = await session.read(counter.path, await session.incoming.body(request, counter.path))
                self._known(asked.model)
                asked = responses.recalled(asked, session.find) if asked.unread else asked
                return web.json_response(counter.reply(await session.count(asked)))

        return handle

    def _known(self, model: str) -> None:
        if self.accept and model not in self.accept and model != self.model_name:
            there = ", ".join(sorted(self.accept | {self.model_name}))
            raise ApiError(404, "model_not_found", f"the model {model} does not exist; there is {there}", param="model")

    async def _stored(self, request: web.Request) -> web.Response:
        """A response once more, as long as its client has not deleted it or asked not to store it."""
        session = self._session(request)
        if request.query.get("stream") == "true":
            raise ApiError(400, "unsupported_value", "a stored response is not streamed", param="stream")
        with _ours(session):
            return web.json_response(responses.stored(request.match_info["response"], session.find))

    async def _delete(self, request: web.Request) -> web.Response:
        session, response = self._session(request), request.match_info["response"]
        with _ours(session):
            responses.stored(response, session.find)
            session.forget(responses.response_name(response))
            return web.json_response(responses.deleted(response))

    async def _models(self, request: web.Request) -> web.Response:
        if not self._visits(request):
            self._session(request)
        names = [self.model_name, *sorted(self.accept - {self.model_name})]
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return web.json_response({"object": "list", "data": [self._card(name) for name in names], **ends})

    async def _model(self, request: web.Request) -> web.Response:
        if not self._visits(request):
            self._session(request)
        self._known(request.match_info["model"])
        return web.json_response(self._card(request.match_info["model"]))

    def _card(self, name: str) -> dict[str, Any]:
        """The model by one of its names, as the clients of every provider know models."""
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

    async def _health(self, request: web.Request) -> web.Response:
        """Whether the engine is alive, and no more: agents in sandboxes may ask."""
        try:
            await self.source.health()
        except Fault as fault:
            raise ApiError(503, f"{fault.boundary}_fault", f"the {fault.boundary} failed") from fault
        return web.json_response({"status": "ok"})


class Gateway(Server):
    """The server in front of the policy; `history_policy` is docs/reference/gateway.md's."""

    source: Policy

    def __init__(
        self,
        codec: Codec,
        engine: Engine,
        *,
        sampling: Sampling,
        on_turn: OnTurn,
        model_name: str = "policy",
        accept: Collection[str] = (),
        history_policy: HistoryPolicy = "splice",
    ) -> None:
        policy = Policy(codec, engine, history_policy)
        super().__init__(policy, sampling=sampling, on_turn=on_turn, model_name=model_name, accept=accept)


def _allow_connections() -> None:
    """Open files for those of `OPEN_FILES` connections, where shells begin with 1,024: else a few agents that hold all
    that they may have would be all that the machine can have."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _present(request: web.Request) -> web.Response:
    """For clients that look whether a server is there before they ask it anything."""
    return web.json_response({"status": "ok"})


async def _plain(request: web.Request, dialect: Dialect, asked: Request, call: Call) -> web.StreamResponse:
    """Blanks, which JSON may begin with, say that it is alive.

    By then the status is sent: a failure breaks the connection, and the client's retry is told of it.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    while not await call.ends(within=HEARTBEAT):
        if not response.prepared:
            await response.prepare(request)
        await response.write(b" ")
    try:
        body = json.dumps(dialect.reply(asked, call, await call.result())).encode()
    except ApiError:
        if response.prepared and request.transport is not None:
            request.transport.abort()
            return response
        raise
    if not response.prepared:
        response.content_length = len(body)
        await response.prepare(request)
    await response.write_eof(body)
    call.delivered = True
    return response


async def _stream(request: web.Request, dialect: Dialect, asked: Request, call: Call) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async for events in stream(dialect.tell(asked, call), call, HEARTBEAT):
        if not response.prepared:
            await response.prepare(request)
        await response.write(events)
    call.delivered = True
    await response.write_eof()
    return response


def _retry_count(request: web.Request) -> int | None:
    """How often the client's SDK says that it has sent this request before."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if count.isdecimal() and len(count) < 10 else None


@contextlib.contextmanager
def _charged(session: Session) -> Iterator[None]:
    """A refusal is counted as a call. A session with none left is refused before anything is read."""
    session.check_requests()
    try:
        yield
    except ApiError as error:
        session.refused(error)
        raise


@contextlib.contextmanager
def _ours(session: Session) -> Iterator[None]:
    """What is raised in here, but for refusals and broken connections, is our own fault, and voids the episode."""
    try:
        yield
    except (ApiError, web.HTTPException, web.RequestPayloadError, ConnectionError, TimeoutError):
        raise
    except Exception as error:
        session.fault = session.fault or GatewayFault(f"{type(error).__name__}: {error}")
        raise


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every refusal in the client's dialect."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(request, error)
    except web.RequestPayloadError:
        request.content.feed_eof()  # or aiohttp would read on, for manners
        failure = ApiError(400, "invalid_body", "the body is not in the encoding that its headers name")
    except web.HTTPException as error:
        failure = ApiError(error.status, "not_found" if error.status == 404 else "invalid_request", error.reason)
    except ConnectionError:  # the client went away
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=499)  # which nobody gets
    except TimeoutError:
        raise
    except Exception:
        log.exception("%s %s", request.method, printable(request.path))
        failure = ApiError(500, "gateway_fault", "the gateway failed")
    return _error_response(request, failure)


def _error_response(request: web.Request, failure: ApiError) -> web.Response:
    response = web.json_response(_dialect(request).error(failure), status=failure.status, headers=_NO_RETRY)
    if failure.code in ("invalid_body", "episode_limit_reached") or failure.status in CLOSING:
        response.force_close()  # where the next request begins is unknown, or of no interest
    return response


def _dialect(request: web.Request) -> Dialect:
    """Whose errors a client understands: by its path, and where all share one, by its headers."""
    parts = request.path.split("/")
    if "messages" in parts or "anthropic-version" in request.headers:
        return messages
    return responses if "responses" in parts else chat


def check_free(path: Path) -> None:
    """A socket of a server that lives is not taken away from it. Raises OSError."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise OSError(errno.EADDRINUSE, "it is in use")


def _cannot_listen(error: OSError, where: str) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"{where} is in use", fix="choose another one; port 0 takes any that is free")
    return UsageError(f"the gateway cannot listen on {where}: {error.strerror or error}")
