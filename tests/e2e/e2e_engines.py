"""Engines that kill, sleep, or report false logprobs, for whole runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
from safetensors.torch import save_file

from coderepairrl.engines.tiny import Tiny, TinyEngine
from coderepairrl.errors import EngineFault
from coderepairrl.sync import weights, wire
from coderepairrl.types import Capabilities, Chunk, Sampling

KILLED = Path("killed")
"""File in the working directory, made when the learner is killed."""
DOUBTED = Path("doubted.json")
"""File in the working directory: a list of versions."""
REFUSED = Path("refused")
"""File in the working directory, made when an engine refuses to wake up."""


class _Receiving(TinyEngine):
    """Receives weights without a file, and kills the sender of the first ones."""

    async def receivers(self) -> tuple[int, float]:
        return 1, 240.0

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`."""
        assert weights.is_offer(path) and not list(path.glob("*.safetensors"))
        if not KILLED.exists():
            KILLED.touch()
            kill_learner()
        try:
            tensors, found = await asyncio.to_thread(wire.receive, path / weights.OFFER, 1, 1, 240.0)
        except wire.TransferError as torn:
            raise EngineFault(f"the weights did not arrive: {torn}") from torn
        if found != checksum:
            raise EngineFault(f"what arrived has checksum {found}, not {checksum}")
        file = path / "arrived.safetensors"
        save_file(tensors, file)
        return await super().load(file, version, weights.compute_checksum(file))


class _Doubtful(TinyEngine):
    """Reports a first logprob 19 nats too low at the versions in the file `DOUBTED`: the ratio is exp(19)."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        doubted, missing = json.loads(DOUBTED.read_text()), 19.0
        async for chunk in super().generate(ids, sampling, seed):
            if chunk.version in doubted and chunk.ids:
                chunk = chunk._replace(logprobs=(chunk.logprobs[0] - missing, *chunk.logprobs[1:]))
                missing = 0.0
            yield chunk


def kill_learner() -> None:
    """End the learner of this run with SIGKILL."""
    [learner] = [child for child in psutil.Process().children() if "coderepairrl.learn" in str(child.cmdline())]
    learner.kill()


class _Sleeping(TinyEngine):
    """Sleeps by SIGSTOP, and dies instead of waking up after the first update."""

    stopped = False

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self.stopped = False
        os.kill(self.pid, signal.SIGCONT)

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`."""
        if self.stopped and not REFUSED.exists():
            REFUSED.touch()
            os.kill(self.pid, signal.SIGKILL)
            raise EngineFault("the server failed to wake up: CUDA out of memory")
        await self.wake()
        return await super().load(path, version, checksum)


class SleepingTiny(Tiny):
    """See `_Sleeping`."""

    engine = _Sleeping

    @property
    def capabilities(self) -> Capabilities:
        """See `EngineSpec.capabilities`."""
        return replace(super().capabilities, can_sleep=True)


class _Deadly(_Sleeping):
    """Kills the offloaded learner at its second sleep after an update."""

    updates = 0

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await super().sleep()
        if self.updates == 2 and not KILLED.exists():
            KILLED.touch()
            kill_learner()

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`."""
        self.updates += 1
        await self.wake()
        return await TinyEngine.load(self, path, version, checksum)


class DeadlyTiny(SleepingTiny):
    """See `_Deadly`."""

    engine = _Deadly


class ReceivingTiny(Tiny):
    """See `_Receiving`."""

    engine = _Receiving

    @property
    def capabilities(self) -> Capabilities:
        """See `EngineSpec.capabilities`."""
        return replace(super().capabilities, can_receive=True)


class DoubtfulTiny(Tiny):
    """See `_Doubtful`."""

    engine = _Doubtful
