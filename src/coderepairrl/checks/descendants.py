"""Find, stop and kill descendants of a process, orphans included (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def below(root: int) -> dict[int, bytes]:
    """Live descendants of `root`, with command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(") ")[2].split()[:2]
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    commands: dict[int, bytes] = {}
    fresh = {root}
    while fresh := {pid for pid, parent in parents.items() if parent in fresh}:
        for pid in fresh:
            with contextlib.suppress(OSError):
                commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    return commands


def freeze(root: int) -> list[int]:
    """Stop `root` and descendants, so that none starts another; return ids."""
    stopped: list[int] = []
    while fresh := [pid for pid in (root, *below(root)) if pid not in stopped]:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped += fresh
    return stopped


def kill_all(root: int) -> None:
    """Kill `root` and descendants."""
    for pid in (root, *below(root)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def adopting() -> Iterator[None]:
    """Adopt orphaned descendants meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
        _kill_children()


def _kill_children() -> None:
    for pid in below(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
