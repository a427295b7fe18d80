"""Sources of replies: the policy or another provider's server (`remote`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from coderepairrl.gateway.call import Usage
from coderepairrl.gateway.generation import Generation
from coderepairrl.gateway.request import Request
from coderepairrl.gateway.tree import Placement, Tree, TurnTree
from coderepairrl.gateway.workers import Offload
from coderepairrl.protocols import Engine
from coderepairrl.tokens import Codec, Delta, Reply
from coderepairrl.types import Finish, Sampling, TokenSpan, VersionRange


class Generating(Protocol):
    """One reply being generated."""

    sampling: Sampling
    versions: list[VersionRange]
    out_of_time: bool

    async def run(self, deadline: float, publish: Callable[[list[Delta]], None]) -> None:
        """Sample until the end or `deadline` (loop time). Cancelling aborts.

        Raises a `Fault`, and `ApiError` if refused.
        """
        ...

    def close(self) -> tuple[Reply, list[Delta]]:
        """Return the reply and unpublished deltas."""
        ...

    def spans(self) -> tuple[TokenSpan, TokenSpan]:
        """Output, and dropped tail after a stop string."""
        ...

    @property
    def finish(self) -> Finish:
        """Finish reason, unless aborted."""
        ...

    @property
    def stopped_by(self) -> str:
        """Stop string that ended it, or empty."""
        ...

    @property
    def remote(self) -> Mapping[str, Any]:
        """`Turn.remote`."""
        ...

    @property
    def usage(self) -> Usage:
        """Final token counts."""
        ...


class ReplySource(Protocol):
    """Generates replies."""

    masked: str
    """Reason its tokens cannot be trained on (`Turn.masked`); else empty."""
    counts: bool
    """Whether prompt tokens can be counted before sending."""

    @property
    def context(self) -> int | None:
        """Longest sequence in tokens; None if unknown."""
        ...

    @property
    def codec(self) -> Codec | None:
        """Renders prompts and reads replies; None for a remote."""
        ...

    def tree(self, offload: Offload) -> Tree:
        """Create a session's tree."""
        ...

    def forwarded(self, request: Request) -> Mapping[str, Any]:
        """Client settings (`Request.wishes`) that take effect."""
        ...

    def begin(self, request: Request, placement: Placement, sampling: Sampling, seed: int) -> Generating:
        """Prepare a reply, to be `run`."""
        ...

    async def health(self) -> Mapping[str, float]:
        """Counters, like `Engine.health`. Raises a `Fault` when dead."""
        ...


class PolicySource:
    """An engine with its codec."""

    masked = ""
    counts = True

    def __init__(self, codec: Codec, engine: Engine) -> None:
        self.codec = codec
        self.engine = engine

    @property
    def context(self) -> int:
        """The engine's context length."""
        return self.engine.context

    def tree(self, offload: Offload) -> TurnTree:
        """Create a tree with exact ids."""
        return TurnTree(offload)

    def forwarded(self, request: Request) -> Mapping[str, Any]:
        """None: the run's settings override the client's."""
        return {}

    def begin(self, request: Request, placement: Placement, sampling: Sampling, seed: int) -> Generation:
        """Prepare a generation, adding the request's stop strings."""
        prompt = placement.prompt
        sampling = replace(
            sampling,
            stop_ids=tuple(dict.fromkeys((*self.codec.stop_ids, *sampling.stop_ids))),
            stop=(*sampling.stop, *request.stop),
        )
        reader = self.codec.stream(prompt, request.tools, stop=sampling.stop)
        return Generation(
            self.engine,
            prompt,
            sampling,
            seed,
            reader,
            cached=placement.cached,
            vocab_size=self.codec.vocab_size,
        )

    async def health(self) -> Mapping[str, float]:
        """The engine's counters."""
        return await self.engine.health()
