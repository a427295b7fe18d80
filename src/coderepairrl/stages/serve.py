"""``crrl serve``: the gateway alone, for external trainers, and an API for its host (docs/guides/serve.md)."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coderepairrl import config as configs
from coderepairrl.errors import CodeRepairError, EngineFault, Fault, UsageError
from coderepairrl.gateway import Gateway, PolicySource, ReplySource
from coderepairrl.gateway.server import check_socket_free
from coderepairrl.plan import resolve_serving
from coderepairrl.plan.model import LocalModel, ModelCommand, RemoteModel, ServingPlan
from coderepairrl.plan.serving import open_model
from coderepairrl.processes.scratch import scratch
from coderepairrl.processes.signals import raise_open_file_limit
from coderepairrl.protocols import Engine
from coderepairrl.runs import Log, RunFolder
from coderepairrl.stages.sessions import KeylessSessions, SessionRequest, Sessions
from coderepairrl.types import Sampling, Turn

SERVING = ModelCommand(
    "crrl serve",
    used=(
        *("engine", "model.thinking", "run.retries"),
        *("rollout.calls", "rollout.tokens", "rollout.seconds", "rollout.turn_tokens", "rollout.temperature"),
        "rollout.side_calls",
    ),
    defaults=("run.name=serve", "rollout.calls=1000", "rollout.seconds=3600", "rollout.tokens=32768"),
)
TOKEN_VARIABLE = "CRRL_ADMIN_TOKEN"
"""Environment variable that may hold the token for `admin_port`, else random."""


def plan_server(model: str, overrides: Sequence[str] = (), *, log: Path | None = None) -> ServingPlan:
    """Plan to serve `model`; `log` is a folder for turns. Raises as `parts.raise_errors`."""

    def check_log() -> None:
        if log is not None:
            with _suggest_other_log():
                RunFolder(log).require_free()

    return resolve_serving(model, overrides, SERVING, check_log)


async def serve_model(
    plan: ServingPlan,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    socket: Path | None = None,
    admin: Path | None = None,
    admin_port: int | None = None,
    chat: bool | None = None,
    log: Path | None = None,
    ready: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    """Serve the model of `plan` until cancelled; calls `ready` with the addresses.

    The gateway is on `host`:`port` (0: any free) and the Unix socket `socket`, the host's API on the Unix socket
    `admin`, or with a token on `admin_port`. With `chat` (default: if the model is served here) the gateway answers
    local clients without a session's key. Turns are recorded in the folder `log`. Raises `UsageError` for a taken
    address or folder, and as `open_model`.
    """
    raise_open_file_limit()
    async with AsyncExitStack() as stack:
        home = stack.enter_context(scratch("serve"))
        turn_log = _open_log(stack, log, plan)
        source = await stack.enter_async_context(open_model(plan, log / "logs" if log else home))
        if isinstance(plan.model, LocalModel):
            for fork in plan.model.forks:
                say(f"token ids cannot be extended exactly, so conversations will fork: {fork}")
        rollout = plan.config.rollout
        sampling = Sampling(temperature=rollout.temperature, max_tokens=rollout.turn_tokens)

        def on_turn(episode: str, turn: Turn) -> None:
            if turn_log is not None:
                turn_log.append("turn", episode=episode, turn=turn)

        gateway = Gateway(source, sampling=sampling, on_turn=on_turn)
        stack.push_async_callback(gateway.stop)
        await gateway.start(host, port, socket)
        if socket is not None:
            stack.callback(socket.unlink, missing_ok=True)
        sessions = Sessions(gateway, plan.limits, turn_log, side_calls=rollout.side_calls)
        chat = not isinstance(plan.model, RemoteModel) if chat is None else chat
        if chat:
            gateway.keyless_session = KeylessSessions(sessions)
        stack.push_async_callback(sessions.close_all)
        admin_socket = None if admin_port is not None else admin or home / "admin.sock"
        token = "" if admin_port is None else os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        admin_server = AdminServer(sessions, source, token)
        stack.push_async_callback(admin_server.stop)
        admin_address = await admin_server.start(socket=admin_socket, port=admin_port)
        if admin_socket is not None:
            stack.callback(admin_socket.unlink, missing_ok=True)
        addresses = {"gateway": gateway.url, "socket": str(socket or ""), "admin": admin_address, "token": token}
        addresses |= {"chat": f"{gateway.url}/v1" if chat else "", "model": plan.model.name, "log": str(log or "")}
        ready({name: value for name, value in addresses.items() if value})
        try:
            await asyncio.Event().wait()
        finally:
            say("stopping: open sessions are closed")


def _open_log(stack: AsyncExitStack, folder: Path | None, plan: ServingPlan) -> Log | None:
    if folder is None:
        return None
    run = RunFolder(folder)
    versions = plan.model.engine.require(plan.model.needs, connect=True) if isinstance(plan.model, LocalModel) else {}
    with _suggest_other_log():
        run.create(configs.to_toml(plan.config), {"command": "serve", "model": plan.model.name}, versions)
    log = run.writer()
    stack.callback(log.close)
    return log


@contextmanager
def _suggest_other_log() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error), fix="name another folder with --log") from None


Model = TypeVar("Model", bound=BaseModel)
_LOOPBACK = "127.0.0.1"
_MAX_BODY = 1 << 20  # bytes of a request; valid ones are far smaller


class _WeightsRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    path: str
    version: int = Field(ge=1)
    checksum: str = Field(pattern="^[0-9a-f]{64}$")


class _RequestRejected(Exception):
    def __init__(self, status: int, code: str, message: str, fix: str = "") -> None:
        super().__init__(status, code, message, fix)


class AdminServer:
    """HTTP server for `sessions` and the weights of `source`.

    With a `token`, requests need ``Authorization: Bearer TOKEN``.
    """

    def __init__(self, sessions: Sessions, source: ReplySource, token: str = "") -> None:
        self._sessions = sessions
        self._source = source
        self._token = token
        self._version = 0
        """Version of the engine's weights; a restarted engine loads them again."""
        self._loading = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self, *, socket: Path | None = None, port: int | None = None) -> str:
        """Listen on a Unix socket, open to its owner only, or on `port` of the loopback; returns the address.

        Raises `UsageError` if that is taken, `EngineFault` if the engine is dead.
        """
        if isinstance(self._source, PolicySource):
            self._version = int((await self._source.engine.health())["version"])  # 1 if it began with adapters
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/sessions", self._open_session),
                web.get("/sessions", self._list_sessions),
                web.get("/sessions/{id}", self._describe_session),
                web.delete("/sessions/{id}", self._close_session),
                web.get("/weights", self._describe_weights),
                web.post("/weights", self._load_weights),
                web.get("/health", self._report_health),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            if socket is None:
                site = web.TCPSite(self._runner, _LOOPBACK, port or 0)
                await site.start()
                return f"http://{_LOOPBACK}:{site.port}"
            check_socket_free(socket)
            before = os.umask(0o177)  # private from the moment of its creation
            try:
                await web.UnixSite(self._runner, str(socket)).start()
            finally:
                os.umask(before)
            return f"unix:{socket}"
        except OSError as error:
            await self._runner.cleanup()
            where = socket or f"{_LOOPBACK}:{port}"
            raise UsageError(
                f"cannot listen on {where}: {error.strerror or error}", fix="choose another --admin or --admin-port"
            ) from error

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token; turn errors into JSON."""
        try:
            header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if self._token and not hmac.compare_digest(header.removeprefix(b"Bearer "), self._token.encode()):
                raise _RequestRejected(401, "unauthorized", "the token is missing or wrong")
            return await handler(request)
        except _RequestRejected as rejection:
            status, code, message, fix = rejection.args
        except web.HTTPException as error:
            code = "not_found" if error.status == 404 else "invalid_request"
            status, message, fix = error.status, error.reason, ""
        except CodeRepairError as error:
            code = f"{error.boundary}_fault" if isinstance(error, Fault) else "failed"
            status, message, fix = 503, str(error), error.fix
        return web.json_response({"error": {"code": code, "message": message, "fix": fix}}, status=status)

    async def _open_session(self, request: web.Request) -> web.Response:
        body = await _parse_body(request, SessionRequest)
        if body.id and body.id in self._sessions:
            raise _RequestRejected(
                409, "exists", f"there is an open session {body.id!r}", "close it, or choose another id"
            )
        return web.json_response(self._sessions.open(body), status=201)

    async def _list_sessions(self, request: web.Request) -> web.Response:
        return web.json_response({"sessions": self._sessions.summary()})

    async def _describe_session(self, request: web.Request) -> web.Response:
        return await _json_response(await self._sessions.describe(self._get_session_name(request)))

    async def _close_session(self, request: web.Request) -> web.Response:
        return await _json_response(await self._sessions.close(self._get_session_name(request)))

    def _get_session_name(self, request: web.Request) -> str:
        name = request.match_info["id"]
        if name not in self._sessions:
            raise _RequestRejected(404, "not_found", f"there is no open session {name!r}", "GET /sessions lists them")
        return name

    async def _describe_weights(self, request: web.Request) -> web.Response:
        if not isinstance(self._source, PolicySource):
            return web.json_response({"version": None, "loadable": False})
        return web.json_response({"version": self._version, "loadable": True})

    async def _load_weights(self, request: web.Request) -> web.Response:
        if not isinstance(self._source, PolicySource):
            raise _RequestRejected(
                409, "not_loadable", "another server serves the model: its weights cannot change here"
            )
        body, engine = await _parse_body(request, _WeightsRequest), self._source.engine
        async with self._loading:
            if body.version <= self._version:
                raise _RequestRejected(409, "old_version", f"version {self._version} is served; send a higher one")
            try:
                self._version = await engine.load(Path(body.path), body.version, body.checksum)
            except EngineFault as fault:
                if not await _is_alive(engine):
                    raise
                raise _RequestRejected(422, "refused", f"{fault}", "the previous weights stay in use") from fault
        return web.json_response({"version": self._version, "loadable": True})

    async def _report_health(self, request: web.Request) -> web.Response:
        return web.json_response(dict(await self._source.health()))


async def _is_alive(engine: Engine) -> bool:
    try:
        await engine.health()
    except EngineFault:
        return False
    return True


async def _json_response(session: dict[str, Any]) -> web.Response:
    """Encode in a thread: a long session is megabytes, and agents wait."""
    return web.Response(text=await asyncio.to_thread(json.dumps, session), content_type="application/json")


async def _parse_body(request: web.Request, model: type[Model]) -> Model:
    try:
        return model.model_validate_json(await request.read() or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise _RequestRejected(400, "invalid_value", message, "docs/guides/serve.md lists the fields") from error
