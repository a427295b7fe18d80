"""Naive keeper for controls: a parent whose socket its commands inherit.

``python3 -c <this file> DESCRIPTOR SCRIPT`` runs a bash script; answers ``fine`` unless its priority changed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def rank() -> tuple[int, int]:
    """Our priority and scheduling."""
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


if __name__ == "__main__":
    ours = socket.socket(fileno=int(sys.argv[1]))
    before = rank()
    subprocess.run(["bash", "-c", sys.argv[2]], pass_fds=[ours.fileno()], stdin=subprocess.DEVNULL)
    open("/dev/null").close()
    if rank() == before:
        ours.sendall(b"fine\n")
