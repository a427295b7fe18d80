"""An engine whose full weights come from the learner without a file: both ends of the wire, driven together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from coderepairrl import engines
from coderepairrl.config import Config
from coderepairrl.engines import weights
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import Chunk, Engine
from coderepairrl.train import devices
from coderepairrl.types import Sampling

MEET, CALLED_OFF = "meet-", "meet-off"
"""Names of files in an offer: `coderepairrl.engines.vllm.extension.crrl_wire` says what they mean."""


@runtime_checkable
class Receiving(Engine, Protocol):
    """An engine whose `load` also takes folders with an offer: what they say comes while it loads."""

    @property
    def patience(self) -> float:
        """Seconds that a transfer may take."""
        ...

    async def receivers(self) -> int:
        """How many processes of it receive."""
        ...


Send = Callable[[Path, int, int, float], Awaitable[str]]
"""``(offer, version, receivers, seconds)``: sends, and says "" or why it broke off (`Learner.send`)."""


class Streamed:
    """`Engine` around one that receives. A transfer that breaks off is an `EngineFault`, or the sender's own fault."""

    def __init__(self, engine: Receiving, send: Send) -> None:
        self.name = engine.name
        self.context = engine.context
        self.adapters: bool = getattr(engine, "adapters", False)
        self._engine = engine
        self._send = send

    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        return self._engine.generate(ids, sampling, seed)

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. An offer can be loaded again for as long as the learner has its weights."""
        if not weights.is_offer(path):
            return await self._engine.load(path, version, checksum)
        receivers = await self._engine.receivers()
        for left in path.glob(f"{MEET}*"):  # of an attempt before
            left.unlink()
        loading = asyncio.ensure_future(self._engine.load(path, version, checksum))
        sending = asyncio.ensure_future(self._send(path, version, receivers, self._engine.patience))
        try:
            await asyncio.wait({loading, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sending.done() or sending.exception() or sending.result():
                (path / CALLED_OFF).touch()
            await asyncio.wait({loading, sending})
        if fault := sending.exception():
            loading.exception()  # it says that nothing came
            raise fault
        return loading.result()  # it has the checksum: whatever the sender says of the end, all has arrived

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._engine.pause()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._engine.resume()

    async def health(self) -> Mapping[str, float]:
        """See `Engine.health`."""
        return await self._engine.health()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()


def check_route(config: Config) -> None:
    """Raise `ConfigError` for an ``engine.weights`` that cannot work here."""
    route, engine = config.engine.weights, config.engine
    if route == "file":
        return
    start = engines.check(engine.name, engine.options)
    if not hasattr(getattr(start, "__self__", None), "receivers"):
        raise ConfigError(
            f"engine.weights={route}, and engine {engine.name!r} takes weights as files only",
            fix="leave engine.weights out, or take engine=vllm",
        )
    if config.train.lora is not None and engine.options.get("lora_rank") != 0:
        raise ConfigError(
            f"engine.weights={route} is for full weights, and adapters are sent, which are small files",
            fix="leave engine.weights out, or set engine.options.lora_rank=0 to send merged weights",
        )
    if route == "nccl" and not devices.visible():
        raise ConfigError(
            "engine.weights=nccl: NCCL works between GPUs, and there is none here",
            fix="engine.weights=file, or gloo, which goes through the host's memory",
        )
    if route == "nccl" and engine.share_devices:
        raise ConfigError(
            "engine.weights=nccl with engine.share_devices: NCCL wants a GPU for each process",
            fix="engine.weights=file, or part them with engine.devices and train.devices",
        )
