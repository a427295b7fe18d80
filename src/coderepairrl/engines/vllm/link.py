"""Calls to a vLLM server that remember whether it died."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from coderepairrl.engines.vllm.server import Gone, Query, VllmServer
from coderepairrl.errors import EngineFault


class Link:
    """A server and its death: a dead one stays dead, and another engine starts another server."""

    def __init__(self, server: VllmServer, patience: float) -> None:
        self.server = server
        self.patience = patience
        """Seconds without an answer after which the server counts as hung."""
        self.on_death: Callable[[], None] = lambda: None
        """Called when it is marked as dead; whose server it is sets it."""
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

    async def models(self) -> tuple[dict[str, Any], list[str]]:
        """The server's model as it reports it (``id``, ``max_model_len``, ``root``), under the first of its names, and
        the names of its adapters, of others' too. Raises `EngineFault` for an answer that is not vLLM's."""
        answer = await self.call("GET", "/v1/models")
        try:
            cards = json.loads(answer)["data"]
            adapters = [str(card["id"]) for card in cards if card.get("parent")]
            return next(card for card in cards if not card.get("parent")), adapters
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            raise EngineFault(f"{self.server.where}/v1/models answered what is not vLLM's: {error!r}") from None

    def die(self, why: str) -> None:
        """Mark the server as dead; the first reason is kept."""
        self._dead = self._dead or why
        self.on_death()

    @property
    def alive(self) -> bool:
        """Whether it is not known to be dead."""
        return self._dead is None

    def require_alive(self) -> None:
        """Raise `EngineFault` with the reason of a death."""
        if self._dead is not None:
            raise EngineFault(self._dead)
