"""Suspending a server: paused while its weights change, or asleep while others use its GPU."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coderepairrl.engines.vllm.server import Gone, VllmServer
from coderepairrl.engines.vllm.traffic import Traffic
from coderepairrl.errors import EngineFault


class Suspension:
    """Pauses and sleeps of a server, whose requests stay and continue afterwards.

    At vLLM's sleep level 1 weights and adapters move to host memory, and the KV cache is recomputed. Level 2 would save
    the copy, but lose what vLLM derives from weights and no file has.
    """

    def __init__(self, server: VllmServer, traffic: Traffic) -> None:
        self.asleep = False
        self.seconds = {"sleep_seconds": 0.0, "wake_seconds": 0.0}
        """Of the last time that it fell asleep, and that it woke."""
        self._server = server
        self._traffic = traffic

    async def pause(self) -> None:
        """Pause with the weights on the device; a sleeping server wakes only those."""
        if self.asleep:
            await self._wake("weights")
        else:
            await self._server.call("POST", "/pause", query={"mode": "keep"})

    async def resume(self) -> None:
        """Continue after `pause`."""
        if self.asleep:
            await self.wake()
        else:
            await self._server.call("POST", "/resume")

    async def sleep(self) -> None:
        """Fall asleep. A failing server is ended, since it may still hold GPU memory."""
        self._traffic.hold()
        self.asleep = True
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        began = time.monotonic()
        await self._or_end("/sleep", {"level": "1", "mode": "keep"})
        self.seconds["sleep_seconds"] = time.monotonic() - began

    async def wake(self) -> None:
        """Wake completely and continue kept requests; new ones begin after `awake_at_end`.

        A failing server is ended; raises `Gone`.
        """
        answer = await self._wake()
        if json.loads(answer)["status"] != "awake":
            await self._server.end(reason := f"the server did not wake up: {answer}")
            raise Gone(reason)
        self.asleep = False

    @asynccontextmanager
    async def awake_at_end(self) -> AsyncIterator[None]:
        """Ensure on exit that a sleeping server is awake or dead, and release new requests."""
        slept = self.asleep
        try:
            yield
        finally:
            try:
                if self.asleep and self._server.alive:
                    await self.wake()
            finally:
                if slept:
                    self._traffic.release()

    async def _wake(self, *tags: str) -> str:
        began = time.monotonic()
        answer = await self._or_end("/wake_up", [("tags", tag) for tag in tags])
        self.seconds["wake_seconds"] += time.monotonic() - began
        return answer

    async def _or_end(self, path: str, query: dict[str, str] | list[tuple[str, str]]) -> str:
        try:
            return await self._server.call("POST", path, query=query)
        except BaseException as error:  # also if cancelled
            reason = f"the server failed to {path.strip('/').replace('_', ' ')}: {str(error) or repr(error)}"
            await self._server.end(reason)
            if isinstance(error, EngineFault):
                raise Gone(reason) from error
            raise
