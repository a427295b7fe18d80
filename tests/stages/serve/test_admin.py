"""The host's API where something breaks: in this process, with engines that die and sessions that end twice."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from coderepairrl import tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import EngineFault
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.protocols import Engine
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.runs import Log
from coderepairrl.stages import sessions as served_sessions
from coderepairrl.stages.serve import AdminServer
from coderepairrl.stages.sessions import KeylessSessions, SessionRequest, Sessions
from coderepairrl.types import Limits, Sampling

Ask = Callable[..., Awaitable[tuple[int, Any]]]


@asynccontextmanager
async def serving(engine: Engine, miniature: Path, log: Log | None = None) -> AsyncIterator[tuple[Gateway, Sessions]]:
    server = Gateway(PolicySource(tokens.load_codec(miniature), engine), sampling=Sampling(), on_turn=lambda *_: None)
    await server.start()
    yield server, Sessions(server, Limits(seconds=60.0), log)
    await server.stop()


@asynccontextmanager
async def asking(server: Gateway, sessions: Sessions, folder: Path) -> AsyncIterator[Ask]:
    """A call of the host's API, over its socket: method, path, and what is asked; status and answer."""
    admin = AdminServer(sessions, server.source)
    await admin.start(socket=folder / "admin.sock")
    connector = aiohttp.UnixConnector(str(folder / "admin.sock"))
    async with aiohttp.ClientSession("http://host", connector=connector) as host:

        async def ask(method: str, path: str, asked: Any = None) -> tuple[int, Any]:
            async with host.request(method, path, json=asked) as answer:
                return answer.status, await answer.json()

        yield ask
    await admin.stop()


async def test_a_dead_engine_is_a_fault_and_weights_bring_it_back(tmp_path: Path, miniature: Path) -> None:
    weights = miniature / "model.safetensors"
    checksum = hashlib.sha256(weights.read_bytes()).hexdigest()
    ready: list[ScriptedEngine] = []

    async def start() -> Engine:
        if not ready:
            raise EngineFault("the engine did not start: no memory")
        return ready.pop()

    first = ScriptedEngine([])
    async with (
        serving(SupervisedEngine(first, start, restarts=3), miniature) as (server, sessions),
        asking(server, sessions, tmp_path) as ask,
    ):

        async def load(version: int, checksum: str = checksum) -> tuple[int, Any]:
            return await ask("POST", "/weights", {"path": str(weights), "version": version, "checksum": checksum})

        assert await load(1) == (200, {"version": 1, "loadable": True})
        first.kill()
        status, body = await load(2)
        assert (status, body["error"]["code"]) == (503, "engine_fault"), body
        assert "no memory" in body["error"]["message"]
        assert (await ask("GET", "/health"))[0] == 503
        assert await ask("GET", "/weights") == (200, {"version": 1, "loadable": True})
        ready.append(ScriptedEngine([]))
        assert await load(2) == (200, {"version": 2, "loadable": True}), "it is back, with these"
        status, body = await load(3, "0" * 64)
        assert (status, body["error"]["code"]) == (422, "refused"), "and refuses as ever"
        assert (await ask("GET", "/health"))[1]["version"] == 2


async def test_two_closes_of_a_session_at_once_return_the_same(tmp_path: Path, miniature: Path) -> None:
    asked = asyncio.Event()

    def script(*_: Any) -> list[int]:
        asked.set()
        return [1, 2, 3]

    log = Log(tmp_path / "log.jsonl")
    async with serving(ScriptedEngine(script, delay=3600.0), miniature, log) as (_, sessions):
        session = sessions.open(SessionRequest(id="twice"))
        agent = AsyncOpenAI(base_url=session["base_url"], api_key=session["key"], max_retries=0)
        message: Any = {"role": "user", "content": "Repair it."}
        call = asyncio.create_task(agent.chat.completions.create(model="policy", messages=[message]))
        await asked.wait()  # the call is running, and to close it takes a while
        first, second = await asyncio.gather(sessions.close("twice"), sessions.close("twice"))
        [failed] = await asyncio.gather(call, return_exceptions=True)
        await agent.close()
    assert first == second
    assert [turn["masked"] for turn in first["turns"]] == ["aborted"]
    assert isinstance(failed, APIStatusError)
    assert "twice" not in sessions
    log.close()
    assert (tmp_path / "log.jsonl").read_text().count('"verdict"') == 2, "the type and the field of one record"


async def test_an_engine_started_with_adapters_has_version_1(tmp_path: Path, miniature: Path) -> None:
    weights, engine = miniature / "model.safetensors", ScriptedEngine([])
    checksum = hashlib.sha256(weights.read_bytes()).hexdigest()
    await engine.load(weights, 1, checksum)
    async with serving(engine, miniature) as (server, sessions), asking(server, sessions, tmp_path) as ask:
        status, body = await ask("POST", "/weights", {"path": str(weights), "version": 1, "checksum": checksum})
        assert (status, body["error"]["code"]) == (409, "old_version")
        for wrong in ({"id": "../up"}, {"sead": 1}, {"limits": {"calls": 0}}, {"sampling": {"temperature": "hot"}}):
            status, body = await ask("POST", "/sessions", wrong)
            assert status == 400 and next(iter(wrong)) in body["error"]["message"]
    assert sessions.summary() == []


async def test_conversations_with_equal_beginnings_stay_apart_and_unanswered_ones_are_closed_first(
    miniature: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_sessions, "CONVERSATIONS", 3)
    codec = tokens.load_codec(miniature)
    engine = ScriptedEngine(lambda ids, *_: [*codec.encode(f"after {len(ids)}"), codec.stop_ids[0]])
    async with serving(engine, miniature) as (server, sessions), aiohttp.ClientSession() as web:
        server.keyless_session = KeylessSessions(sessions)

        async def ask(*texts: str) -> Any:
            roles = ("user", "assistant")
            messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
            body = {"model": "policy", "messages": messages}
            async with web.post(f"{server.url}/v1/chat/completions", json=body) as answer:
                return (await answer.json())["choices"][0]["message"]["content"] if answer.ok else answer.status

        def turns() -> list[int]:
            return [each["turns"] for each in sessions.summary()]

        mine, yours = await ask("Hello."), await ask("Hello.")
        await ask("Hello.", mine, "I go on.")
        await ask("Hello.", yours, "You go on.")
        assert turns() == [2, 2]
        for number in range(4):
            assert await ask(f"{number} " + "much too long " * 4_000) == 400
        assert turns()[:2] == [2, 2] and len(turns()) <= 3


async def test_a_client_without_a_key_may_send_half_a_character_and_count_tokens(miniature: Path) -> None:
    codec = tokens.load_codec(miniature)
    engine = ScriptedEngine(lambda *_: [codec.stop_ids[0]])
    async with serving(engine, miniature) as (server, sessions), aiohttp.ClientSession() as web:
        server.keyless_session = KeylessSessions(sessions)
        body = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "cut \xe2\x82"}]}'

        async def post(path: str) -> Any:
            async with web.post(f"{server.url}/v1{path}", data=body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        counted = await post("/messages/count_tokens")
        assert sessions.summary() == []
        assert (await post("/messages"))["usage"]["input_tokens"] == counted["input_tokens"]
        assert "cut \ufffd" in codec.decode(engine.requests[0].ids)


async def test_foreign_pages_forged_keys_and_oversized_bodies_are_refused(miniature: Path) -> None:
    """Also by DNS rebinding: a foreign host name that resolves to this machine."""
    async with serving(ScriptedEngine([]), miniature) as (server, sessions), aiohttp.ClientSession() as web:
        server.keyless_session = KeylessSessions(sessions)
        admin = AdminServer(sessions, server.source, "token")
        where = await admin.start(port=0)
        for bearer in ("", "wrong", "\udcff"):
            headers = {"Authorization": f"Bearer {bearer}".encode(errors="surrogateescape").decode("latin-1")}
            async with web.get(f"{where}/sessions", headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (401, "unauthorized")
        await admin.stop()

        forged = {"Authorization": f"Bearer {'0' * 32}"}
        hosts = [{"Host": host} for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000")]
        models, completions = f"{server.url}/v1/models", f"{server.url}/v1/chat/completions"
        question, large = b'{"messages": []}', b'{"messages": [' + b"{}," * 400_000 + b"{}]}"

        async def pieces() -> AsyncIterator[bytes]:
            yield large

        async with httpx.AsyncClient() as client:
            assert (await client.get(models)).status_code == 200
            for headers in (*hosts, {"Origin": "null"}, {"Origin": "http://evil.example"}, forged):
                assert (await client.get(models, headers=headers)).status_code == 401
                assert (await client.post(completions, content=question, headers=headers)).status_code == 401
            other = completions.replace("/v1", f"/s/{'0' * 32}/v1")
            for url, body, status in ((other, question, 401), (completions, b"[" * 100_000, 400)):
                assert (await client.post(url, content=body)).status_code == status
            for body in (large, pieces()):  # a body without a session has a smaller limit
                assert (await client.post(completions, content=body)).status_code == 413
        assert sessions.summary() == []
