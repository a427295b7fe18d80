"""Naive counterparts of ours, for controls: ``python3 -c <this file> NAME ...``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def keeper(descriptor: str, script: str) -> None:
    """Run a bash script that inherits our socket; answer ``fine`` unless our priority changed."""
    ours = socket.socket(fileno=int(descriptor))
    before = rank()
    subprocess.run(["bash", "-c", script], pass_fds=[ours.fileno()], stdin=subprocess.DEVNULL)
    open("/dev/null").close()
    if rank() == before:
        ours.sendall(b"fine\n")


def rank() -> tuple[int, int]:
    """Our priority and scheduling."""
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


def diff() -> None:
    """Print a diff: read files as text, name them by line, and trust the repository's git."""
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if name != ".git"]
        for name in "\n".join(files).split("\n"):
            if name:
                open(os.path.join(folder, name), encoding="utf-8").read()
                name.encode()
    subprocess.run(["git", "add", "-A"], check=True)
    changes = subprocess.run(["git", "diff", "--cached", "HEAD"], check=True, capture_output=True).stdout
    sys.stdout.buffer.write(changes)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
