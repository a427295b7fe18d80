"""Calls to a vLLM server, and whether it lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coderepairrl.engines.vllm.server import Gone, Server
from coderepairrl.errors import EngineFault


class Link:
    """A server, asked until it dies. A dead one stays dead: another engine starts another server."""

    def __init__(self, server: Server, patience: float) -> None:
        self.server = server
        self.patience = patience
        """Seconds after which an answer that does not come is taken for a hang."""
        self._dead: str | None = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        seconds: float = 0.0,
    ) -> str:
        """The answer's body, within `seconds` (`patience` if 0). Raises `Refused`, and `Gone` for a dead server."""
        try:
            return await self.server.call(method, path, seconds=seconds or self.patience, body=body, query=query)
        except Gone as fault:
            self.die(str(fault))
            raise

    async def post(
        self, path: str, *, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> str:
        """`call` of a server that is known to live. Raises `EngineFault` for another."""
        self.require_alive()
        return await self.call("POST", path, body=body, query=query)

    def die(self, why: str) -> None:
        """Take the server for dead; the first reason stays."""
        self._dead = self._dead or why

    def require_alive(self) -> None:
        """Raise `EngineFault` with the reason of a death."""
        if self._dead is not None:
            raise EngineFault(self._dead)
