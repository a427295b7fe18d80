"""A relay between an agent and the model's endpoint: it shows the conversation and keeps the endpoint's key.

Requests pass as they are, but for the settings in `overrides`; replies pass as they come, streams included.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
from aiohttp import web

from coderepairrl.types import Endpoint

MAX_BODY = 64 << 20
_REQUEST_HEADERS = frozenset({"content-type", "accept", "x-stainless-retry-count", "anthropic-version", "openai-beta"})
_RESPONSE_HEADERS = frozenset({"content-type", "x-should-retry", "retry-after"})


class Watcher(Protocol):
    """Who is shown Chat Completions as they pass."""

    def asked(self, messages: list[dict[str, Any]]) -> None:
        """The whole conversation of a request."""
        ...

    def answered(self, message: dict[str, Any]) -> None:
        """The model's reply to it, unless it was streamed."""
        ...


class Relay:
    """Serves `upstream` at an address and under a key of its own, by TCP and by a Unix socket.

    `overrides` replace fields of every request that the model is asked with.
    """

    def __init__(self, upstream: Endpoint, watcher: Watcher, overrides: Mapping[str, Any]) -> None:
        self._upstream = upstream
        self._watcher = watcher
        self._overrides = overrides
        self._key = secrets.token_urlsafe(16)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/s/{key}/v1/{path:.+}", self._pass)
        app.router.add_route("*", "/v1/{path:.+}", self._pass)
        self._folder = tempfile.TemporaryDirectory(prefix="crrl-relay-")
        Path(self._folder.name).chmod(0o711)
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        socket = Path(self._folder.name, "relay.sock")
        await web.UnixSite(self._runner, str(socket)).start()
        socket.chmod(0o666)  # guests run as another user; who gets in without the key gets nothing
        base = f"http://127.0.0.1:{site.port}/s/{self._key}/v1"
        self.endpoint = replace(self._upstream, base_url=base, api_key=self._key, socket=str(socket))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._client.close()
        self._folder.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        given = request.match_info.get("key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given != self._key:
            return _error(401, "no such key")
        raw, path = await request.read(), request.match_info["path"]
        chat = path == "chat/completions"
        if request.method == "POST":
            try:
                body = json.loads(raw)
                raw = json.dumps({**body, **self._overrides}).encode()
                messages = list(body["messages"]) if chat else []
            except (ValueError, TypeError, KeyError) as error:
                return _error(400, f"not a request to a model: {error!r}")
            if chat:
                self._watcher.asked(messages)
        headers = {name: value for name, value in request.headers.items() if name.lower() in _REQUEST_HEADERS}
        headers["Authorization"] = f"Bearer {self._upstream.api_key}"
        url = f"{self._upstream.base_url}/{path}"
        try:
            async with self._client.request(request.method, url, data=raw, headers=headers) as answer:
                return await self._answer(request, answer, chat)
        except aiohttp.ClientError as error:
            return _error(502, f"{self._upstream.base_url} cannot be reached: {error!r}")

    async def _answer(self, request: web.Request, answer: aiohttp.ClientResponse, chat: bool) -> web.StreamResponse:
        headers = {name: value for name, value in answer.headers.items() if name.lower() in _RESPONSE_HEADERS}
        if answer.content_type != "text/event-stream":
            raw = await answer.read()
            if chat and answer.ok:
                self._show(raw)
            return web.Response(status=answer.status, body=raw, headers=headers)
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response

    def _show(self, raw: bytes) -> None:
        try:
            message = json.loads(raw)["choices"][0]["message"]
        except (ValueError, LookupError, TypeError):
            return  # not ours to judge: the agent gets it as it is and says what is wrong
        self._watcher.answered(message)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "relay_error"}}, status=status)
