"""Clock, and meter of time, processors and GPUs used by this process and its descendants.

Containers of a daemon are not included. GPU time is the wall time of visible GPUs, busy or not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_MONOTONIC_ZERO = time.time() - time.monotonic()  # as Unix time


def unix_time() -> float:
    """Unix time in seconds, unaffected by adjustments of the machine's clock."""
    return _MONOTONIC_ZERO + time.monotonic()


class ResourceUsage(NamedTuple):
    """Usage in seconds."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    gpu_seconds: float = 0.0


class Meter:
    """Measures usage since its creation."""

    def __init__(self) -> None:
        self._started, self._cpu, self._gpus = time.monotonic(), cpu_seconds(), len(list_visible_gpus())

    def read(self) -> ResourceUsage:
        """Usage since creation."""
        seconds, cpu = time.monotonic() - self._started, max(0.0, cpu_seconds() - self._cpu)
        return ResourceUsage(round(seconds, 3), round(cpu, 3), round(seconds * self._gpus, 3))


def sum_usage(records: Iterable[Mapping[str, Any]]) -> ResourceUsage | None:
    """Sum of a run's ``used`` records; None without any."""
    # a process repeatedly writes its usage since its start: only the last record counts
    sessions: list[ResourceUsage | None] = [None]
    for record in records:
        if record["type"] == "start":
            sessions.append(None)
        elif record["type"] == "used":
            sessions[-1] = ResourceUsage(*(record[key] or 0.0 for key in ResourceUsage._fields))
    complete = [each for each in sessions if each is not None]
    return ResourceUsage(*map(sum, zip(*complete, strict=True))) if complete else None


def format_usage(used: ResourceUsage) -> str:
    """Format for people.

    >>> format_usage(ResourceUsage(60.0, 90.0, 120.0))
    '60 s; processors 90 s; GPUs 120 s'
    """
    return f"{used.seconds:,.0f} s; processors {used.cpu_seconds:,.0f} s; GPUs {used.gpu_seconds:,.0f} s"


def list_visible_gpus() -> list[str]:
    """GPUs visible to this process, as CUDA names them."""
    listed = os.environ.get(VISIBLE_GPUS)
    if listed is None:
        return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    # CUDA ignores the rest of the list after an invalid name
    return list(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in listed.split(","))))


def cpu_seconds() -> float:
    """Processor time of this process and its descendants, including ended ones."""
    used: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text(errors="replace").rpartition(") ")[2].split()
            used[int(entry.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    if os.getpid() not in used:  # no /proc: children count once they have ended
        return sum(os.times()[:4])
    # add the children of those added last, until none is new
    family = children = {os.getpid()}
    while children := {pid for pid, (parent, _) in used.items() if parent in children} - family:
        family = family | children
    return sum(used[pid][1] for pid in family) / os.sysconf("SC_CLK_TCK")
