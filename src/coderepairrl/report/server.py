"""HTTP server of pages, rendered on request while runs go on."""

from __future__ import annotations

import asyncio
import mimetypes
import re
from collections.abc import Callable

from aiohttp import web

from coderepairrl.errors import RunError, UsageError
from coderepairrl.processes.signals import cancel_on_signal
from coderepairrl.report.site import PageMissing, Site

HOST = "127.0.0.1"
# listens on loopback only, and rejects other host names, since a website's name may resolve to loopback (DNS rebinding)
_LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Server:
    """HTTP server of `site`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._reading = asyncio.Lock()  # one request at a time reads the runs

    async def start(self, port: int = 0) -> str:
        """Listen on loopback `port` (0: any free); return the URL. Raises `UsageError` if taken."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise UsageError(
                f"cannot listen on {HOST}:{port}: {error.strerror or error}", fix="choose another --port"
            ) from error
        return f"http://{HOST}:{site.port}"

    async def stop(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        path = request.match_info["path"] or self._site.choose_first_path()
        if _LOCAL.fullmatch(request.host) is None:
            return web.Response(status=403, text="ask for 127.0.0.1 or localhost\n", headers=_HEADERS)
        if not request.match_info["path"]:
            return web.Response(status=302, headers={**_HEADERS, "Location": f"/{path}"})
        kind = mimetypes.guess_type(path)[0] or "text/plain"
        try:
            async with self._reading:
                text = await asyncio.to_thread(self._read, path, dict(request.query))
        except PageMissing:
            return web.Response(status=404, text="page not found\n", headers=_HEADERS)
        except RunError as error:
            return web.Response(status=503, text=f"{error}\n{error.fix}\n", headers=_HEADERS)
        except OSError as error:  # the run was removed, or its disk is gone
            return web.Response(status=503, text=f"the run cannot be read: {error.strerror}\n", headers=_HEADERS)
        return web.Response(text=text, content_type=kind, charset="utf-8", headers=_HEADERS)

    def _read(self, path: str, query: dict[str, str]) -> str:
        self._site.update()
        return self._site.find_renderer(path, query)()


async def serve_site(site: Site, port: int, ready: Callable[[str], None]) -> None:
    """Serve `site` until a signal in `signals.STOPPING`; `ready` gets the URL."""
    with cancel_on_signal() as received:
        server = Server(site)
        ready(await server.start(port))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not received:
                raise
        finally:
            await server.stop()
