"""Several vLLM servers as one engine: weights go live at all of them or at none, and one that dies comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coderepairrl.engines.vllm.client import VllmEngine
from coderepairrl.engines.vllm.routing import PrefixRouter
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
class _Replica:
    """A server that is alive."""

    engine: VllmEngine
    busy: int = 0
    """Requests that it was sent and that have not ended."""


class _Ballot:
    """One vote of each server on new weights; all wait for the verdict, which is yes if nobody votes no."""

    def __init__(self, voters: Iterable[int]) -> None:
        loop = asyncio.get_running_loop()
        self._votes: dict[int, asyncio.Future[bool]] = {at: loop.create_future() for at in voters}
        self._verdict: asyncio.Future[bool] = loop.create_future()

    def cast(self, at: int, ready: bool) -> None:
        """The vote of server `at`; its first one counts."""
        if not self._votes[at].done():
            self._votes[at].set_result(ready)

    async def count(self) -> None:
        """Wait for all votes, and give the verdict."""
        self._verdict.set_result(all(await asyncio.gather(*self._votes.values())))

    async def verdict(self) -> bool:
        """Wait for the verdict."""
        return await asyncio.shield(self._verdict)

    def voted_no(self, at: int) -> bool:
        """Whether server `at` refused of itself. All have voted."""
        return not self._votes[at].result()


class Fleet(Engine):
    """Servers of the same model with the same settings (`Vllm` checks it), which share the requests.

    A request that meets a dead server raises `EngineFault`, as with one server: its episode is void, and what is
    retried goes to the others. The lost one is joined again when it is back, with the weights that are then served;
    until that the run goes on with fewer. When none is left, every call raises `EngineFault`.
    """

    def __init__(self, engines: Mapping[str, VllmEngine], join: Join, *, affinity: bool) -> None:
        """`engines` by address, joined; from here on they are this object's to close."""
        self.context = next(iter(engines.values())).context
        self._urls = tuple(engines)
        self._replicas = {at: _Replica(engine) for at, engine in enumerate(engines.values())}
        self._join = join
        self._router = PrefixRouter(affinity=affinity)
        self._weights: Weights | None = None
        """What is served, None for what the servers were joined with."""
        self._lost: dict[int, str] = {}
        """Why, of each server that is lost."""
        self._loading = asyncio.Lock()
        self._watch = asyncio.create_task(self._rejoin_lost())

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        self._require_any()
        at = self._router.choose(ids, {at: replica.busy for at, replica in self._replicas.items()})
        replica = self._replicas[at]
        replica.busy += 1
        try:
            async with contextlib.aclosing(replica.engine.generate(ids, sampling, seed)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineFault as fault:
            self._router.failed(at, ids)
            await self._drop_if_dead(at, replica.engine, fault)
            raise
        finally:
            replica.busy -= 1

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. Every server has the weights before any samples with them; if one of them refuses, all
        serve the old ones again. One that dies meanwhile is lost, and is given them when it is back."""
        async with self._loading:
            self._require_any()
            await self._load_all(path, version, checksum)
            self._weights = (path, version, checksum)
            self._router.forget()
        return version

    @property
    def patience(self) -> float:
        """Seconds without an answer after which a server counts as hung."""
        return max((replica.engine.patience for replica in self._replicas.values()), default=0.0)

    async def health(self) -> Mapping[str, float]:
        """As `VllmEngine.health`, summed over the ``servers`` that are there; ``kv_used`` is that of the fullest."""
        said: list[Mapping[str, float]] = []
        for at, replica in list(self._replicas.items()):
            try:
                said.append(await replica.engine.health())
            except EngineFault as fault:
                await self._drop_if_dead(at, replica.engine, fault)
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
            engines, self._replicas = [replica.engine for replica in self._replicas.values()], {}
            self._lost = dict.fromkeys(range(len(self._urls)), "the engine was closed")
            ended = await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
        for error in filter(None, ended):  # all are closed by now
            raise error

    def _require_any(self) -> None:
        """Raise `EngineFault` with the reasons when no server is left."""
        if not self._replicas:
            reasons = "; ".join(f"{self._urls[at]}: {why}" for at, why in self._lost.items())
            raise EngineFault(f"none of {len(self._urls)} servers is left: {reasons}")

    async def _load_all(self, path: Path, version: int, checksum: str) -> None:
        """Load at every server by two-phase commit: each waits with the weights in place until all have voted."""
        engines = {at: replica.engine for at, replica in self._replicas.items()}
        ballot = _Ballot(engines)

        async def load(at: int) -> None:
            async def agree() -> bool:
                ballot.cast(at, True)
                return await ballot.verdict()

            try:
                await engines[at].load(path, version, checksum, agree=agree)
                ballot.cast(at, True)
            finally:
                ballot.cast(at, not engines[at].alive)  # a dead one refuses nothing

        loads = {at: asyncio.create_task(load(at)) for at in engines}
        try:
            await ballot.count()
            await asyncio.wait(loads.values())
        except BaseException:  # called off: an engine that is between two versions ends
            for task in loads.values():
                task.cancel()
            await asyncio.gather(*loads.values(), return_exceptions=True)
            raise
        refused: list[tuple[int, EngineFault]] = []
        for at, task in loads.items():
            fault = task.exception()
            if isinstance(fault, EngineFault):
                if not await self._drop_if_dead(at, engines[at], fault):
                    refused.append((at, fault))
            elif fault is not None:
                raise fault
        self._require_any()
        if refused:  # the first that did of itself, not because another one did
            at, fault = next(((at, fault) for at, fault in refused if ballot.voted_no(at)), refused[0])
            raise EngineFault(f"{self._urls[at]}: {fault}", fix=fault.fix) from fault

    async def _drop_if_dead(self, at: int, engine: VllmEngine, fault: EngineFault) -> bool:
        """Whether `engine` is dead. If so the others go on."""
        if engine.alive:
            return False
        if (replica := self._replicas.get(at)) is not None and replica.engine is engine:
            del self._replicas[at]
            self._lost[at] = str(fault)
            self._router.forget(at)
            left = (
                f"{len(self._replicas)} of {len(self._urls)} servers go on" if self._replicas else "no server is left"
            )
            _LOG.warning("lost the server at %s, %s: %s", self._urls[at], left, fault)
            await engine.close()
        return True

    async def _rejoin_lost(self) -> None:
        """Join lost servers again, as long as there is one that serves: else whoever supervises starts anew."""
        while True:
            await asyncio.sleep(REJOIN)
            for at in [at for at in self._lost if self._replicas]:
                try:
                    await self._rejoin(at)
                except Exception as error:  # whatever it answers while it starts: the others may come back
                    why = str(error) if isinstance(error, CodeRepairError) else repr(error)
                    if why != self._lost[at]:
                        _LOG.warning("the server at %s is not back: %s", self._urls[at], why)
                    self._lost[at] = why

    async def _rejoin(self, at: int) -> None:
        engine = await self._join(self._urls[at])
        try:
            async with self._loading:
                if self._weights is not None:
                    await engine.load(*self._weights)
                self._replicas[at] = _Replica(engine)
                del self._lost[at]
        except BaseException:
            await engine.close()
            raise
        _LOG.warning("the server at %s is back: %d of %d serve", self._urls[at], len(self._replicas), len(self._urls))
