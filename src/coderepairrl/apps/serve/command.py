"""``crrl serve``: the gateway alone, for external trainers (docs/guides/serve.md)."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl.apps.serve.admin import Admin
from coderepairrl.apps.serve.sessions import Sessions
from coderepairrl.apps.serve.visitors import Visitors
from coderepairrl.errors import UsageError
from coderepairrl.gateway import Gateway
from coderepairrl.plan.model import LocalModel, RemoteModel, ServingPlan, Use
from coderepairrl.plan.plan import resolve_serving
from coderepairrl.plan.replying import replying
from coderepairrl.processes.limits import allow_open_files
from coderepairrl.processes.scratch import scratch
from coderepairrl.processes.signals import stoppable
from coderepairrl.runs import Log, RunFolder
from coderepairrl.types import Sampling, Turn

USE = Use(
    "crrl serve",
    used=(
        *("engine", "model.renderer", "model.thinking", "run.retries"),
        *("rollout.calls", "rollout.tokens", "rollout.seconds", "rollout.turn_tokens", "rollout.temperature"),
        "rollout.side_calls",
    ),
    defaults=("run.name=serve", "rollout.calls=1000", "rollout.seconds=3600", "rollout.tokens=32768"),
)
TOKEN = "CRRL_ADMIN_TOKEN"
"""Environment variable that may hold the token of an admin port."""


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of a server: the gateway on `host`:`port` (0: any free) and the Unix socket `socket`.

    The host's API is on the Unix socket `admin`, or with a token on `admin_port`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    socket: Path | None = None
    admin: Path | None = None
    admin_port: int | None = None
    chat: bool | None = None
    """Whether the gateway answers local clients without a session's key; None: unless others serve the model."""


def resolve(model: str, overrides: Sequence[str] = (), *, log: Path | None = None) -> ServingPlan:
    """Model that `model` names, and its settings; `log`: folder for turns. Raises as `parts.raise_all`."""

    def check_log() -> None:
        if log is not None:
            with _advising():
                RunFolder(log).require_free()

    return resolve_serving(model, overrides, USE, check_log)


async def serve(
    plan: ServingPlan,
    places: Places,
    *,
    log: Path | None = None,
    ready: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    """Serve the model of `plan` until one of `signals.STOPPING`; calls `ready` with the addresses.

    Turns are recorded in the folder `log`. Raises `UsageError` for a taken address or folder, and as `replying`.
    """
    with stoppable() as received:  # from the first moment on: an engine that is being started ends with us
        try:
            await _serve(plan, places, log, ready, say)
        except asyncio.CancelledError:
            if not received:
                raise


async def _serve(
    plan: ServingPlan,
    places: Places,
    log: Path | None,
    ready: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    config = plan.config
    allow_open_files()
    async with AsyncExitStack() as parts:
        home = parts.enter_context(scratch("serve"))
        record = _recorder(parts, log, plan)
        source = await parts.enter_async_context(replying(plan, log / "logs" if log else home))
        if isinstance(plan.model, LocalModel):
            for fork in plan.model.forks:
                say(f"token ids cannot be extended exactly, so conversations will fork: {fork}")
        rollout = config.rollout
        sampling = Sampling(temperature=rollout.temperature, max_tokens=rollout.turn_tokens)

        def on_turn(episode: str, turn: Turn) -> None:
            if record is not None:
                record.append("turn", episode=episode, turn=turn)

        server = Gateway(source, sampling=sampling, on_turn=on_turn)
        parts.push_async_callback(server.stop)
        await server.start(places.host, places.port, places.socket)
        if places.socket is not None:
            parts.callback(places.socket.unlink, missing_ok=True)
        sessions = Sessions(server, plan.limits, record, side_calls=rollout.side_calls)
        chat = not isinstance(plan.model, RemoteModel) if places.chat is None else places.chat
        if chat:
            server.keyless_session = Visitors(sessions)
        parts.push_async_callback(sessions.close_all)
        by_port = places.admin_port is not None
        token = (os.environ.get(TOKEN) or secrets.token_urlsafe(24)) if by_port else ""
        host_only = Admin(sessions, source, token)
        parts.push_async_callback(host_only.stop)
        address = places.admin or home / "admin.sock"
        where = await host_only.start(socket=None if by_port else address, port=places.admin_port)
        if not by_port:
            parts.callback(address.unlink, missing_ok=True)
        addresses = {"gateway": server.url, "socket": str(places.socket or ""), "admin": where, "token": token}
        addresses |= {"chat": f"{server.url}/v1" if chat else "", "model": plan.model.name, "log": str(log or "")}
        ready({name: value for name, value in addresses.items() if value})
        try:
            await asyncio.Event().wait()
        finally:
            say("stopping: open sessions are closed")


def _recorder(parts: AsyncExitStack, folder: Path | None, plan: ServingPlan) -> Log | None:
    if folder is None:
        return None
    run = RunFolder(folder)
    versions = plan.model.engine.versions() if isinstance(plan.model, LocalModel) else {}
    with _advising():
        run.create(configs.to_toml(plan.config), {"command": "serve", "model": plan.model.name}, versions)
    log = run.writer()
    parts.callback(log.close)
    return log


@contextmanager
def _advising() -> Iterator[None]:
    """Suggest another ``--log`` for errors of its folder."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error), fix="name another folder with --log") from None
