"""`crrl serve` as a separate process, whose addresses are read from its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from commands import CRRL

FIX = Path(__file__).parents[1] / "fix"
"""Folder of the engine `fix_engines:Says`."""
SHOWN = {"PYTHONPATH": str(FIX)}
Start = Callable[..., "Served"]


def make_command(*arguments: str) -> list[str]:
    return [*CRRL, "serve", *arguments]


@dataclass
class Served:
    """A running server, and `host`, a client of the host's API."""

    process: subprocess.Popen[str]
    where: dict[str, str]
    host: httpx.Client

    def open(self, **asked: Any) -> dict[str, Any]:
        session: dict[str, Any] = self.host.post("/sessions", json=asked).raise_for_status().json()
        return session

    def describe(self, session: dict[str, Any]) -> dict[str, Any]:
        described: dict[str, Any] = self.host.get(f"/sessions/{session['id']}").raise_for_status().json()
        return described

    def close(self, session: dict[str, Any]) -> dict[str, Any]:
        described: dict[str, Any] = self.host.delete(f"/sessions/{session['id']}").raise_for_status().json()
        return described

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Exit code and stderr after a signal."""
        self.process.send_signal(number)
        _, errors = self.process.communicate()
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    running: list[Served] = []

    def begin(*arguments: str, **environment: str) -> Served:
        process = subprocess.Popen(
            make_command("--port", "0", "--json", *arguments),
            env={**os.environ, **SHOWN, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        where = json.loads(line)
        kind, _, path = where["admin"].partition("unix:")
        transport = httpx.HTTPTransport(uds=path) if path else None
        token = {"Authorization": f"Bearer {where['token']}"} if "token" in where else {}
        base = "http://host" if path else kind
        host = httpx.Client(transport=transport, base_url=base, timeout=60, headers=token)
        running.append(Served(process, where, host))
        return running[-1]

    yield begin
    for served in running:
        served.host.close()
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate()


@pytest.fixture(scope="module")
def tiny(start: Start, miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Serve random weights with the tiny engine and a log."""
    folder = tmp_path_factory.mktemp("tiny")
    return start(str(miniature), "--admin", str(folder / "admin.sock"), "--log", str(folder / "log"))
