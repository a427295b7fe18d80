"""Supervised engine, restarted with the current weights after its death, and warmed up before attempts.

The first request may take a minute, so an attempt's clock starts after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from coderepairrl.errors import EngineFault
from coderepairrl.gateway import PolicySource, ReplySource
from coderepairrl.protocols import Engine
from coderepairrl.types import Chunk, FirstRequest, Sampling

Weights = tuple[Path, int, str]  # path, version, checksum (`Engine.load`)
LONGEST_WAIT = 60.0
"""Most seconds to wait before a restart; waits are 0, 1, 3, 7, ..."""


class _WeightsRejected(EngineFault):
    """A live engine rejected weights."""


class SupervisedEngine(Engine):
    """Engine that is restarted by `start` after its death.

    A request to a dead engine raises `EngineFault` (its episode is void); the next request restarts it, at most
    `restarts` times without a token in between.
    """

    def __init__(
        self,
        engine: Engine,
        start: Callable[[], Awaitable[Engine]],
        *,
        restarts: int,
        on_death: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Wrap `engine`; `on_death` gets the reason before a restart."""
        self.context = engine.context
        self.restarted = 0
        self._engine = engine
        self._start = start
        self._max_restarts = restarts
        self._restarts_in_a_row = 0  # without a token in between
        self._dead = False
        self._weights: Weights | None = None
        """Weights to serve; None for the engine's initial ones."""
        self._loaded: Weights | None = None
        """Weights in the live engine."""
        self._on_death = on_death
        self._lock = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        engine = await self._live_engine()  # it may fall asleep meanwhile, and then holds the request
        async with contextlib.aclosing(engine.generate(ids, sampling, seed)) as chunks:
            try:
                async for chunk in chunks:
                    self._restarts_in_a_row = 0
                    yield chunk
            except EngineFault as fault:
                await self._check_death(engine, fault)
                raise

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. A dead engine is restarted with these weights."""
        weights = (path, version, checksum)
        try:
            try:
                await self._load_or_restart(weights)
            except _WeightsRejected:
                raise
            except EngineFault:  # it died
                await self._load_or_restart(weights)
            self._weights = weights
        finally:
            self._awake.set()  # loading wakes an engine
        return version

    async def sleep(self) -> None:
        """See `Engine.sleep`. A dead engine stays dead until `wake`: the device is in use."""
        self._awake.clear()
        await self._switch(lambda engine: engine.sleep())

    async def wake(self) -> None:
        """See `Engine.wake`. If it dies, the next request restarts it."""
        try:
            await self._switch(lambda engine: engine.wake())
        finally:
            self._awake.set()

    async def _switch(self, change: Callable[[Engine], Awaitable[None]]) -> None:
        async with self._lock:
            engine = self._engine
            if self._dead:
                return
            try:
                await change(engine)
            except EngineFault as fault:
                if not await self._check_death(engine, fault):
                    raise

    async def _load_or_restart(self, weights: Weights) -> None:
        engine = await self._live_engine(weights)
        if self._loaded is not weights:
            await self._load_weights(engine, weights)

    async def _load_weights(self, engine: Engine, weights: Weights) -> None:
        try:
            await engine.load(*weights)
        except EngineFault as fault:
            if await self._check_death(engine, fault):
                raise
            raise _WeightsRejected(str(fault), fix=fault.fix) from fault
        self._loaded = weights

    async def health(self) -> Mapping[str, float]:
        """See `Engine.health`; adds ``restarts``."""
        return {**await self._engine.health(), "restarts": self.restarted}

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()

    async def _check_death(self, engine: Engine, fault: EngineFault) -> bool:
        # whether `engine`, which raised `fault`, is dead or was replaced; reports its death once
        if engine is not self._engine:
            return True
        try:
            await engine.health()
        except EngineFault:
            if not self._dead:
                self._on_death(f"the engine died, and another is started: {fault}")
            self._dead = True
        return self._dead

    async def _live_engine(self, weights: Weights | None = None) -> Engine:
        """Return the live engine; restart a dead one with `weights` (default: the current ones, once awake)."""
        while True:
            if weights is None:
                await self._awake.wait()
            async with self._lock:
                if weights is None and not self._awake.is_set():
                    continue
                if self._dead:
                    await self._restart()
                if self._loaded is not self._weights and (needed := weights or self._weights):
                    await self._load_weights(self._engine, needed)
                return self._engine

    async def _restart(self) -> None:
        if self._restarts_in_a_row >= self._max_restarts:
            raise EngineFault(
                f"the engine died {self._restarts_in_a_row + 1} times in a row",
                fix="read logs/engine.log in the run folder, then continue with --resume",
            )
        await asyncio.sleep(min(2.0**self._restarts_in_a_row - 1.0, LONGEST_WAIT))
        self._restarts_in_a_row += 1
        self.restarted += 1
        with contextlib.suppress(EngineFault):  # it is dead: this only frees its resources
            await self._engine.close()
        self._engine = await self._start()
        self._dead, self._loaded = False, None


WARM_UP_SECONDS = 600.0


async def warm_up(source: ReplySource, request: FirstRequest) -> None:
    """Sample a token after a real prompt. Skips remote models, whose tokens cost money.

    Raises `EngineFault` after `WARM_UP_SECONDS`; a dying engine is left to the attempts.
    """
    if not isinstance(source, PolicySource):
        return
    try:
        async with asyncio.timeout(WARM_UP_SECONDS) as timeout:
            with contextlib.suppress(EngineFault, ValueError):  # ValueError: the prompt exceeds the context
                ids = source.codec.render(request.messages, request.tools)
                async with contextlib.aclosing(source.engine.generate(ids, Sampling(max_tokens=1), 0)) as chunks:
                    async for _ in chunks:
                        pass
    except TimeoutError as error:
        if timeout.expired():  # else raised by the engine: the attempts will report it
            raise EngineFault(
                f"the engine has not sampled a token in {WARM_UP_SECONDS:g} seconds",
                fix="read logs/engine.log in the run folder, then continue with --resume",
            ) from error
