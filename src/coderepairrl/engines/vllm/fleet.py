"""Several vLLM servers as one engine: weights go live at all of them or at none, and one that dies comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coderepairrl.engines.vllm.client import VllmEngine
from coderepairrl.engines.vllm.prefixes import Prefixes
from coderepairrl.errors import CodeRepairError, EngineFault
from coderepairrl.protocols import Chunk, Engine
from coderepairrl.types import Sampling

REJOIN = 10.0
"""Seconds between two attempts to join a server that was lost."""
_LOG = logging.getLogger(__name__)

Weights = tuple[Path, int, str]
Join = Callable[[str], Awaitable[VllmEngine]]
"""Joins the server at an address, with the weights that the run began with. Raises `CodeRepairError`."""


@dataclass(slots=True)
class _Serving:
    """A server that is there."""

    engine: VllmEngine
    busy: int = 0
    """Requests that it was sent and that have not ended."""


class Fleet(Engine):
    """Servers of the same model with the same settings (`Vllm` checks it), which share the requests.

    A request that meets a dead server raises `EngineFault`, as with one server: its episode is void, and what is
    retried goes to the others. The lost one is joined again when it is back, with the weights that are then served;
    until that the run goes on with fewer. When none is left, every call raises `EngineFault`.
    """

    def __init__(self, engines: Mapping[str, VllmEngine], join: Join, *, affinity: bool) -> None:
        """`engines` by address, joined; from here on they are this object's to close."""
        self.context = next(iter(engines.values())).context
        self._where = tuple(engines)
        self._alive = {at: _Serving(engine) for at, engine in enumerate(engines.values())}
        self._join = join
        self._prefixes = Prefixes(affinity=affinity)
        self._weights: Weights | None = None
        """What is served, None for what the servers were joined with."""
        self._why: dict[int, str] = {}
        """Of each that is lost."""
        self._loading = asyncio.Lock()
        self._watch = asyncio.create_task(self._rejoin_always())

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        self._require_any()
        at = self._prefixes.choose(ids, {at: serving.busy for at, serving in self._alive.items()})
        serving = self._alive[at]
        serving.busy += 1
        try:
            async with contextlib.aclosing(serving.engine.generate(ids, sampling, seed)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineFault as fault:
            self._prefixes.failed(at, ids)
            await self._bury(at, serving.engine, fault)
            raise
        finally:
            serving.busy -= 1

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. Every server has the weights before any samples with them; if one of them refuses, all
        serve the old ones again. One that dies meanwhile is lost, and is given them when it is back."""
        async with self._loading:
            self._require_any()
            await self._load_all(path, version, checksum)
            self._weights = (path, version, checksum)
            self._prefixes.forget()
        return version

    @property
    def patience(self) -> float:
        """Seconds without an answer after which a server counts as hung."""
        return max((serving.engine.patience for serving in self._alive.values()), default=0.0)

    async def health(self) -> Mapping[str, float]:
        """As `VllmEngine.health`, summed over the ``servers`` that are there; ``kv_used`` is that of the fullest."""
        said: list[Mapping[str, float]] = []
        for at, serving in list(self._alive.items()):
            try:
                said.append(await serving.engine.health())
            except EngineFault as fault:
                await self._bury(at, serving.engine, fault)
        self._require_any()
        if not said:
            raise EngineFault("no server answered when it was asked how it is")
        total = {name: sum(each[name] for each in said) for name in said[0]}
        same = {name: max(each[name] for each in said) for name in ("version", "adapters", "kv_used")}
        return total | same | {"servers": float(len(said))}

    async def close(self) -> None:
        """Leave the servers. Requests still open raise `EngineFault`."""
        self._watch.cancel()
        try:
            await asyncio.wait([self._watch])
        finally:
            engines, self._alive = [serving.engine for serving in self._alive.values()], {}
            self._why = dict.fromkeys(range(len(self._where)), "the engine was closed")
            ended = await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
        for error in filter(None, ended):  # all are closed by now
            raise error

    def _require_any(self) -> None:
        """Raise `EngineFault` with the reasons when no server is left."""
        if not self._alive:
            reasons = "; ".join(f"{self._where[at]}: {why}" for at, why in self._why.items())
            raise EngineFault(f"none of {len(self._where)} servers is left: {reasons}")

    async def _load_all(self, path: Path, version: int, checksum: str) -> None:
        """Load at every server, each of which waits before it goes on until all have the weights or one has refused."""
        loop = asyncio.get_running_loop()
        verdict: asyncio.Future[bool] = loop.create_future()
        engines = {at: serving.engine for at, serving in self._alive.items()}
        votes: dict[int, asyncio.Future[bool]] = {at: loop.create_future() for at in engines}

        def vote(at: int, ready: bool) -> None:
            if not votes[at].done():
                votes[at].set_result(ready)

        async def take(at: int) -> None:
            async def agree() -> bool:
                vote(at, True)
                return await asyncio.shield(verdict)

            try:
                await engines[at].load(path, version, checksum, agree=agree)
                vote(at, True)
            finally:
                vote(at, not engines[at].alive)  # a dead one refuses nothing

        taking = {at: asyncio.create_task(take(at)) for at in engines}
        try:
            verdict.set_result(all(await asyncio.gather(*votes.values())))
            await asyncio.wait(taking.values())
        except BaseException:  # called off: an engine that is between two versions ends
            for task in taking.values():
                task.cancel()
            await asyncio.gather(*taking.values(), return_exceptions=True)
            raise
        refused: list[tuple[int, EngineFault]] = []
        for at, task in taking.items():
            fault = task.exception()
            if isinstance(fault, EngineFault):
                if not await self._bury(at, engines[at], fault):
                    refused.append((at, fault))
            elif fault is not None:
                raise fault
        self._require_any()
        if refused:  # the first that did of itself, not because another one did
            at, fault = next(((at, fault) for at, fault in refused if not votes[at].result()), refused[0])
            raise EngineFault(f"{self._where[at]}: {fault}", fix=fault.fix) from fault

    async def _bury(self, at: int, engine: VllmEngine, fault: EngineFault) -> bool:
        """Whether `engine` is dead. If so the others go on."""
        if engine.alive:
            return False
        if (serving := self._alive.get(at)) is not None and serving.engine is engine:
            del self._alive[at]
            self._why[at] = str(fault)
            self._prefixes.forget(at)
            left = f"{len(self._alive)} of {len(self._where)} servers go on" if self._alive else "no server is left"
            _LOG.warning("lost the server at %s, %s: %s", self._where[at], left, fault)
            await engine.close()
        return True

    async def _rejoin_always(self) -> None:
        """Join lost servers again, as long as there is one that serves: else whoever supervises starts anew."""
        while True:
            await asyncio.sleep(REJOIN)
            for at in [at for at in self._why if self._alive]:
                try:
                    await self._rejoin(at)
                except Exception as error:  # whatever it answers while it starts: the others may come back
                    why = str(error) if isinstance(error, CodeRepairError) else repr(error)
                    if why != self._why[at]:
                        _LOG.warning("the server at %s is not back: %s", self._where[at], why)
                    self._why[at] = why

    async def _rejoin(self, at: int) -> None:
        engine = await self._join(self._where[at])
        try:
            async with self._loading:
                if self._weights is not None:
                    await engine.load(*self._weights)
                self._alive[at] = _Serving(engine)
                del self._why[at]
        except BaseException:
            await engine.close()
            raise
        _LOG.warning("the server at %s is back: %d of %d serve", self._where[at], len(self._alive), len(self._where))
