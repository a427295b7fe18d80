"""Where a server is reached: an address, or the socket of one that a process of ours has started for several runs
(`processes.hosting`)."""

from __future__ import annotations

import json
import socket
import urllib.request
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urljoin

from coderepairrl.processes import hosting

UNIX = "unix:"
"""Before the path of a socket, as an address."""
_SECONDS = 10.0


def socket_of(url: str) -> str | None:
    """The path of the socket that ``unix:PATH`` names, PATH itself or what it links to; None for other addresses.

    >>> socket_of("http://127.0.0.1:8000"), socket_of("unix:/tmp/a/../socket")
    (None, '/tmp/socket')
    """
    return str(Path(url.removeprefix(UNIX)).resolve()) if url.startswith(UNIX) else None


def claimed(url: str) -> bool:
    """Whether a process that lives has or starts the server at `url`; False for one that is no socket of ours."""
    return url.startswith(UNIX) and hosting.claimed(Path(url.removeprefix(UNIX)))


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
