"""CPU time of a step by stage and process, for programs that take turns (`peers.py`)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MODULES = {"coderepairrl.engines.tiny.server": "engine", "coderepairrl.learn.learner": "learner"}
"""Child processes that are counted by themselves; all others count as ``sandbox``."""
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_by_process() -> dict[str, float]:
    """User and system seconds of this process (``own``) and its descendants (``engine``, ``learner`` and ``sandbox``),
    ended ones included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text(errors="replace").rpartition(") ")[2].split()
            pid = int(entry.parent.name)
            children.setdefault(int(fields[1]), []).append(pid)
            ticks[pid] = sum(map(int, fields[11:15]))
    self_pid = os.getpid()
    ended = os.times()
    seconds = {"own": time.process_time(), "engine": 0.0, "learner": 0.0}
    seconds["sandbox"] = ended.children_user + ended.children_system
    below = [(pid, _kind(pid)) for pid in children.get(self_pid, ())]
    while below:
        pid, kind = below.pop()
        seconds[kind] += ticks[pid] / _TICKS
        below += [(child, kind) for child in children.get(pid, ())]
    return seconds


def _kind(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        return next((MODULES[word] for word in words if word in MODULES), "sandbox")
    return "sandbox"


class Stages:
    """CPU seconds of a step by stage and process; nested stages are charged to the innermost."""

    def __init__(self) -> None:
        self._open: list[str] = []

    def begin(self) -> None:
        """Begin a step, in the stage ``rest``."""
        self._spent: dict[str, float] = {}
        self._open, self._last, self._began = ["rest"], cpu_by_process(), time.monotonic()

    def enter(self, stage: str) -> None:
        """Switch from the current stage to `stage`."""
        if self._open:
            self._charge_current_stage()
            self._open[-1] = stage

    def leave(self) -> None:
        """Stop measuring until the next `begin`."""
        self._open = []

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """Charge the block to `stage`."""
        if self._open:
            self._charge_current_stage()
            self._open.append(stage)
        yield
        if self._open:
            self._charge_current_stage()
            self._open.pop()

    def end(self) -> dict[str, Any]:
        """End the step: ``wall`` seconds, and ``cpu`` seconds by ``STAGE/PROCESS``."""
        self._charge_current_stage()
        self._open = []
        return {"wall": time.monotonic() - self._began, "cpu": self._spent}

    def _charge_current_stage(self) -> None:
        now = cpu_by_process()
        for process, seconds in now.items():
            key = f"{self._open[-1]}/{process}"
            self._spent[key] = self._spent.get(key, 0.0) + seconds - self._last[process]
        self._last = now


class Turns:
    """The contestant's side of the protocol: a line on stdin is its turn, a line of JSON on stdout its result."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # output of libraries must not mix with results

    def wait(self) -> None:
        """Wait for the turn. Raises `SystemExit` when there are no more."""
        self.tell({"ready": True})
        if not sys.stdin.readline():
            raise SystemExit(0)

    def tell(self, result: dict[str, Any]) -> None:
        """Write one line of JSON."""
        print(json.dumps(result), file=self._out, flush=True)
