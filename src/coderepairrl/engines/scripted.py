"""A scripted engine, for tests of everything above it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coderepairrl.errors import EngineFault
from coderepairrl.protocols import Engine, EngineSpec
from coderepairrl.sync import weights
from coderepairrl.types import Capabilities, Chunk, EngineNeeds, Sampling

Script = Callable[[Sequence[int], Sampling, int], Sequence[int]] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Request:
    """A received request."""

    ids: tuple[int, ...]
    sampling: Sampling
    seed: int


class ScriptedEngine(Engine):
    """Emits scripted ids in chunks.

    `script` has a reply per request in order of arrival, or is a function of ``(ids, sampling, seed)``. Replies end
    after a stop id, at `max_tokens`, or when the context is full. The n-th token's logprob is ``-(n % 8 + 1) / 8``,
    exact in binary. `aborted` counts iterators closed early.

        >>> async def demo():
        ...     engine = ScriptedEngine([[5, 6, 7]], chunk=2)
        ...     return [chunk.ids async for chunk in engine.generate([1], Sampling(stop_ids=(7,)), seed=0)]
        >>> asyncio.run(demo())
        [(5, 6), (7,)]
    """

    def __init__(self, script: Script, *, context: int = 4096, chunk: int = 4, delay: float = 0.0) -> None:
        self.context = context
        self.version = 0
        self.requests: list[Request] = []
        self.aborted = 0
        self._script = script
        self._chunk = chunk
        self._delay = delay
        self._running = 0
        self._generated = 0
        self._dead: str | None = None

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. Raises `EngineFault` after `kill`, and beyond the last reply."""
        if not 1 <= len(ids) < self.context:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in a context of {self.context}")
        self._require_alive()
        number = len(self.requests)
        self.requests.append(Request(tuple(ids), sampling, seed))
        reply = self._make_reply(number, ids, sampling, seed)
        self._running += 1
        at = 0
        try:
            while at < len(reply):
                await asyncio.sleep(self._delay)
                self._require_alive()
                piece = reply[at : at + self._chunk]
                logprobs = tuple(-((at + n) % 8 + 1) / 8 for n in range(len(piece)))
                at += len(piece)
                self._generated += len(piece)
                yield Chunk(piece, logprobs, self.version)
        finally:
            self._running -= 1
            self.aborted += at < len(reply) and self._dead is None

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """Switch to `version`. Raises `EngineFault` if the checksum does not match."""
        self._require_alive()
        weights.verify_checksum(path, checksum)
        self.version = version
        return version

    async def health(self) -> Mapping[str, float]:
        """``version``, ``running``, ``waiting``, ``generated_tokens``."""
        self._require_alive()
        return {
            "version": self.version,
            "running": self._running,
            "waiting": 0,
            "generated_tokens": self._generated,
        }

    async def close(self) -> None:
        """Stop serving."""
        self.kill("the engine was closed")

    def kill(self, why: str = "the engine died") -> None:
        """Simulate a crash: open and later calls raise `EngineFault`."""
        self._dead = why

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise EngineFault(self._dead)

    def _make_reply(self, number: int, ids: Sequence[int], sampling: Sampling, seed: int) -> tuple[int, ...]:
        if callable(self._script):
            reply = tuple(self._script(ids, sampling, seed))
        elif number < len(self._script):
            reply = tuple(self._script[number])
        else:
            raise EngineFault(f"the script has {len(self._script)} replies, and this is request {number + 1}")
        for index, token in enumerate(reply):
            if token in sampling.stop_ids:
                reply = reply[: index + 1]
                break
        return reply[: min(sampling.max_tokens, self.context - len(ids))]


@dataclass(frozen=True, kw_only=True)
class Scripted(EngineSpec):
    """Spec of a `ScriptedEngine`."""

    script: Script
    context: int = 4096
    chunk: int = 4
    delay: float = 0.0

    name = "scripted"

    @property
    def capabilities(self) -> Capabilities:
        """Context length."""
        return Capabilities(context=self.context)

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> ScriptedEngine:
        """See `EngineSpec.start`."""
        return ScriptedEngine(self.script, context=self.context, chunk=self.chunk, delay=self.delay)
