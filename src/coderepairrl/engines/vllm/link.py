"""Calls to a vLLM server that remember whether it died."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coderepairrl.engines.vllm.server import Gone, Query, VllmServer
from coderepairrl.errors import EngineFault


class Link:
    """A server and its death: a dead one stays dead, and another engine starts another server."""

    def __init__(self, server: VllmServer, patience: float) -> None:
        self.server = server
        self.patience = patience
        """Seconds without an answer after which the server counts as hung."""
        self._dead: str | None = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Query | None = None,
        seconds: float = 0.0,
    ) -> str:
        """The answer's body, within `seconds` (`patience` if 0). Raises `Refused`, and `Gone` for a dead server."""
        try:
            return await self.server.call(method, path, seconds=seconds or self.patience, body=body, query=query)
        except Gone as fault:
            self.die(str(fault))
            raise

    async def post(self, path: str, *, body: Mapping[str, Any] | None = None, query: Query | None = None) -> str:
        """POST to a server that is not known to be dead. Raises `EngineFault` otherwise."""
        self.require_alive()
        return await self.call("POST", path, body=body, query=query)

    def die(self, why: str) -> None:
        """Mark the server as dead; the first reason is kept."""
        self._dead = self._dead or why

    @property
    def alive(self) -> bool:
        """Whether it is not known to be dead."""
        return self._dead is None

    def require_alive(self) -> None:
        """Raise `EngineFault` with the reason of a death."""
        if self._dead is not None:
            raise EngineFault(self._dead)
