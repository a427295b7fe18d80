"""Escape attempts run inside a sandbox: ``python -c TEXT SECRET OUTSIDE SOCKET PORT OTHER_PORT``.

Prints a line per attempt, ending in ``works`` or ``refused``, then one line on two actions that must work. SECRET is a
file to read, OUTSIDE one to write, SOCKET a Unix socket, all open to any user; PORT is permitted, OTHER_PORT forbidden.
Imports only the standard library.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable


def try_action(action: Callable[[], object]) -> str:
    """``refused`` if `action` raises OSError, else ``works``."""
    try:
        action()
    except OSError:
        return "refused"
    return "works"


def connect(port: int, host: str = "127.0.0.1") -> None:
    """Connect over TCP."""
    with socket.socket() as connection:
        connection.connect((host, port))


def connect_unix(address: str) -> None:
    """Connect to a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)


def main(secret: str, outside: str, address: str, port: int, other: int) -> None:
    """Try all and print."""
    attempts: dict[str, Callable[[], object]] = {
        "reads a file of the host": lambda: open(secret).close(),
        "writes outside the workspace": lambda: open(outside, "w").close(),
        "changes a mode outside the workspace": lambda: os.chmod(outside, 0o700),
        "reaches the host's loopback": lambda: connect(other),
        "reaches another address": lambda: connect(port, "127.0.0.2"),
        "reaches a Unix socket": lambda: connect_unix(address),
        "has UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9)),
        "signals its supervisor": lambda: os.kill(os.getppid(), 0),
    }
    for description, attempt in attempts.items():
        print(description, try_action(attempt))
    print("WORKSPACE", try_action(lambda: open("probe", "w").close()), "BRIDGE", try_action(lambda: connect(port)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], port=int(sys.argv[4]), other=int(sys.argv[5]))
