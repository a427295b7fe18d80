"""Where a session's replies come from: the policy, token by token, or somebody else's server (`remote`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from coderepairrl.gateway.call import Usage
from coderepairrl.gateway.generation import Generation
from coderepairrl.gateway.request import Request
from coderepairrl.gateway.tree import Placement, Tree, TurnTree
from coderepairrl.gateway.workers import Desk
from coderepairrl.protocols import Engine
from coderepairrl.tokens import Codec, Delta, Reply
from coderepairrl.types import Finish, HistoryPolicy, Sampling, TokenSpan, VersionRange


class Generating(Protocol):
    """One reply on its way."""

    sampling: Sampling
    """As it was really asked for."""
    versions: list[VersionRange]
    out_of_time: bool

    async def run(self, deadline: float, publish: Callable[[list[Delta]], None]) -> None:
        """Sample to the end or until `deadline` (loop time). Cancelling aborts.

        Raises a `Fault`, and `ApiError` for a request that the engine or the remote refuses.
        """
        ...

    def close(self) -> tuple[Reply, list[Delta]]:
        """The whole reply, and what of it was not published yet."""
        ...

    def spans(self) -> tuple[TokenSpan, TokenSpan]:
        """The output, and the tail after a stop string."""
        ...

    @property
    def finish(self) -> Finish:
        """How it ended, unless it was aborted."""
        ...

    @property
    def stopped_by(self) -> str:
        """The stop string that ended it, if one did."""
        ...

    @property
    def remote(self) -> Mapping[str, Any]:
        """`Turn.remote`."""
        ...

    @property
    def usage(self) -> Usage:
        """What it took, known at the end."""
        ...


class Source(Protocol):
    """Who replies in a gateway's sessions."""

    masked: str
    """Why none of its tokens can be trained on; empty if they can."""
    counts: bool
    """Whether the tokens of a prompt are known before it is sent."""

    @property
    def context(self) -> int | None:
        """Longest sequence in tokens; None if it is not known."""
        ...

    @property
    def writer(self) -> Codec | None:
        """What writes prompts, where they are written here."""
        ...

    def tree(self, desk: Desk) -> Tree:
        """A new session's."""
        ...

    def forwarded(self, request: Request) -> Mapping[str, Any]:
        """Those of the client's wishes that are fulfilled."""
        ...

    def begin(self, request: Request, placement: Placement, sampling: Sampling, seed: int) -> Generating:
        """A reply to `request`, not yet running."""
        ...

    async def health(self) -> Mapping[str, float]:
        """Counters. Raises the `Fault` of one that is dead."""
        ...


class Policy:
    """The policy: an engine that knows ids, and the codec that writes and reads them."""

    masked = ""
    counts = True

    def __init__(self, codec: Codec, engine: Engine, history_policy: HistoryPolicy = "splice") -> None:
        self.codec = codec
        self.engine = engine
        self.history_policy = history_policy

    @property
    def context(self) -> int:
        """The engine's."""
        return self.engine.context

    @property
    def writer(self) -> Codec:
        """The codec."""
        return self.codec

    def tree(self, desk: Desk) -> TurnTree:
        """Of exact ids."""
        return TurnTree(desk, self.history_policy)

    def forwarded(self, request: Request) -> Mapping[str, Any]:
        """None: the run decides."""
        return {}

    def begin(self, request: Request, placement: Placement, sampling: Sampling, seed: int) -> Generation:
        """A stream of tokens after the prompt that `placement` holds."""
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
        """The engine's."""
        return await self.engine.health()
