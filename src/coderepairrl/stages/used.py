"""Machine use of a run, recorded in its log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from coderepairrl.errors import RunError
from coderepairrl.processes.meter import Meter
from coderepairrl.runs import Log

_EVERY = 60.0


@asynccontextmanager
async def metered(log: Log, meter: Meter) -> AsyncIterator[None]:
    """Append counts of `meter` as ``used`` records, every minute and at the end."""

    def write() -> None:
        log.append("used", **meter.read()._asdict())

    async def keep() -> None:
        while True:
            await asyncio.sleep(_EVERY)
            write()

    task = asyncio.create_task(keep())
    try:
        yield
    finally:
        task.cancel()
        with suppress(RunError):  # the log may be what failed: then it ends without
            write()
