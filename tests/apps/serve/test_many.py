"""Thousands of sessions: what each of them costs does not grow, and nothing of a closed one is kept."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coderepairrl import tokens
from coderepairrl.apps.serve.admin import Admin
from coderepairrl.apps.serve.sessions import Sessions
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.types import Limits, Sampling

KIB = 1024
MANY = pytest.param(5000, marks=pytest.mark.real)


async def each(items: Sequence[Any], do: Callable[[Any], Awaitable[Any]]) -> tuple[list[Any], float, float]:
    """What `do` gives for each of `items`, 16 at a time; processor seconds of the first half and of the second."""

    async def work(some: Sequence[Any]) -> list[Any]:
        waiting, found = iter(some), []

        async def one() -> None:
            for item in waiting:
                found.append(await do(item))

        await asyncio.gather(*(one() for _ in range(16)))
        return found

    half, times = len(items) // 2, [time.process_time()]
    found = []
    for some in (items[:half], items[half:]):
        found += await work(some)
        times.append(time.process_time())
    return found, times[1] - times[0], times[2] - times[1]


@pytest.mark.parametrize("count", [300, MANY])
async def test_a_session_costs_the_same_however_many_there_are(miniature: Path, tmp_path: Path, count: int) -> None:
    codec = tokens.load(miniature)
    ok = [*codec.encode("ok"), codec.stop_ids[0]]
    engine = ScriptedEngine(lambda *_: ok)
    server = Gateway(PolicySource(codec, engine), sampling=Sampling(), on_turn=lambda *_: None)
    await server.start()
    admin = Admin(Sessions(server, Limits(seconds=3600.0)), server.source)
    await admin.start(socket=tmp_path / "admin.sock")
    async with (
        aiohttp.ClientSession("http://host", connector=aiohttp.UnixConnector(str(tmp_path / "admin.sock"))) as host,
        aiohttp.ClientSession() as agent,
    ):

        async def begin(number: int) -> dict[str, Any]:
            async with host.post("/sessions", json={"id": f"s{number}"}) as answer:
                session: dict[str, Any] = await answer.json()
                return session

        async def use(session: dict[str, Any]) -> None:
            body = {"model": "policy", "messages": [{"role": "user", "content": f"Repair {session['id']}."}]}
            async with agent.post(f"{session['base_url']}/chat/completions", json=body) as answer:
                assert answer.status == 200

        async def end(session: dict[str, Any]) -> None:
            async with host.delete(f"/sessions/{session['id']}") as answer:
                assert len((await answer.json())["turns"]) == 1

        async def round_of(name: str, count: int) -> list[float]:
            opened, *opening = await each([f"{name}{n}" for n in range(count)], begin)
            held.append(tracemalloc.get_traced_memory()[0])
            _, *using = await each(opened, use)
            held.append(tracemalloc.get_traced_memory()[0])
            _, *closing = await each(opened, end)
            return [late / early for early, late in (opening, using, closing)]

        held: list[int] = []
        await round_of("warm", 50)
        engine.requests.clear()
        gc.collect()
        tracemalloc.start()
        growth = await round_of("a", count)
        engine.requests.clear()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    await admin.stop()
    await server.stop()
    _, _, opened, used = held
    print(
        f"{count} sessions: {opened / count / KIB:.1f} KiB open, {used / count / KIB:.1f} KiB with a turn, "
        f"{left / count / KIB:.2f} KiB when closed; the second half took {growth} of the first"
    )
    assert opened / count < 12 * KIB
    assert left < 1024 * KIB + count * KIB, "buffers, and keys of closed sessions"
    assert all(each < 2.0 for each in growth), growth


def test_more_connections_than_a_shell_allows() -> None:
    """A program is begun with 1,024 open files, of which each connection is one."""
    code = (
        "import resource; most = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, most));"
        "from coderepairrl.apps.serve import command; command.allow_open_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(1 << 16, most))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
