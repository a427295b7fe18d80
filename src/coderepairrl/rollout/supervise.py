"""An engine that comes back: restarts a dead one and gives it the current weights before anything is sampled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from coderepairrl.errors import EngineFault
from coderepairrl.protocols import Chunk, Engine
from coderepairrl.types import Sampling

Weights = tuple[Path, int, str]
LONGEST_WAIT = 60.0
"""Seconds. The first restart is at once, the next waits one, the next three, and so on."""


class SupervisedEngine:
    """`Engine` around a factory of engines.

    A request that meets a dead engine raises `EngineFault` (its episode is void); the next one starts another,
    at most `restarts` times in a row without a token in between.
    """

    def __init__(self, engine: Engine, start: Callable[[], Awaitable[Engine]], *, restarts: int) -> None:
        self.name = engine.name
        self.context = engine.context
        self.adapters: bool = getattr(engine, "adapters", False)
        self.restarted = 0
        self._engine = engine
        self._start = start
        self._allowed = restarts
        self._in_a_row = 0
        self._dead = False
        self._weights: Weights | None = None
        self._begun_with: Weights | None = None
        self._lock = asyncio.Lock()

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        engine = await self._alive()
        chunks = engine.generate(ids, sampling, seed)
        try:
            async for chunk in chunks:
                self._in_a_row = 0
                yield chunk
        except EngineFault:
            await self._bury(engine)
            raise
        finally:
            if hasattr(chunks, "aclose"):
                await chunks.aclose()

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. A dead engine is restarted with these weights; a refused load is raised."""
        wanted = (path, version, checksum)
        engine = self._engine
        try:
            await self._give(wanted)
        except EngineFault:
            if not await self._bury(engine):
                raise  # it is alive and refused the weights
            await self._give(wanted)
        self._weights = wanted
        return version

    async def _give(self, weights: Weights) -> None:
        engine = await self._alive(weights)
        if self._begun_with is not weights:
            await engine.load(*weights)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._engine.pause()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._engine.resume()

    async def health(self) -> Mapping[str, float]:
        """See `Engine.health`; restarts are counted as ``restarts``."""
        return {**await self._engine.health(), "restarts": self.restarted}

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()

    async def _bury(self, engine: Engine) -> bool:
        """Whether `engine` is dead; if so the next request starts another."""
        if engine is not self._engine:
            return True
        try:
            await engine.health()
        except EngineFault:
            self._dead = True
        return self._dead

    async def _alive(self, weights: Weights | None = None) -> Engine:
        """The engine, restarted if it is dead: with `weights`, or those that were loaded last."""
        async with self._lock:
            if not self._dead:
                return self._engine
            if self._in_a_row >= self._allowed:
                raise EngineFault(
                    f"the engine died {self._in_a_row + 1} times in a row",
                    fix="read logs/engine.log in the run folder, then continue with --resume",
                )
            await asyncio.sleep(min(2.0**self._in_a_row - 1.0, LONGEST_WAIT))
            self._in_a_row += 1
            self.restarted += 1
            with contextlib.suppress(EngineFault):  # it is dead already: this frees what it left
                await self._engine.close()
            self._engine = await self._start()
            self._begun_with = weights or self._weights
            if self._begun_with is not None:
                await self._engine.load(*self._begun_with)
            self._dead = False
            return self._engine
