"""Trackers of a running run: separate processes, which may fail or hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from coderepairrl.processes.children import NOT_FROM_HERE, last_words
from coderepairrl.runs import RunFolder

_PATIENCE = 15.0  # Seconds at the end of a run for a tracker's backlog.


@asynccontextmanager
async def following(folder: RunFolder, names: Iterable[str], say: Callable[[str], None]) -> AsyncIterator[None]:
    """Feed the trackers `names` from the log meanwhile; `say` reports a failing one once."""
    async with AsyncExitStack() as all_of_them:
        for name in names:
            await all_of_them.enter_async_context(_following(folder, name, say))
        yield


@asynccontextmanager
async def _following(folder: RunFolder, name: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    output = folder.logs / f"{name}.log"
    begins = output.stat().st_size if output.exists() else 0
    with output.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coderepairrl.report.trackers", str(folder.path.absolute()), name),
            stdin=asyncio.subprocess.PIPE,
            stdout=file,
            stderr=file,
            env={**os.environ, **NOT_FROM_HERE},
            start_new_session=True,  # Ctrl-C is the run's, which then ends
        )

    async def report() -> None:
        if await process.wait():
            reason = (last_words(output, begins) or ["no reason given"])[-1]
            say(f"{name} is sent nothing more: {reason}; the run folder has all metrics: {later}")

    later = f"crrl export {folder.path} --to {name}"
    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(reporting), _PATIENCE)
        except TimeoutError:
            reporting.cancel()
            say(f"{name} has not got all metrics yet: {later}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            await process.wait()
