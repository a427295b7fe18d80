"""A real Chromium, driven through its debugging protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


def find_chromium() -> str | None:
    """Find the program of a Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Tab:
    """A page in the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """Errors of the page's scripts, and refusals of its policy."""

    async def listen(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(data["params"]["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.errors.append(data["params"]["entry"]["text"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(answer, 60)
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    async def js(self, expression: str) -> Any:
        """Evaluate `expression`."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 60) -> None:
        """Wait until `expression` is true."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    with suppress(AssertionError):  # while a document loads, no script runs
                        if await self.js(expression):
                            return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never true: {expression}") from None

    async def press(self, *keys: str) -> None:
        for key in keys:
            code = KEYS.get(key, 0)
            text = {} if key in KEYS and key != "Enter" else {"text": "\r" if key == "Enter" else key}
            await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def look(self, width: int = 1280, height: int = 900) -> None:
        """Set the size of the window."""
        size: Mapping[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **size)


@asynccontextmanager
async def open_tab(browser: str) -> AsyncIterator[Tab]:
    """Open a tab in a new browser that can reach only this machine."""
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        process = await asyncio.create_subprocess_exec(
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
            *(f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _read_port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = await answer.json(content_type=None)
                page = next(tab for tab in tabs if tab["type"] == "page")
                async with client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    listening = asyncio.create_task(tab.listen())
                    for domain in ("Page", "Runtime", "Log"):
                        await tab.send(f"{domain}.enable")
                    yield tab
                    listening.cancel()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _read_port(file: Path) -> int:
    async with asyncio.timeout(60):
        while not file.exists() or not file.read_text().strip():
            await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
