"""The proxy to the package index, the only network access of builds in sandboxes.

PyPI is tunneled (``CONNECT``). A user's index is fetched here, to hide its login; builds get its pages and the files
they link.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
from yarl import URL

from coderepairrl.environments.index import Index, origin_of

_HEAD_BYTES = 16 << 10
_PIECE = 1 << 16
_PORT = 443
_NAMED, _NAME_LENGTH = 100, 300
"""Number and length of kept refusals."""
_PATIENCE = 30.0
"""Seconds for the head of a request, and for connecting to a host."""
_IDLE = 300.0
"""Seconds of silence on a connection. The sandbox limits their number (`Limits`)."""
_PAGES = re.compile(r"text/html|application/vnd\.pypi\.simple\.")
_LINK = re.compile(rb"""(?:href\s*=\s*|"url"\s*:\s*)["']([^"'#]+)""", re.IGNORECASE)
_ASKED = ("accept", "range", "if-none-match", "if-modified-since", "user-agent")
_ANSWERED = ("content-type", "content-range", "accept-ranges", "etag", "last-modified", "cache-control", "retry-after")


@asynccontextmanager
async def proxy(socket: Path, hosts: Collection[str], index: Index | None = None) -> AsyncIterator[list[str]]:
    """Serve tunnels to port 443 of `hosts`, and `index`, on a Unix socket. Yields refused targets."""
    async with _client() as client:
        served = _Proxy(hosts, index, client)
        server = await asyncio.start_unix_server(served.accept, path=socket, limit=_HEAD_BYTES)
        socket.chmod(0o666)  # the guest's side is another user's
        try:
            yield served.refused
        finally:
            server.close()
            for connection in served.connections:
                connection.cancel()
            await asyncio.gather(*served.connections, return_exceptions=True)
            socket.unlink(missing_ok=True)


def _client() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_PATIENCE, sock_read=_IDLE)
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context())
    return aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=True)


class _Proxy:
    def __init__(self, hosts: Collection[str], index: Index | None, client: aiohttp.ClientSession) -> None:
        self.hosts, self.index, self.client = hosts, index, client
        self.refused: list[str] = []
        self.connections: set[asyncio.Task[None]] = set()
        self._named: set[str] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self.connections.add(connection)
        connection.add_done_callback(self.connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, aiohttp.ClientError):
            async with asyncio.timeout(_PATIENCE):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, _, rest = head[0].partition(" ")
            target = rest.partition(" ")[0]
            host, _, port = target.rpartition(":")
            path = self._path(target)
            if method == "CONNECT" and host in self.hosts and port == str(_PORT):
                await self._tunnel(host, reader, writer)
            elif method in ("GET", "HEAD") and path:
                fields = (line.partition(":")[::2] for line in head[1:])
                await self._fetch(method, path, {name.lower(): value.strip() for name, value in fields}, writer)
            else:
                if len(self.refused) < _NAMED:
                    self.refused.append(target[:_NAME_LENGTH])
                await _write_response(writer, 403)
        writer.close()

    def _path(self, target: str) -> str:
        """Path and query of an allowed request to `index`, else ""."""
        parts = urlsplit(target)
        plain = unquote(parts.path)
        if self.index is None or not plain.startswith("/") or {".", ".."} & set(re.split(r"[/\\]", plain)):
            return ""
        is_named = plain.removesuffix(".metadata") in self._named
        if not is_named and not f"{plain}/".startswith(self.index.paths):
            return ""
        return parts._replace(scheme="", netloc="", fragment="").geturl()

    async def _fetch(self, method: str, path: str, received: dict[str, str], writer: asyncio.StreamWriter) -> None:
        assert self.index is not None
        headers = {name: received[name] for name in _ASKED if name in received}
        headers |= {"Authorization": self.index.login} if self.index.login else {}
        headers |= {"Accept-Encoding": "identity"} if "range" in received else {}
        url = URL(f"{self.index.origin}{path}", encoded=True)
        try:
            async with self.client.request(method, url, headers=headers, allow_redirects=False) as response:
                await self._hand_on(method, str(url), response, writer)
        except (aiohttp.ClientConnectionError, TimeoutError, OSError):
            await _write_response(writer, 502)

    async def _hand_on(
        self, method: str, url: str, response: aiohttp.ClientResponse, writer: asyncio.StreamWriter
    ) -> None:
        assert self.index is not None
        fields = {name: value for name in _ANSWERED if (value := response.headers.get(name))}
        if moved := response.headers.get("location"):
            fields["location"] = self._own(urljoin(url, moved))
        if method == "GET" and response.status == HTTPStatus.OK and _PAGES.match(response.content_type):
            page = _LINK.sub(lambda link: self._rewritten(link, url), await response.read())
            await _write_response(writer, response.status, fields | {"content-length": str(len(page))}, page)
            return
        if (length := response.headers.get("content-length")) and "content-encoding" not in response.headers:
            fields["content-length"] = length
        await _write_response(writer, response.status, fields)
        async for piece in response.content.iter_chunked(_PIECE):
            writer.write(piece)
            async with asyncio.timeout(_IDLE):
                await writer.drain()

    def _rewritten(self, link: re.Match[bytes], page: str) -> bytes:
        rewritten_url = self._own(urljoin(page, link[1].decode("utf-8", "surrogateescape")))
        return link[0].replace(link[1], rewritten_url.encode("utf-8", "surrogateescape"))

    def _own(self, url: str) -> str:
        # relative to the proxy, and allowed, if within the index
        parts = urlsplit(url)
        if self.index is None or origin_of(parts) != self.index.origin:
            return url
        self._named.add(unquote(parts.path))
        return parts._replace(scheme="", netloc="").geturl()

    async def _tunnel(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                far_reader, far_writer = await asyncio.open_connection(host, _PORT)
        except OSError:  # TimeoutError among them
            await _write_response(writer, 502)
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _write_response(
    writer: asyncio.StreamWriter, code: int, fields: dict[str, str] | None = None, body: bytes = b""
) -> None:
    head = {"content-length": "0"} if fields is None else fields
    lines = [f"HTTP/1.1 {code} {HTTPStatus(code).phrase}", *(f"{name}: {value}" for name, value in head.items())]
    writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1") + body)
    await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # TimeoutError among them
        while True:
            async with asyncio.timeout(_IDLE):
                piece = await reader.read(_PIECE)
                if not piece:
                    break
                writer.write(piece)
                await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
