"""The provider APIs that the gateway speaks."""

from __future__ import annotations

from typing import Any, Protocol

from coderepairrl.gateway import chat, messages, responses
from coderepairrl.gateway.body import EventWriter
from coderepairrl.gateway.call import Call, Completion
from coderepairrl.gateway.request import ApiError, Counter, Request


class Dialect(Protocol):
    """A provider's API: a module with these names (`chat`, `responses`, `messages`)."""

    @property
    def name(self) -> str:
        """Recorded as `Turn.dialect`."""
        ...

    @property
    def path(self) -> str:
        """Path below ``/v1``."""
        ...

    @property
    def counter(self) -> Counter | None:
        """Endpoint that counts tokens, if any."""
        ...

    def parse(self, raw: bytes) -> Request:
        """A body as a request. Raises `ApiError`."""
        ...

    def reply(self, request: Request, call: Call, completion: Completion) -> dict[str, Any]:
        """The response to a plain request."""
        ...

    def writer(self, request: Request, call: Call) -> EventWriter:
        """Writes the events of a streaming response."""
        ...

    def error(self, failure: ApiError) -> dict[str, Any]:
        """The body of an error response."""
        ...


DIALECTS: tuple[Dialect, ...] = (chat, responses, messages)
