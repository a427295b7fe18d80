"""Engines for the whole runs of these tests."""

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
"""In the working directory, once the learner was killed."""
DOUBTED = Path("doubted.json")
"""In the working directory: a list of versions."""

REFUSED = Path("refused")
"""In the working directory, once an engine refused to wake up."""


class _Receiving(TinyEngine):
    """Tiny, with one receiver of weights without a file."""

    async def receivers(self) -> tuple[int, float]:
        return 1, 240.0

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`."""
        if not weights.is_offer(path):
            return await super().load(path, version, checksum)
        try:
            tensors, found = await asyncio.to_thread(wire.receive, path / weights.OFFER, 1, 1, 240.0)
        except wire.TransferError as torn:
            raise EngineFault(f"the weights did not arrive: {torn}") from torn
        if found != checksum:
            raise EngineFault(f"what arrived has checksum {found}, not {checksum}")
        file = path / "arrived.safetensors"
        save_file(tensors, file)
        return await super().load(file, version, weights.compute_checksum(file))


class _Murderous(_Receiving):
    """The first time that it is sent weights, it kills the sender."""

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`."""
        assert weights.is_offer(path) and not list(path.glob("*.safetensors"))
        if not KILLED.exists():
            KILLED.touch()
            kill_learner()
        return await super().load(path, version, checksum)


class _Doubtful(TinyEngine):
    """A reply's logprobs are 19 nats too low at the versions in the file `DOUBTED`: its ratio is exp(19)."""

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
    """It sleeps by being stopped. The first time that it is woken after an update it dies instead."""

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
    """The second time that it sleeps after an update it kills the learner, which has been put away."""

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


class MurderousTiny(ReceivingTiny):
    """See `_Murderous`."""

    engine = _Murderous


class DoubtfulTiny(Tiny):
    """See `_Doubtful`."""

    engine = _Doubtful
