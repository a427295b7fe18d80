"""Engine that receives weights from the learner without a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from coderepairrl.errors import EngineFault
from coderepairrl.protocols import Engine
from coderepairrl.sync import weights
from coderepairrl.types import Chunk, Sampling

Send = Callable[[Path, int, int, float], Awaitable[str]]
"""``(offer, version, receivers, seconds)``: sends, and returns "" or why it broke off (`Learner.send`)."""


class Streamed(Engine):
    """Wrapper of an engine that receives weights; a broken transfer raises a `Fault` of engine or sender."""

    def __init__(self, engine: Engine, send: Send) -> None:
        self.context = engine.context
        self._engine = engine
        self._send = send

    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        return self._engine.generate(ids, sampling, seed)

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. An offer can be loaded repeatedly while the learner keeps its weights."""
        if not weights.is_offer(path):
            return await self._engine.load(path, version, checksum)
        receivers, patience = await self._engine.receivers()
        for left in path.iterdir():  # of an earlier attempt
            if left.name != weights.OFFER:
                left.unlink()
        loading = asyncio.ensure_future(self._engine.load(path, version, checksum))
        sending = asyncio.ensure_future(self._send(path, version, receivers, patience))
        try:
            await asyncio.wait({loading, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            called_off = not sending.done()
            if called_off or sending.exception() or sending.result():
                (path / weights.CALLED_OFF).touch()
            await asyncio.wait({loading, sending})
        if fault := sending.exception():
            loading.exception()  # only a consequence
            raise fault
        try:
            return loading.result()  # the checksum holds: everything arrived
        except EngineFault as refusal:
            if called_off or not sending.result():  # a cancelled sender only reports that
                raise
            raise EngineFault(f"{refusal}; the learner broke off: {sending.result()}", fix=refusal.fix) from refusal

    async def health(self) -> Mapping[str, float]:
        """See `Engine.health`."""
        return await self._engine.health()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()
