"""A server of ours that several runs join at once, each with adapters of its own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from coderepairrl.engines.vllm.link import Link
from coderepairrl.engines.vllm.places import claimed
from coderepairrl.engines.vllm.served import prefix_of
from coderepairrl.engines.vllm.server import VllmServer
from coderepairrl.errors import CodeRepairError, EngineFault
from coderepairrl.processes import hosting
from coderepairrl.processes.hosting import Restarts
from coderepairrl.protocols import SharedServer

POLICY = "policy"
"""The model's name at a server of our own."""
TENANT = "engine-tenant"
"""File beside the logs of a run that shares a server."""
Start = Callable[[], Awaitable[VllmServer]]
_LOOK = 0.5
"""Seconds between two looks at whether it runs."""
_ILL = 4
"""Looks in a row at which it must not be well to count as dead."""


class Hosted(SharedServer):
    """Runs join it at ``unix:ADDRESS``, which names its socket: one in a folder that only this user can open.

    It ends with this process, killed or not. One that dies is started anew at the same address, and runs that have
    lost it wait for it and join it again; after so many `restarts` in a row it is given up.
    """

    failure = ""

    def __init__(
        self,
        server: VllmServer,
        start: Start,
        address: Path,
        claim: int,
        *,
        restarts: int,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        """`server` came of `start`; `claim` is this process's on `address`."""
        self._server, self._start = server, start
        self._address, self._claim = address, claim
        self._restarts, self._patience, self._say = Restarts(restarts), patience, say
        self._watch = asyncio.create_task(self._watch_over())

    @classmethod
    async def at(
        cls, address: Path, start: Start, *, restarts: int, patience: float, say: Callable[[str], None]
    ) -> Self:
        """One that listens. Raises `UsageError` where another process has one at `address`, and what `start` raises."""
        claim = hosting.claim(address, "server", "wait for its end: each would need its own")
        try:
            server = await start()
            try:
                hosting.lead(address, server.socket)
            except BaseException:
                await server.close()
                raise
            return cls(server, start, address, claim, restarts=restarts, patience=patience, say=say)
        except BaseException:
            os.close(claim)
            raise

    async def forget(self, log_dir: Path) -> None:
        """See `SharedServer.forget`."""
        if not (log_dir / TENANT).exists():  # it never joined
            return
        link = Link(self._server, self._patience)
        with suppress(EngineFault):  # it has just died, and nothing is left to unload
            for name in (await link.models())[1]:
                if name.startswith(prefix_of(POLICY, tenant_of(log_dir))):
                    await link.post("/v1/unload_lora_adapter", body={"lora_name": name})

    async def close(self) -> None:
        """See `SharedServer.close`."""
        self._watch.cancel()
        await asyncio.wait([self._watch])
        await self._server.close()
        self._leave()

    async def _watch_over(self) -> None:
        self._restarts.started()
        while True:
            why = await self._end()
            await self._server.close(grace=0.0)
            while True:
                if not self._restarts.may_go_on():
                    deaths = self._restarts.deaths
                    self.failure = f"the server that the runs share died {deaths} times in a row: {why}"
                    self._say(self.failure)
                    self._leave()
                    return
                self._say(f"the server that the runs share died, and is started anew: {why}")
                try:
                    self._server = await self._start()
                    hosting.lead(self._address, self._server.socket)
                    self._restarts.started()
                    break
                except (CodeRepairError, OSError) as error:
                    why = str(error)
                    await self._server.close(grace=0.0)

    async def _end(self) -> str:
        """What the server has ended with, once it has; one that says that it is ill, or hangs, is at its end, too."""
        ill = 0
        while not (why := self._server.end):
            await asyncio.sleep(_LOOK)
            try:
                async with asyncio.timeout(self._patience):
                    ill = 0 if await self._server.healthy() else ill + 1
            except TimeoutError:
                return f"it did not answer for {self._patience:.0f} s"
            if ill == _ILL:
                return self._server.end or "it runs, and does not say any more that it is well"
        return why

    def _leave(self) -> None:
        """Let those who would join know that nobody starts it any more."""
        if self._claim >= 0:
            self._address.unlink(missing_ok=True)
            os.close(self._claim)
            self._claim = -1


async def join(url: str, seconds: float) -> VllmServer:
    """The server at `url`. One of a process of ours that is being started is waited for, `seconds` at most."""
    server, deadline = VllmServer.at(url), time.monotonic() + seconds
    while claimed(url) and not await server.healthy() and time.monotonic() < deadline:
        await server.close()
        await asyncio.sleep(_LOOK)
        server = VllmServer.at(url)  # where its socket is by now
    return server


def tenant_of(log_dir: Path) -> str:
    """What tells the adapters of a run from those of others at a server: the same when it is resumed.

    It is of a random number that is kept in `log_dir`, since folders of the same path on two machines are two runs, and
    of the path, since a copy of a folder is another run.
    """
    kept = log_dir / TENANT
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with kept.open("x") as file:
            file.write(secrets.token_hex(16))
    except FileExistsError:  # it is resumed
        pass
    return hashlib.sha256(f"{log_dir.resolve()} {kept.read_text()}".encode()).hexdigest()[:10]
