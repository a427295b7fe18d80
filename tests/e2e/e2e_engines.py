"""Engines for the whole runs of these tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
from safetensors.torch import save_file

from coderepairrl.engines import TinyEngine, weights
from coderepairrl.engines.vllm.extension import crrl_wire
from coderepairrl.errors import EngineFault

KILLED = Path("killed")
"""In the working directory, once the learner was killed."""


class ReceivingTiny(TinyEngine):
    """Tiny, with one receiver of weights without a file."""

    patience = 240.0

    async def receivers(self) -> int:
        return 1

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`."""
        if not weights.is_offer(path):
            return await super().load(path, version, checksum)
        try:
            tensors, found = await asyncio.to_thread(crrl_wire.receive, path, 1, 1, self.patience)
        except crrl_wire.Torn as torn:
            raise EngineFault(f"the weights did not arrive: {torn}") from torn
        if found != checksum:
            raise EngineFault(f"what arrived has checksum {found}, not {checksum}")
        file = path / "arrived.safetensors"
        save_file(tensors, file)
        return await super().load(file, version, weights.checksum(file))


class MurderousTiny(ReceivingTiny):
    """The first time that it is sent weights, it kills the sender."""

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`."""
        assert weights.is_offer(path) and not list(path.glob("*.safetensors"))
        if not KILLED.exists():
            KILLED.touch()
            [learner] = [child for child in psutil.Process().children() if "coderepairrl.learn" in str(child.cmdline())]
            learner.kill()
        return await super().load(path, version, checksum)
