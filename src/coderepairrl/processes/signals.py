"""Cancellation of commands by signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from coderepairrl.errors import CodeRepairError, ExitCode

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
T = TypeVar("T")


class Interrupted(CodeRepairError):
    """Clean end by a signal. A run of `crrl train` can be resumed."""

    exit_code = ExitCode.INTERRUPTED


@contextmanager
def stoppable() -> Iterator[list[str]]:
    """Cancel the current task at the first of `STOPPING`; yields names of received signals.

    Later signals do not interrupt cleanup. Schedulers send SIGUSR1 in advance (Slurm: ``--signal=USR1@300``). SIGHUP
    silences the terminal; under ``nohup`` it is ignored.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[str] = []
    before = {number: signal.getsignal(number) for number in STOPPING}
    numbers = [n for n in STOPPING if n != signal.SIGHUP or before[n] != signal.SIG_IGN]
    terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream and stream.isatty()]

    def stop(number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            for descriptor in terminals:
                _silence(descriptor)
        if not received:
            task.cancel(number.name)
        received.append(number.name)

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)  # asyncio would leave the default


async def until_interrupted(job: Coroutine[Any, Any, T], fix: str = "") -> T:
    """Await `job`. Raises `Interrupted`, with `fix`, if one of `STOPPING` cancelled it."""
    with stoppable() as received:
        try:
            return await job
        except asyncio.CancelledError:
            if not received:
                raise
            raise Interrupted(f"{received[0]}: stopped", fix=fix) from None


def _silence(descriptor: int) -> None:
    # writing to a closed terminal is an error
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
