"""Clock, and meter of time, processors, GPUs and energy used by this process and its descendants.

Containers of a daemon are not included. Energy is that of whole devices: RAPL packages (/sys/class/powercap) and NVML
GPUs. GPU time is the wall time of visible GPUs, busy or not. Most kernels show RAPL to root only, and virtual machines
have none.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
_MICRO, _MILLI = 1e6, 1e3
_BEGAN = time.time() - time.monotonic()


def unix_time() -> float:
    """Unix time in seconds, unaffected by adjustments of the machine's clock."""
    return _BEGAN + time.monotonic()


class ResourceUsage(NamedTuple):
    """Seconds and joules; None if unreadable."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    cpu_joules: float | None = 0.0
    gpu_seconds: float | None = 0.0
    gpu_joules: float | None = 0.0

    def plus(self, other: ResourceUsage) -> ResourceUsage:
        """Add `other`; None if either is.

        >>> ResourceUsage(1.0, 2.0, None).plus(ResourceUsage(1.0, 0.5, 3.0))[:3]
        (2.0, 2.5, None)
        """

        pairs: zip[tuple[float | None, float | None]] = zip(self, other, strict=True)
        return ResourceUsage._make(None if a is None or b is None else a + b for a, b in pairs)


class Meter:
    """Meter since its creation. `read` it at least every 15 minutes: RAPL counters wrap after some 260 kJ."""

    def __init__(self, *, powercap: Path = POWERCAP, nvml: str = NVML) -> None:
        self._powercap, self._gpus = powercap, _open_gpus(nvml)
        self._started, self._cpu = time.monotonic(), cpu_seconds()
        self._rapl, self._cpu_joules = self._read_rapl(), 0.0
        self._gpu_joules = self._read_gpu_joules()

    def read(self) -> ResourceUsage:
        """Usage since creation."""
        seconds = time.monotonic() - self._started
        now, before = self._read_rapl(), self._rapl
        if now is None or before is None or now.keys() != before.keys():
            joules = None
        else:
            self._cpu_joules += sum((now[key][0] - before[key][0]) % now[key][1] for key in now) / _MICRO
            joules = self._cpu_joules
        self._rapl = now if joules is not None else None
        energy = self._read_gpu_joules()
        return ResourceUsage(
            round(seconds, 3),
            round(max(0.0, cpu_seconds() - self._cpu), 3),
            joules,
            None if self._gpus is None else round(seconds * len(self._gpus[1]), 3),
            None if energy is None or self._gpu_joules is None else energy - self._gpu_joules,
        )

    def _read_rapl(self) -> dict[str, tuple[int, int]] | None:
        try:
            packages = [path for path in self._powercap.glob("intel-rapl:*") if path.name.count(":") == 1]
            return {
                path.name: (_read_int(path / "energy_uj"), _read_int(path / "max_energy_range_uj") + 1)
                for path in packages
            } or None
        except (OSError, ValueError):
            return None

    def _read_gpu_joules(self) -> float | None:
        if self._gpus is None:
            return None
        library, handles = self._gpus
        total = 0
        for handle in handles:
            value = ctypes.c_ulonglong()
            if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)):
                return None
            total += value.value
        return total / _MILLI


def sum_usage(records: Iterable[Mapping[str, Any]]) -> ResourceUsage | None:
    """Sum of a run's ``used`` records; None for older runs."""
    sessions: list[ResourceUsage | None] = [None]
    for record in records:
        if record["type"] == "start":
            sessions.append(None)
        elif record["type"] == "used":
            sessions[-1] = ResourceUsage(*(record[key] for key in ResourceUsage._fields))
    complete = [each for each in sessions if each is not None]
    return reduce(ResourceUsage.plus, complete) if complete else None


def format_usage(used: ResourceUsage) -> str:
    """Format for people.

    >>> format_usage(ResourceUsage(60.0, 90.0, None, None, None))
    '60 s; processors 90 s, energy not readable; GPUs not readable'
    """
    energy = "energy not readable" if used.cpu_joules is None else f"{used.cpu_joules / 3600:,.1f} Wh"
    gpus = "GPUs not readable"
    if used.gpu_seconds is not None:
        joules = "energy not readable" if used.gpu_joules is None else f"{used.gpu_joules / 3600:,.1f} Wh"
        gpus = f"GPUs {used.gpu_seconds:,.0f} s, {joules}"
    return f"{used.seconds:,.0f} s; processors {used.cpu_seconds:,.0f} s, {energy}; {gpus}"


def _read_int(path: Path) -> int:
    return int(path.read_text())


def cpu_seconds() -> float:
    """Processor time of this process and its descendants, including ended ones."""
    used: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text(errors="replace").rpartition(") ")[2].split()
            used[int(entry.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    if os.getpid() not in used:  # no /proc: children count once they have ended
        return sum(os.times()[:4])
    family = children = {os.getpid()}
    while children := {pid for pid, (parent, _) in used.items() if parent in children} - family:
        family = family | children
    return sum(used[pid][1] for pid in family) / os.sysconf("SC_CLK_TCK")


def _open_gpus(name: str) -> tuple[ctypes.CDLL, list[ctypes.c_void_p]] | None:
    # NVML and handles of the visible GPUs
    try:
        library = ctypes.CDLL(name)
        if library.nvmlInit_v2():
            return None
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
    except (OSError, AttributeError):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        [*map(str, range(count.value))] if visible is None else [*filter(None, map(str.strip, visible.split(",")))]
    )
    handles = []
    for device in devices:
        handle = ctypes.c_void_p()
        if device.isdecimal():
            failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
        else:
            failed = library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        if failed:
            return None
        handles.append(handle)
    return library, handles
