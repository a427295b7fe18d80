"""Signals of this process, and its limit on open files."""

from __future__ import annotations

import asyncio
import os
import resource
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
def cancel_on_signal() -> Iterator[list[str]]:
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
            null = os.open(os.devnull, os.O_WRONLY)
            for descriptor in terminals:  # writing to a closed one is an error
                os.dup2(null, descriptor)
            os.close(null)
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


async def run_until_interrupted(job: Coroutine[Any, Any, T], fix: str = "") -> T:
    """Await `job`. Raises `Interrupted`, with `fix`, if one of `STOPPING` cancelled it."""
    with cancel_on_signal() as received:
        try:
            return await job
        except asyncio.CancelledError:
            if not received:
                raise
            raise Interrupted(f"{received[0]}: stopped", fix=fix) from None


OPEN_FILES = 1 << 16


def raise_open_file_limit() -> None:
    """Raise the limit on open files towards `OPEN_FILES`."""
    # shells allow 1,024: too few for several agents' connections, and descriptors sent through sockets but not yet
    # received count against the limit for all sandboxes of a user together
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, most))
