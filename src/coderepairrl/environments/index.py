"""The one way out of a sandbox that builds an environment: to the hosts of the package index, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

_PYPI = ("pypi.org", "files.pythonhosted.org")
_SETTINGS = {
    "UV_DEFAULT_INDEX": ("UV_INDEX_URL", "PIP_INDEX_URL"),
    "UV_FIND_LINKS": ("PIP_FIND_LINKS",),
    "UV_NO_INDEX": ("PIP_NO_INDEX",),
}
"""Variables of uv, and which ones of pip mean the same."""
_HEAD_BYTES = 16 << 10
_PIECE = 1 << 16
_PORT = 443
_NAMED, _NAME_LENGTH = 100, 300
"""Of the hosts that are refused: so many are kept, cut to so many characters."""


def index_settings() -> dict[str, str]:
    """How this machine's users set up the package index, as variables of uv. Lists are separated by commas."""
    found = {
        name: next((os.environ[each] for each in (name, *others) if os.environ.get(each)), "")
        for name, others in _SETTINGS.items()
    }
    found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].replace(",", " ").split())
    return {name: value for name, value in found.items() if value}


def pip_settings() -> dict[str, str]:
    """`index_settings` as variables of pip, whose lists are separated by blanks."""
    found = {other: value for name, value in index_settings().items() for other in _SETTINGS[name] if other[0] == "P"}
    return found | ({"PIP_FIND_LINKS": links.replace(",", " ")} if (links := found.get("PIP_FIND_LINKS")) else {})


def index_hosts() -> tuple[str, ...]:
    """Hosts that the index and its files are served by."""
    own = urlsplit(index_settings().get("UV_DEFAULT_INDEX", "")).hostname
    return (own, *_PYPI) if own else _PYPI


def local_folders() -> list[str]:
    """Folders of wheels on this machine, which a build must see."""
    links = index_settings().get("UV_FIND_LINKS", "").split(",")
    return [each for each in links if each.startswith("/") and Path(each).is_dir()]


@asynccontextmanager
async def proxy(socket: Path, hosts: Collection[str]) -> AsyncIterator[list[str]]:
    """An HTTPS proxy (``CONNECT``) on the Unix socket `socket` that leads to `hosts` alone.

    Yields the hosts that were asked for and refused, as they come.
    """
    refused: list[str] = []
    open_ones: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await _connect(reader, writer, hosts, refused)
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(serve(reader, writer))
        open_ones.add(connection)
        connection.add_done_callback(open_ones.discard)

    server = await asyncio.start_unix_server(accept, path=socket, limit=_HEAD_BYTES)
    socket.chmod(0o666)  # the guest's side is another user's
    try:
        yield refused
    finally:
        server.close()
        for connection in open_ones:
            connection.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        socket.unlink(missing_ok=True)


async def _connect(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hosts: Collection[str], refused: list[str]
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    method, _, rest = head.partition(" ")
    target = rest.partition(" ")[0]
    host, _, port = target.rpartition(":")
    if method != "CONNECT" or host not in hosts or port != str(_PORT):
        if len(refused) < _NAMED:
            refused.append(target[:_NAME_LENGTH])
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return
    try:
        far_reader, far_writer = await asyncio.open_connection(host, _PORT)
    except OSError:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
