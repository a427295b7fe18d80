"""Being told to stop: what long commands do about signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def stoppable() -> Iterator[list[str]]:
    """Ctrl-C, SIGTERM and SIGUSR1 cancel the task, once: a second one must not tear what the first is tidying up.

    Schedulers send SIGUSR1 some time before they take the machine away (Slurm: ``--signal=USR1@300``).

    Yields the names of those that arrived.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[str] = []

    def stop(number: signal.Signals) -> None:
        if not received:
            task.cancel()
        received.append(number.name)

    for number in STOPPING:
        loop.add_signal_handler(number, stop, number)
    try:
        yield received
    finally:
        for number in STOPPING:
            loop.remove_signal_handler(number)
