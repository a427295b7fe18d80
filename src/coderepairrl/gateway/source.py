"""Sources of replies: the policy's engine, whose tokens are checked, or another provider's server (`remote`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coderepairrl.errors import EngineFault
from coderepairrl.gateway.call import Usage
from coderepairrl.gateway.remote import RelayedReply, Remote
from coderepairrl.gateway.request import Request
from coderepairrl.gateway.tree import Placement, TurnTree
from coderepairrl.protocols import Engine
from coderepairrl.tokens import Codec, Delta, Reply, ReplyStream
from coderepairrl.types import Chunk, Finish, Origin, Sampling, TokenSpan, VersionRange


class SampledReply:
    """Sampled tokens and the reply parsed from them."""

    remote: Mapping[str, Any] = {}  # `Turn.remote`

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        sampling: Sampling,
        seed: int,
        reply: ReplyStream,
        *,
        cached: int,
        vocab_size: int,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.reply = reply
        self.versions: list[VersionRange] = []
        self.out_of_time = False
        self._engine = engine
        self._seed = seed
        self._cached = cached
        self._logprobs: list[float] = []
        self._vocab_size = vocab_size
        self._stops = frozenset(sampling.stop_ids)

    async def run(self, deadline: float, publish: Callable[[list[Delta]], None]) -> None:
        """Sample until the engine ends, a stop string appears, or `deadline` (loop time) passes. Cancelling aborts.

        Raises `EngineFault`.
        """
        async with contextlib.aclosing(self._engine.generate(self.prompt, self.sampling, self._seed)) as chunks:
            clock = asyncio.timeout_at(deadline)
            try:
                async with clock:
                    async for chunk in chunks:
                        self._take(chunk)
                        publish(self.reply.feed(chunk.ids))
                        if self.reply.cut is not None:
                            return
            except TimeoutError as error:
                if not clock.expired():
                    raise EngineFault(f"the engine timed out: {error}") from error
                self.out_of_time = True
                return
        if self.finish is not Finish.STOP and len(self.ids) < self.sampling.max_tokens:
            raise EngineFault(
                f"the engine ended after {len(self.ids)} of {self.sampling.max_tokens} tokens without a stop token"
            )

    @property
    def ids(self) -> list[int]:
        """Every sampled id."""
        return self.reply.ids

    @property
    def finish(self) -> Finish:
        """Finish reason, unless aborted."""
        stopped = self.reply.cut is not None or (self.ids and self.ids[-1] in self.sampling.stop_ids)
        return Finish.STOP if stopped else Finish.LENGTH

    @property
    def stopped_by(self) -> str:
        """Stop string that ended it, or empty."""
        return self.reply.stopped_by

    @property
    def usage(self) -> Usage:
        """Exact counts; the context excludes tokens after a stop string."""
        prompt, cut = len(self.prompt), self.reply.cut
        context = prompt + (len(self.ids) if cut is None else cut)
        return Usage(prompt, self._cached, len(self.ids), self.reply.reasoning, context)

    def close(self) -> tuple[Reply, list[Delta]]:
        """Return the reply and unpublished deltas."""
        return self.reply.close()

    def spans(self) -> tuple[TokenSpan, TokenSpan]:
        """Output, and tail after a stop string."""
        cut = len(self.ids) if self.reply.cut is None else self.reply.cut
        return self._span(0, cut), self._span(cut, len(self.ids))

    def _span(self, start: int, end: int) -> TokenSpan:
        return TokenSpan(tuple(self.ids[start:end]), Origin.POLICY, tuple(self._logprobs[start:end]))

    def _take(self, chunk: Chunk) -> None:
        count, start = len(chunk.ids), len(self.ids)
        last = self.versions[-1].version if self.versions else chunk.version
        if problem := self._find_problem(chunk, start, last):
            raise EngineFault(f"the engine gave an impossible answer: {problem}")
        self._logprobs += chunk.logprobs
        if self.versions and chunk.version == last:  # extend its range
            start = self.versions.pop().start
        if count:
            self.versions.append(VersionRange(chunk.version, start, len(self.ids) + count))

    def _find_problem(self, chunk: Chunk, start: int, version: int) -> str:
        # describe what is wrong with `chunk` after `start` tokens; empty if it is valid
        ids: Sequence[int] = chunk.ids
        if len(chunk.logprobs) != len(ids):
            return f"{len(ids)} ids with {len(chunk.logprobs)} logprobs"
        if start + len(ids) > self.sampling.max_tokens:
            return f"{start + len(ids)} tokens, of at most {self.sampling.max_tokens}"
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            return f"an id outside the vocabulary of {self._vocab_size}"
        if ids and not self._stops.isdisjoint([*self.ids[-1:], *ids[:-1]]):
            return "tokens after a stop token"
        if ids and not (math.isfinite(sum(chunk.logprobs)) and max(chunk.logprobs) <= 1e-3):  # rounding may exceed 0
            return "a logprob that is not the log of a probability"
        return f"version {chunk.version} after {version}" if chunk.version < version else ""


class PolicySource:
    """The policy's engine and codec."""

    masked = ""  # `Turn.masked`; empty: its turns are trained
    tree_type = TurnTree

    def __init__(self, codec: Codec, engine: Engine) -> None:
        self.codec = codec
        self.engine = engine

    @property
    def context(self) -> int:
        """The engine's context length."""
        return self.engine.context

    def forwarded_settings(self, request: Request) -> Mapping[str, Any]:
        """No client settings: the run's replace them."""
        return {}

    def begin(self, request: Request, placement: Placement, sampling: Sampling, seed: int) -> SampledReply:
        """Prepare a generation, adding the request's stop strings."""
        prompt = placement.prompt
        sampling = replace(
            sampling,
            stop_ids=tuple(dict.fromkeys((*self.codec.stop_ids, *sampling.stop_ids))),
            stop=(*sampling.stop, *request.stop),
        )
        reply = self.codec.stream(prompt, request.tools, stop=sampling.stop)
        return SampledReply(
            self.engine,
            prompt,
            sampling,
            seed,
            reply,
            cached=placement.cached,
            vocab_size=self.codec.vocab_size,
        )

    async def health(self) -> Mapping[str, float]:
        """The engine's counters."""
        return await self.engine.health()


ReplySource = PolicySource | Remote
"""Generates a session's replies."""
PendingReply = SampledReply | RelayedReply
"""A reply that is being generated."""
