"""Runs a command and ends all of its processes when its owner is gone.

``python guard.py OWNER FOLDER COMMAND...``: some of vLLM's processes outlive their parent and keep a GPU's memory. The
command ends gracefully when the process OWNER (the controller) closes stdin, at once when OWNER was killed or on
SIGTERM. Then FOLDER, with the server's socket, is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL; the controller waits a little longer (`VllmServer.close`)."""
SWEEP = 5.0
"""Seconds for Python's resource trackers to remove the shared memory of killed processes."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run until the process group is gone; exit with the command's status."""
    libc = ctypes.CDLL(None)
    server = subprocess.Popen(
        sys.argv[3:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # if this process is killed
    )

    signal.signal(signal.SIGTERM, lambda *_: _kill_group(server.pid))
    ended = os.pidfd_open(server.pid)
    ready, _, _ = select.select([sys.stdin.fileno(), ended], [], [])
    if ended not in ready:
        server.terminate()
        deadline = time.monotonic() + GRACE
        # a killed process closes its files a moment before its children get a new parent
        while os.getppid() == int(sys.argv[1]) and time.monotonic() < deadline and ended not in ready:
            ready, _, _ = select.select([ended], [], [], 0.05)
    _kill_group(server.pid)
    status = server.wait()
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    sys.exit(status if status >= 0 else 128 - status)


def _kill_group(group: int) -> None:
    """Kill the group, resource trackers last."""
    # once the others are gone, resource trackers clear /dev/shm and exit
    deadline = time.monotonic() + SWEEP
    while time.monotonic() < deadline and (alive := list(_iter_alive(group))):
        for pid, tracks in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if tracks else signal.SIGKILL)  # a tracker may have been stopped
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # the group exists as long as any member, unreaped ones included
        os.killpg(group, signal.SIGKILL)


def _iter_alive(group: int) -> Iterator[tuple[int, bool]]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, member_of = (process / "stat").read_text().rpartition(") ")[2].split()[:3]
            if int(member_of) == group and state not in "ZX":
                yield int(process.name), b"multiprocessing.resource_tracker" in (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has just gone
            continue


if __name__ == "__main__":
    main()
