"""The provider APIs that the gateway speaks."""

from __future__ import annotations

from typing import Any, Protocol

from coderepairrl.gateway import chat, messages, responses
from coderepairrl.gateway.body import EventWriter
from coderepairrl.gateway.call import Call, Completion
from coderepairrl.gateway.request import ApiError, Counter, Request


class Dialect(Protocol):
    """A module with these names (`chat`, `responses`, `messages`)."""

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
        """Token-counting endpoint, if any."""
        ...

    def parse(self, raw: bytes) -> Request:
        """Parse a request body. Raises `ApiError`."""
        ...

    def reply(self, request: Request, call: Call, completion: Completion) -> dict[str, Any]:
        """Build a plain response."""
        ...

    def writer(self, request: Request, call: Call) -> EventWriter:
        """Create the writer of a stream."""
        ...

    def error(self, failure: ApiError) -> dict[str, Any]:
        """Build an error body."""
        ...


DIALECTS: tuple[Dialect, ...] = (chat, responses, messages)
