"""The APIs of providers that the gateway speaks."""

from __future__ import annotations

from typing import Any, Protocol

from coderepairrl.gateway import chat, messages, responses
from coderepairrl.gateway.body import Telling
from coderepairrl.gateway.call import Call, Outcome
from coderepairrl.gateway.request import ApiError, Counter, Request


class Dialect(Protocol):
    """A provider's API: a module with these names (`chat`, `responses`, `messages`)."""

    @property
    def name(self) -> str:
        """What `Turn.dialect` says."""
        ...

    @property
    def path(self) -> str:
        """Where it is served, below ``/v1``."""
        ...

    @property
    def counter(self) -> Counter | None:
        """Its way to count tokens, if it has one."""
        ...

    def parse(self, raw: bytes) -> Request:
        """A body as a request. Raises `ApiError`."""
        ...

    def reply(self, request: Request, call: Call, outcome: Outcome) -> dict[str, Any]:
        """The response to a plain request."""
        ...

    def tell(self, request: Request, call: Call) -> Telling:
        """The response to a streaming request."""
        ...

    def error(self, failure: ApiError) -> dict[str, Any]:
        """An error in its shape."""
        ...


DIALECTS: tuple[Dialect, ...] = (chat, responses, messages)
