"""Where a server is reached: an address, or the socket of one that a process of ours has started for several runs.

Such a process holds a lock beside the socket, which the kernel releases however it ends: who joins can tell a server
that is being started, for the first time or again, from one that nobody will start.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urljoin

from coderepairrl.errors import UsageError

UNIX = "unix:"
"""Before the path of a socket, as an address."""
_SECONDS = 10.0
_PROBED = 1.0
"""Seconds for which others may hold the lock to see whether it is held."""


def socket_of(url: str) -> str | None:
    """The path of the socket that ``unix:PATH`` names, PATH itself or what it links to; None for other addresses.

    >>> socket_of("http://127.0.0.1:8000"), socket_of("unix:/tmp/a/../socket")
    (None, '/tmp/socket')
    """
    return str(Path(url.removeprefix(UNIX)).resolve()) if url.startswith(UNIX) else None


def claim(address: Path) -> int:
    """Lock `address` for a server of this process; the descriptor that holds the lock.

    Raises `UsageError` where another process has one there.
    """
    address.parent.mkdir(parents=True, exist_ok=True)
    descriptor, deadline = os.open(_lock(address), os.O_RDWR | os.O_CREAT, 0o600), time.monotonic() + _PROBED
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise UsageError(
                    f"another process has a server at {address}", fix="wait for its end: each would need its own"
                ) from None
            time.sleep(0.05)


def claimed(url: str) -> bool:
    """Whether a process that lives has or starts the server at `url`; False for one that is no socket of ours."""
    if not url.startswith(UNIX):
        return False
    try:
        descriptor = os.open(_lock(Path(url.removeprefix(UNIX))), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def lead(address: Path, to: Path) -> None:
    """Have `address` name the socket `to`, whatever it named before."""
    fresh = address.with_name(f"{address.name}.new")
    with suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(to)
    fresh.replace(address)


def version_at(url: str) -> str:
    """Version of the server at `url`; "unknown" if it does not report one, which `check_version` refuses later."""
    try:
        if (path := socket_of(url)) is not None:
            connection = _Socket(path)
            try:
                connection.request("GET", "/version")
                return str(json.load(connection.getresponse())["version"])
            finally:
                connection.close()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without proxy, as all calls of a run
        with direct.open(urljoin(url, "/version"), timeout=_SECONDS) as answer:
            return str(json.load(answer)["version"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return "unknown"


class _Socket(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _lock(address: Path) -> Path:
    return address.with_name(f"{address.name}.lock")
