"""The package index for builds: its settings, the proxy to it, and the causes of failed builds.

The proxy is the only network access of builds in sandboxes. It tunnels PyPI (``CONNECT``), but fetches a user's index
itself, to hide the login. Commands of Dockerfiles also reach npm's registry and mirrors of distributions; plain HTTP
goes to the mirrors and the proxy that this machine's apt uses.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import aiohttp
from yarl import URL

from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError
from coderepairrl.printable import printable

PYPI = ("pypi.org", "files.pythonhosted.org")
"""Hosts that builds reach directly."""
_REGISTRIES = ("registry.npmjs.org", "dl-cdn.alpinelinux.org", "deb.debian.org", "security.debian.org",
               "archive.ubuntu.com", "security.ubuntu.com", "ports.ubuntu.com")  # fmt: skip
_REPOSITORIES = ("debian", "debian-security", "ubuntu", "ubuntu-ports")
"""Folders of distributions, equal on all mirrors."""
_SETTINGS = {
    "UV_DEFAULT_INDEX": ("UV_INDEX_URL", "PIP_INDEX_URL"),
    "UV_FIND_LINKS": ("PIP_FIND_LINKS",),
    "UV_NO_INDEX": ("PIP_NO_INDEX",),
}
"""Variables of uv, and pip's equivalents."""
_PORTS = {"http": 80, "https": 443}
_HEAD_BYTES = 16 << 10
_CHUNK_BYTES = 1 << 16
_PORT = 443
_MAX_REFUSED, _MAX_TARGET_LENGTH = 100, 300
"""Number and length of the refused targets that are kept."""
_CONNECT_SECONDS = 30.0
"""Seconds for reading the head of a request, and for connecting to a host."""
_IDLE_SECONDS = 300.0
"""Seconds of silence on a connection."""
_PAGES = re.compile(r"text/html|application/vnd\.pypi\.simple\.")
_LINK = re.compile(rb"""(?:href\s*=\s*|"url"\s*:\s*)["']([^"'#]+)""", re.IGNORECASE)
_REQUEST_HEADERS = ("accept", "range", "if-range", "if-none-match", "if-modified-since", "user-agent")
_RESPONSE_HEADERS = (
    "content-type", "content-range", "accept-ranges", "etag", "last-modified", "cache-control", "retry-after"
)  # fmt: skip


class PackageIndex(NamedTuple):
    """The user's package index, with a login hidden from builds."""

    origin: str
    """``https://HOST:PORT``."""
    login: str
    paths: tuple[str, ...]
    """Allowed paths and everything below; others must be linked from a page."""

    @classmethod
    def parse(cls, url: str, links: Sequence[str] = ()) -> Self:
        """Index at `url`, including `links` of the same origin.

        >>> index = PackageIndex.parse("https://me:secret@example.org/team/simple/")
        >>> index.origin, index.paths
        ('https://example.org:443', ('/team/simple/',))
        """
        parts = urlsplit(url)
        pages = [parts, *(link for link in map(urlsplit, links) if format_origin(link) == format_origin(parts))]
        login = ""
        if parts.username is not None:
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            login = f"Basic {base64.b64encode(words.encode()).decode()}"
        return cls(format_origin(parts), login, tuple(f"{page.path.rstrip('/')}/" for page in pages))


def format_origin(parts: SplitResult) -> str:
    """``SCHEME://HOST:PORT`` of an HTTP URL, else ""."""
    if parts.scheme not in _PORTS or not parts.hostname:
        return ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or _PORTS[parts.scheme]}"


def read_user_index() -> PackageIndex | None:
    """Configured replacement of PyPI, if any."""
    settings = _read_index_settings()
    url = settings.get("UV_DEFAULT_INDEX", "")
    return PackageIndex.parse(url, _split_links(settings)) if format_origin(urlsplit(url)) else None


def make_uv_settings(index: PackageIndex | None, proxy: str) -> dict[str, str]:
    """Variables of uv for a build that reaches `index` through `proxy` (``http://HOST:PORT``)."""
    settings = _read_index_settings()
    urls = [_rewrite_index_url(url, index, proxy) for url in _split_links(settings)]
    if "UV_DEFAULT_INDEX" in settings:
        settings["UV_DEFAULT_INDEX"] = _rewrite_index_url(settings["UV_DEFAULT_INDEX"], index, proxy)
    return settings | ({"UV_FIND_LINKS": ",".join(urls)} if urls else {})


def make_pip_settings(uv_settings: Mapping[str, str]) -> dict[str, str]:
    """`make_uv_settings` as variables of pip."""
    settings = {pip: value for name, value in uv_settings.items() for pip in _SETTINGS[name] if pip.startswith("PIP_")}
    if "PIP_FIND_LINKS" in settings:  # pip separates them by spaces, uv by commas
        settings["PIP_FIND_LINKS"] = settings["PIP_FIND_LINKS"].replace(",", " ")
    return settings


class Mirrors(NamedTuple):
    """Mirrors of distributions that commands of Dockerfiles reach, and those that replace them on this machine."""

    hosts: tuple[str, ...]
    urls: Mapping[str, str]
    """By name of the folder (``debian``), where this machine's apt finds it."""
    proxy: str | None
    """This machine's apt proxy."""


@cache
def find_mirrors() -> Mirrors:
    """Read this machine's settings of apt, if it has one. Raises `PrerequisiteError`."""
    if shutil.which("apt-get") is None:
        return Mirrors(_REGISTRIES, {}, None)
    files = (
        word.strip("'") for word in _read_apt_settings("apt-get", "update", "--print-uris") if word.startswith("'http")
    )
    urls = list(dict.fromkeys(f"{file.partition('/dists/')[0]}/" for file in files))
    hosts = dict.fromkeys((*_REGISTRIES, *(urlsplit(url).netloc.rpartition("@")[2] for url in urls)))
    mirrors = {folder: url for url in urls if (folder := url.split("/")[-2]) in _REPOSITORIES}
    apt_proxy = "".join(_read_apt_settings("apt-config", "dump", "--format", "%v%n", "Acquire::http::Proxy"))
    return Mirrors(tuple(hosts), mirrors, apt_proxy if format_origin(urlsplit(apt_proxy)) else None)


def _read_apt_settings(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise PrerequisiteError(f"apt's settings cannot be read: {done.stderr.strip()}", fix=" ".join(command))
    return done.stdout.split()


_CERTIFICATES = "certificates.crt"
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
             "NODE_EXTRA_CA_CERTS")  # fmt: skip
_APT_SETTINGS = """APT::Sandbox::User "root";
Acquire::http::Pipeline-Depth "0";
DPkg::Options:: "--force-unsafe-io";
"""
"""Settings of apt for a single user behind the proxy, without waiting until files are on disk."""


def make_installer_files(folder: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Settings of apt and certificates (``SSL_CERT_FILE``) as files in `folder`, and the variables that name them.

    Raises `PrerequisiteError`.
    """
    apt, variables = _APT_SETTINGS, {"APT_CONFIG": f"{folder}/apt.conf"}
    files: dict[str, bytes] = {}
    if certificates := os.environ.get("SSL_CERT_FILE"):
        try:
            files[_CERTIFICATES] = Path(certificates).read_bytes()
        except OSError as error:
            raise PrerequisiteError(f"SSL_CERT_FILE: {error}", fix="name a file of certificates") from error
        variables |= dict.fromkeys(_CERTIFICATE_VARIABLES, f"{folder}/{_CERTIFICATES}")
        apt += f'Acquire::https::CAInfo "{folder}/{_CERTIFICATES}";\n'
    return files | {"apt.conf": apt.encode()}, variables


def list_wheel_folders() -> list[str]:
    """Local folders of wheels."""
    return [each for each in _split_links(_read_index_settings()) if each.startswith("/") and Path(each).is_dir()]


def _read_index_settings() -> dict[str, str]:
    return {
        name: value
        for name, alternatives in _SETTINGS.items()  # the first variable that is set counts
        if (value := next(filter(None, map(os.environ.get, (name, *alternatives))), None))
    }


def _split_links(settings: dict[str, str]) -> list[str]:
    return settings.get("UV_FIND_LINKS", "").replace(",", " ").split()


def _rewrite_index_url(url: str, index: PackageIndex | None, proxy: str) -> str:
    # without login, and through the proxy if within `index`
    parts = urlsplit(url)
    if not format_origin(parts):
        return url
    if index and format_origin(parts) == index.origin:
        return parts._replace(scheme="http", netloc=urlsplit(proxy).netloc).geturl()
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


_SHOWN_CHARS = 600
_RETRY = "run it again: what was built is kept"
_INDEX_FIX = "UV_DEFAULT_INDEX names another index"
_INDEX_FAULTS = (
    (r"429 Too Many Requests", "the package index throttles us", f"wait, then {_RETRY}"),
    (
        r"lack of valid authentication credentials|40[13] (Unauthorized|Forbidden)|407 Proxy",
        "the package index asks for another login",
        "set UV_DEFAULT_INDEX=https://USER:PASSWORD@HOST/...: builds do not see the login",
    ),
    (
        r"invalid peer certificate|certificate (has expired|is not yet valid|verify failed)",
        "the package index is not trusted",
        "compare this machine's clock with another one (date); SSL_CERT_FILE names your own certificates",
    ),
    (
        r"dns error|502 Bad Gateway|Connection refused|Network is unreachable",
        "the package index cannot be reached from here",
        f"prepare on a machine with a network; {_INDEX_FIX}",
    ),
    (
        r"Request failed after|error decoding response|error reading a body|HTTP status server error|timed out",
        "the package index broke off",
        f"{_RETRY}; {_INDEX_FIX}",
    ),
    (r"Failed to extract archive|Hash mismatch", "the package index gave a damaged file", f"{_RETRY}; {_INDEX_FIX}"),
)
"""Signs in uv's output, meanings, and fixes. A project that prints them misleads only its own user."""
_PROJECT_FAULT = "The build backend returned an error"
"""Text of uv when the project's own code failed."""
_NO_COMPILER = re.compile(
    r"(command|unable to execute) '?\S*(cc|\+\+)'?( failed)?: No such file|No such file or directory: '\S*(cc|\+\+)'"
)
_PACKAGE = re.compile(r"Failed to (?:download and )?build `([^`@ ]+)")
_MISSING = re.compile(r"404 Not Found|not found in the package registry|there (is|are) no versions? of|were not found")


def explain_failed_build(name: str, printed: str, refused: Sequence[str]) -> CodeRepairError:
    """Error for workspace `name`, from uv's output and `refused` hosts."""
    last = printable(printed[-_SHOWN_CHARS:])
    is_project_error = _PROJECT_FAULT in printed
    for sign, words, fix in _INDEX_FAULTS:
        if not is_project_error and re.search(sign, printed):
            return PrerequisiteError(f"{words}: {last}", fix=fix)
    if not is_project_error and "tunnel" in printed and not refused:
        return PrerequisiteError(f"the package index cannot be reached from here: {last}", fix=_INDEX_FIX)
    package = f"{built[1]}, which it needs, cannot be built: " if (built := _PACKAGE.search(printed)) else ""
    if _NO_COMPILER.search(printed):
        return PrerequisiteError(
            f"this machine has no C compiler, which the environment of {name} needs: {package}{last}",
            fix="apt-get install build-essential",
        )
    hosts = printable(", ".join(dict.fromkeys(refused))[:_SHOWN_CHARS])
    hosts = f" (it wanted {hosts}, which a build may not reach)" if hosts else ""
    fix = "correct its specification, or use its image"
    if "No module named 'pkg_resources'" in printed:
        fix += "; setuptools<81 has pkg_resources: as a requirement of the project, it applies to its build, too"
    if _MISSING.search(printed):
        fix += "; UV_FIND_LINKS=FOLDER adds wheels that the index does not have"
    return TaskError(f"no environment can be built for {name}{hosts}: {package}{last}", fix=fix)


@asynccontextmanager
async def serve_proxy(
    socket: Path, hosts: Collection[str], index: PackageIndex | None = None, mirrors: Mirrors | None = None
) -> AsyncIterator[list[str]]:
    """Serve tunnels to port 443 of `hosts`, and `index` and `mirrors`, on a Unix socket. Yields refused targets."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_IDLE_SECONDS)
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context())
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=True) as client:
        served = _Proxy(hosts, index, mirrors or Mirrors((), {}, None), client)
        server = await asyncio.start_unix_server(served.accept, path=socket, limit=_HEAD_BYTES)
        socket.chmod(0o666)  # the guest's side runs as another user
        try:
            yield served.refused
        finally:
            server.close()
            for connection in served.connections:
                connection.cancel()
            await asyncio.gather(*served.connections, return_exceptions=True)
            socket.unlink(missing_ok=True)


class _Proxy:
    def __init__(
        self, hosts: Collection[str], index: PackageIndex | None, mirrors: Mirrors, client: aiohttp.ClientSession
    ) -> None:
        self.hosts, self.index, self.mirrors, self.client = {*hosts, *mirrors.hosts}, index, mirrors, client
        self.refused: list[str] = []
        self.connections: set[asyncio.Task[None]] = set()
        self._linked_paths: set[str] = set()  # by pages of the index

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self.connections.add(connection)
        connection.add_done_callback(self.connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, aiohttp.ClientError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, _, rest = head[0].partition(" ")
            target = rest.partition(" ")[0]
            host, _, port = target.rpartition(":")
            url = self._find_url(target)
            if method == "CONNECT" and host in self.hosts and port == str(_PORT):
                await self._tunnel(host, reader, writer)
            elif method in ("GET", "HEAD") and url:
                fields = (line.partition(":")[::2] for line in head[1:])
                await self._fetch(method, url, {name.lower(): value.strip() for name, value in fields}, writer)
            else:
                if len(self.refused) < _MAX_REFUSED:
                    self.refused.append(target[:_MAX_TARGET_LENGTH])
                await _write_response(writer, 403)
        writer.close()

    def _find_url(self, target: str) -> str:
        """URL of an allowed request to a mirror or `index`, else ""."""
        parts = urlsplit(target)
        plain = unquote(parts.path)
        if not plain.startswith("/") or {".", ".."} & set(re.split(r"[/\\]", plain)):
            return ""
        if format_origin(parts) and parts.scheme == "http" and parts.netloc.removesuffix(":80") in self.mirrors.hosts:
            folder, _, rest = parts.path[1:].partition("/")
            replaced = self.mirrors.urls.get(folder, "") if parts.hostname in _REGISTRIES else ""
            return f"{replaced}{rest}" if replaced else target
        is_linked = plain.removesuffix(".metadata") in self._linked_paths
        if self.index is None or (not is_linked and not f"{plain}/".startswith(self.index.paths)):
            return ""
        return f"{self.index.origin}{parts._replace(scheme='', netloc='', fragment='').geturl()}"

    def _is_of_index(self, url: str) -> bool:
        return self.index is not None and format_origin(urlsplit(url)) == self.index.origin

    async def _fetch(self, method: str, url: str, received: dict[str, str], writer: asyncio.StreamWriter) -> None:
        headers = {name: received[name] for name in _REQUEST_HEADERS if name in received}
        if (of_index := self._is_of_index(url)) and self.index and self.index.login:
            headers["Authorization"] = self.index.login
        headers |= {"Accept-Encoding": "identity"} if "range" in received else {}
        further_proxy = None if of_index else self.mirrors.proxy
        try:
            async with self.client.request(
                method, URL(url, encoded=True), headers=headers, allow_redirects=not of_index, proxy=further_proxy
            ) as response:
                await self._forward_response(method, url, response, writer)
        except (aiohttp.ClientConnectionError, TimeoutError, OSError):
            await _write_response(writer, 502)

    async def _forward_response(
        self, method: str, url: str, response: aiohttp.ClientResponse, writer: asyncio.StreamWriter
    ) -> None:
        fields = {name: value for name in _RESPONSE_HEADERS if (value := response.headers.get(name))}
        if location := response.headers.get("location"):
            fields["location"] = self._rewrite_url(urljoin(url, location))
        is_page = self._is_of_index(url) and _PAGES.match(response.content_type)
        if method == "GET" and response.status == HTTPStatus.OK and is_page:
            page = _LINK.sub(lambda link: self._rewrite_link(link, url), await response.read())
            await _write_response(writer, response.status, fields | {"content-length": str(len(page))}, page)
            return
        if (length := response.headers.get("content-length")) and "content-encoding" not in response.headers:
            fields["content-length"] = length
        await _write_response(writer, response.status, fields)
        async for piece in response.content.iter_chunked(_CHUNK_BYTES):
            writer.write(piece)
            async with asyncio.timeout(_IDLE_SECONDS):
                await writer.drain()

    def _rewrite_link(self, link: re.Match[bytes], page: str) -> bytes:
        url = self._rewrite_url(urljoin(page, link[1].decode("utf-8", "surrogateescape")))
        return link[0].replace(link[1], url.encode("utf-8", "surrogateescape"))

    def _rewrite_url(self, url: str) -> str:
        # relative to the proxy, and allowed, if within the index
        parts = urlsplit(url)
        if not self._is_of_index(url):
            return url
        self._linked_paths.add(unquote(parts.path))
        return parts._replace(scheme="", netloc="").geturl()

    async def _tunnel(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection(host, _PORT)
        except OSError:  # TimeoutError among them
            await _write_response(writer, 502)
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_copy_until_closed(reader, far_writer), _copy_until_closed(far_reader, writer))


async def _write_response(
    writer: asyncio.StreamWriter, code: int, fields: dict[str, str] | None = None, body: bytes = b""
) -> None:
    head = {"content-length": "0"} if fields is None else fields
    lines = [f"HTTP/1.1 {code} {HTTPStatus(code).phrase}", *(f"{name}: {value}" for name, value in head.items())]
    writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1") + body)
    await writer.drain()


async def _copy_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # TimeoutError among them
        while True:
            async with asyncio.timeout(_IDLE_SECONDS):
                piece = await reader.read(_CHUNK_BYTES)
                if not piece:
                    break
                writer.write(piece)
                await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
