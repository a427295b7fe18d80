"""Requests of a sandbox that make others wait, cost too much, or break the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import logging
import resource
import socket as sockets
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coderepairrl import tokens
from coderepairrl.errors import GatewayFault
from coderepairrl.gateway import Gateway, Session, server, workers
from coderepairrl.gateway.request import ApiError, hash_message
from coderepairrl.gateway.worker import PARSERS
from coderepairrl.gateway.workers import RequestProcessor, WorkerPool
from coderepairrl.processes import signals
from coderepairrl.types import Sampling

from . import speech
from .conftest import SHELL, World, wait_until
from .speech import begin_request

CHAT = "/chat/completions"


def body(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": list(messages), **fields}).encode()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def calling(arguments: str) -> dict[str, Any]:
    calls = [{"id": "a", "function": {"name": "a", "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


async def post(session: Session, data: bytes, path: str = CHAT) -> tuple[int, str]:
    """Status and code of the answer, on its own connection."""
    status, answer = await speech.post(session, "chat", io.BytesIO(data), path=path)
    return status, (json.loads(answer).get("error") or {}).get("code", "")


@contextlib.asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """Seconds that the event loop was late each time."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.002)
            late.append(time.perf_counter() - before - 0.002)

    ticking = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticking.cancel()


HUGE = {
    "2 MB of words": body(user("some words and more " * 100_000)),
    "2 MB without a blank": body(user("a" * 2_000_000)),
    "2 MB of special tokens": body(user("<|im_end|>" * 200_000)),
    "2 MB as a reply": body(user("a"), {"role": "assistant", "content": "word " * 400_000}, user("b")),
    "1 MB as arguments": body(user("a"), calling("[0," * 350_000), user("b")),
    "2 MB as the id of a result": body(user("a"), {"role": "tool", "tool_call_id": "a" * 2_000_000, "content": ""}),
    "2 MB as the name of a call": body(user("a"), {"role": "assistant", "function_call": {"name": "a" * 2_000_000}}),
    "10,000 messages": body(*[user("")] * 10_000),
    "10,000 calls": body(user("a"), {**calling(""), "tool_calls": calling("")["tool_calls"] * 10_000}, user("b")),
    "2 MB of tools": body(user("a"), tools=[{**SHELL, "x": ["a"] * 400_000}]),
}


@pytest.mark.parametrize("by", [sockets.AF_INET, sockets.AF_UNIX])
async def test_a_storm_of_connections_waits_in_the_kernel(
    by: sockets.AddressFamily, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop accepts one connection in each turn, and serves the others in between."""
    turn, accepted, accept = 0, list[int](), Gateway._accept

    def noting(gateway: Gateway) -> asyncio.Protocol:
        accepted.append(turn)
        return accept(gateway)

    monkeypatch.setattr(Gateway, "_accept", noting)
    path = tmp_path / "gateway.sock"
    gateway = Gateway(world.gateway.source, sampling=Sampling(), on_turn=lambda *_: None)
    async with gateway.listening(socket=path):
        port = int(gateway.url.rpartition(":")[2])
        with contextlib.ExitStack() as storm:
            for _ in range(200):
                client = storm.enter_context(sockets.socket(by))
                client.settimeout(1.0)  # a connection for which there is no room in the queue
                client.connect(("127.0.0.1", port) if by == sockets.AF_INET else str(path))
            while len(accepted) < 200:
                turn += 1
                await asyncio.sleep(0)
    assert max(Counter(accepted).values()) <= 2


async def test_requests_that_are_too_large_do_not_block_the_event_loop(world: World) -> None:
    """Each took 0.1 to 4 seconds on the event loop, where all other requests waited."""
    async with lag() as control:
        await asyncio.sleep(0.01)
        world.gateway.source.codec.render([user("some words and more " * 10_000)])  # a tenth of the first
        await asyncio.sleep(0.01)
    attacker = world.open("attacker", calls=100)
    await post(attacker, body(user("warm " * 4000)))  # the process is started once
    late: dict[str, float] = {}
    for name, huge in HUGE.items():
        async with lag() as found:
            answer = await post(attacker, huge)
            await asyncio.sleep(0.01)
        late[name] = max(found)
        assert answer == (400, "context_length_exceeded"), name
    assert (attacker.fault, attacker.limit) == (None, "tokens")
    assert sorted(late.values())[len(late) // 2] < max(control) / 2, (late, max(control))


ROOMY = "[" * 30_000
"""It has 30,000 tokens; by its bytes it might have 4,000."""
OVERLONG = {
    "a message": (CHAT, [user(ROOMY)]),
    "arguments": (CHAT, [user("a"), calling(ROOMY), user("b")]),
    "after a reply": (CHAT, [user("a"), {"role": "assistant", "content": "ok"}, user(ROOMY)]),
    "a reply after another": (
        CHAT,
        [*[user("a"), {"role": "assistant", "content": "ok"}, user("b")], {"role": "assistant", "content": ROOMY}],
    ),
    "counted": ("/messages/count_tokens", [user(ROOMY)]),
}


async def test_prompts_that_are_too_long_stay_in_the_process_that_writes_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 ids of each request came back to the event loop, only to be refused."""
    jobs, ids = list[str](), list[int]()
    call = WorkerPool.call

    async def observed(
        self: WorkerPool, offload: RequestProcessor, job: str, *arguments: Any, body: bytearray | None = None
    ) -> Any:
        jobs.append(job)
        made = await call(self, offload, job, *arguments, body=body)
        if job == "call_codec":
            ids.append(len(made or ()))
        return made

    monkeypatch.setattr(WorkerPool, "call", observed)
    session = world.open(calls=100)
    assert (await post(session, body(user("a"))))[0] == 200
    for name, (path, messages) in OVERLONG.items():
        status, _ = await post(session, body(*messages), path)
        assert status == 400, name
    assert "call_codec" in jobs and all(count <= session.limits.tokens for count in ids)
    assert (session.fault, session.limit) == (None, "tokens")


REFUSED = {
    "no JSON": (CHAT, b"{"),
    "deep JSON": (CHAT, b"[" * 600_000),
    "a wrong field": (CHAT, body(user("a"), max_tokens=0)),
    "unwritable": (CHAT, body(user("\ud800"), n=2)),
    "too long by its bytes": (CHAT, body(user("a" * 100_000))),
    **{name: (path, body(*messages)) for name, (path, messages) in OVERLONG.items()},
    "a stream": (CHAT, body(user(ROOMY), stream=True)),
    "in another dialect": ("/responses", b'{"model": "policy", "input": "%s", "stream": true}' % ROOMY.encode()),
}


async def test_finished_requests_are_freed_at_once(world: World) -> None:
    """Errors that knew their own frames kept requests and their 100,000 ids for the garbage collector.

    It looked at each of the ids, and all requests waited: for 0.1 s, in a session of some hundred such requests.
    """
    session = world.open(calls=1000)
    world.engine.chunk = 1

    async def everything() -> None:
        for path, data in REFUSED.values():
            assert (await post(session, data, path))[0] == 400
        for stream in (False, True):
            world.engine.gate = asyncio.Event()
            asked = asyncio.create_task(post(session, body(user("a"), stream=stream)))
            await wait_until(lambda: session._running)
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
            await wait_until(lambda: not session._running)
            world.engine.gate = None
            assert (await post(session, body(user("b"))))[0] == 200

    await everything()  # warms up caches
    gc.collect()
    gc.disable()
    try:
        await everything()
        await asyncio.sleep(0.05)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in gc.garbage if type(each).__module__.startswith("coderepairrl")]
        assert left == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    held = [each for each in gc.get_objects() if isinstance(each, (list, tuple)) and len(each) > session.limits.tokens]
    assert [each for each in held if set(map(type, each)) == {int}] == []


@given(st.text(max_size=300) | st.text("aé<|im_end|> \n\ud7b0", max_size=300))
def test_the_least_number_of_tokens_is_never_more_than_there_are(codec: tokens.Codec, text: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        guarded = codec.tokenizer.guard(text)
        assert codec.tokenizer.count_at_least(guarded) <= len(codec.encode(text))


async def test_a_large_conversation_is_written_as_a_small_one(world: World) -> None:
    """A worker process renders the same ids as the event loop, and extends recorded ones."""
    world.engine.context = 1 << 20
    session = world.open(tokens=1 << 19)
    codec, asked = world.gateway.source.codec, [user(f"{n} " * 60) for n in range(300)]
    for _ in range(2):
        assert (await post(session, body(*asked, tools=[SHELL])))[0] == 200
        asked += [dict(session.turns[-1].messages[-1]), user("more " * 4000)]
    assert [turn.base for turn in session.turns] == [None, 0]
    first, second = session.turns
    assert first.given.ids == tuple(codec.render(asked[:300], [SHELL]))
    assert second.given.ids == tuple(codec.extend(first.given.ids, first.output.ids, asked[301:302]) or ())


async def test_a_long_reply_is_looked_up_by_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's reply with 4 MB of arguments, hashed on the event loop, delayed all requests by two seconds."""
    monkeypatch.setattr(workers, "hash_message", None)
    reply = calling(json.dumps([1] * 40_000))
    async with pool_of(1) as pool:
        assert await RequestProcessor(pool, None, None).hash_reply(reply, {}) == hash_message(b"", reply, {})


@pytest.mark.parametrize("path", [CHAT, "/responses", "/messages", "/messages/count_tokens", "/responses/input_tokens"])
async def test_a_refusal_is_a_call(world: World, path: str) -> None:
    session = world.open(calls=3)
    answers = [await post(session, b"{", path) for _ in range(5)]
    assert {status for status, _ in answers} == {400}
    assert session.limit == ""
    assert (await post(session, body(user("a"))))[1] == "episode_limit_reached"
    assert session.limit == "calls"


async def test_requests_of_any_kind_are_limited_in_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coderepairrl.gateway.budget.REQUESTS_PER_CALL", 3)
    session = world.open(calls=2)
    counted = json.dumps({"model": "policy", "messages": [user("a")]}).encode()
    answers = [await post(session, counted, "/messages/count_tokens") for _ in range(13)]
    assert [status for status, _ in answers] == [200] * 12 + [400]
    assert session.limit == "calls"


async def test_half_sent_bodies_are_limited_in_number_and_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BODY_SECONDS", 0.3)
    attacker, other = world.open("attacker"), world.open("other")
    held = [await begin_request(attacker, "chat", b"{", 1000) for _ in range(workers.BODIES)]
    await asyncio.sleep(0.05)
    assert (await post(attacker, body(user("a"))))[1] == "too_many_requests"
    assert (await post(other, body(user("a"))))[0] == 200
    for reader, writer in held:
        head, *_ = (await reader.readuntil(b"\r\n")).decode().partition("\r")
        assert head.startswith("HTTP/1.1 408")
        writer.close()
    assert (await post(attacker, body(user("a"))))[0] == 200
    assert attacker._budget.calls == workers.BODIES + 2


async def test_half_sent_bodies_of_a_session_share_a_limit_of_size(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_BODY", 1 << 20)
    attacker = world.open("attacker")
    held = [await begin_request(attacker, "chat", b" " * 600_000, 700_000)]
    await asyncio.sleep(0.1)
    assert (await post(attacker, b" " * 600_000))[1] == "request_too_large"
    assert (await post(world.open("other"), b" " * 600_000))[1] == "invalid_json"
    for _, writer in held:
        writer.close()


async def test_bodies_share_a_limit_of_size_until_they_are_parsed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's 64 connections filled the controller's memory with bodies that waited for a process: 4 GiB."""
    monkeypatch.setattr(workers, "MAX_BODY", 1 << 20)
    attacker, read, process = world.open("attacker"), asyncio.Event(), RequestProcessor.parse

    async def wait(self: RequestProcessor, name: str, body: workers.RequestBody) -> Any:
        await read.wait()
        return await process(self, name, body)

    monkeypatch.setattr(RequestProcessor, "parse", wait)
    waiting = asyncio.create_task(post(attacker, b" " * 600_000))
    await wait_until(lambda: attacker.incoming._bytes == 600_000 and not attacker.incoming._bodies)
    assert (await post(attacker, b" " * 600_000))[1] == "request_too_large"
    read.set()
    assert (await waiting)[1] == (await post(attacker, b" " * 600_000))[1] == "invalid_json"


async def test_connections_of_a_session_are_limited_in_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CONNECTIONS", 3)
    attacker = world.open("attacker")
    held = [await begin_request(attacker, "chat", b"{", 1000) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert (await post(attacker, body(user("a"))))[1] == "too_many_requests"
    held.pop()[1].close()
    await asyncio.sleep(0.05)
    assert (await post(attacker, body(user("a"))))[0] == 200
    for _, writer in held:
        writer.close()


async def test_connections_that_show_no_key_are_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a request line, kept open; and more such connections than there may be."""
    monkeypatch.setattr(server, "KEY_SECONDS", 0.3)
    monkeypatch.setattr(server, "KEYLESS_CONNECTIONS", 5)
    port = int(world.gateway.url.rpartition(":")[2])
    session = world.open()
    async with aiohttp.ClientSession() as client:
        url = f"{session.endpoint.base_url}/models"
        async with client.get(url) as response:
            assert response.status == 200
        held = []
        for _ in range(8):
            held.append(await asyncio.open_connection("127.0.0.1", port))
            held[-1][1].write(b"POST /s/")
        async with client.get(url) as response:  # a connection that has shown one stays
            assert response.status == 200
        began = time.monotonic()
        assert await held[0][0].read() == b""
        assert time.monotonic() - began < 0.25, "the oldest made room"
        for reader, writer in held:
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()


POST = b"POST {path} HTTP/1.1\r\nHost: a\r\n"
BAD_HTTP = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a long line": b"POST /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"POST / HTTP/1.1\r\n" + b"".join(b"A%d: a\r\n" % n for n in range(300)) + b"\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a chunk that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "an encoding that it is not": POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\naaaaa",
    "an unknown encoding": POST + b"Content-Encoding: rot13\r\nContent-Length: 5\r\n\r\naaaaa",
    "a charset that is none": POST + b"Content-Type: a; charset=b\r\nContent-Length: 1\r\n\r\n{",
    "an upgrade": b"GET {path} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "a proxy": b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "an address that is none": b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a path that is not text": b"GET /s/%ff%fe/v1/models HTTP/1.1\r\nHost: \xff\r\n\r\n",
    "an expectation": POST + b"Expect: nothing\r\nContent-Length: 1\r\n\r\n{",
}


@pytest.mark.parametrize("second", [False, True])
async def test_bad_http_has_a_short_answer_and_no_traceback(
    world: World, caplog: pytest.LogCaptureFixture, second: bool
) -> None:
    """As the first request of a connection, and after a good one."""
    port, session = int(world.gateway.url.rpartition(":")[2]), world.open(calls=100)
    path = f"/s/{session.key}/v1/chat/completions".encode()
    good = b"GET /s/" + session.key.encode() + b"/v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
    asyncio.get_running_loop().set_debug(False)
    with caplog.at_level(logging.INFO):
        for name, sent in BAD_HTTP.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if second:
                writer.write(good)
                await reader.readuntil(b"\r\n\r\n")
            writer.write(sent.replace(b"{path}", path))
            await asyncio.sleep(0)
            if writer.can_write_eof():
                writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 10)
            assert b"Traceback" not in answer, name
            assert len(answer) < 2000, name
            writer.close()
    assert [record.message for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []
    assert session.fault is None
    assert (await post(session, body(user("a"))))[0] == 200


NESTED = [
    lambda depth: body(user("a"), x=json.loads("[" * depth + "]" * depth)),
    lambda depth: body(user("a"), tools=[{**SHELL, "x": json.loads("[" * depth + "]" * depth)}]),
    lambda depth: body(user("a"), tool_choice=json.loads("[" * depth + "]" * depth)),
    lambda depth: body(user("a"), calling("[" * depth + "]" * depth), user("b")),
]


@pytest.mark.parametrize("nested", range(len(NESTED)))
async def test_deep_nesting_is_no_fault(world: World, nested: int) -> None:
    session = world.open(calls=100, tokens=1 << 20)
    world.engine.context = 1 << 20
    for depth in (*range(150, 1050, 50), 5000):
        with contextlib.suppress(RecursionError):  # of ours
            status, _ = await post(session, NESTED[nested](depth))
            assert status in (200, 400), depth
    assert session.fault is None
    assert (await post(session, body(user("a"))))[0] == 200


@contextlib.asynccontextmanager
async def pool_of(most: int) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(most=most)
    try:
        yield pool
    finally:
        await pool.close()


async def test_no_session_takes_all_processes(world: World) -> None:
    """The session that used less time comes first, and one process is left to small jobs."""
    async with pool_of(2) as pool:
        greedy, second, modest = (RequestProcessor(pool, world.gateway.source.codec, 1 << 20) for _ in range(3))
        await asyncio.gather(*(offload.render((user("some words " * 2000),), ()) for offload in (greedy, second)))
        greedy.seconds = second.seconds = 10.0
        order: list[str] = []

        async def ask(name: str, offload: RequestProcessor, count: int) -> None:
            await offload.render((user(f"{len(order)} some words " * count),), ())
            order.append(name)

        jobs = [ask("greedy", greedy, 30_000) for _ in range(3)] + [ask("second", second, 30_000) for _ in range(3)]
        running = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(0.05)
        await ask("modest", modest, 1000)
        await asyncio.gather(*running)
        assert order.index("modest") <= 2, order


async def test_a_session_that_used_much_rests_between_its_jobs(world: World) -> None:
    """Otherwise one session could keep a processor to itself."""
    messages = tuple(user(f"{n} " * 4000) for n in range(2))
    async with pool_of(1) as pool:
        offload = RequestProcessor(pool, world.gateway.source.codec, 1 << 20)
        await offload.render(messages, ())  # starts the process, which may take longer than the grace
        offload.seconds = offload.rests_until = 0.0
        await offload.render(messages, ())
        assert offload.rests_until == 0.0
        offload.seconds = workers.GRACE
        await offload.render(messages, ())
        assert offload.rests_until > 0.0
        until = offload.rests_until = time.monotonic() + 0.2
        await offload.render(messages, ())
        assert time.monotonic() >= until


async def test_stopping_does_not_wait_for_queued_jobs(world: World) -> None:
    """A session sends sixteen bodies at a time, each of which may take a minute: the gateway did them all first."""
    pool = WorkerPool(most=1)
    offload = RequestProcessor(pool, world.gateway.source.codec, 1 << 30)
    jobs = [asyncio.create_task(offload.render((user(f"{n} words " * 100_000),), ())) for n in range(12)]
    await wait_until(lambda: pool._children)
    started = time.monotonic()
    await pool.close()
    assert all(isinstance(each, GatewayFault) for each in await asyncio.gather(*jobs, return_exceptions=True))
    assert time.monotonic() - started < 5.0  # 13 s for four of them, before
    assert not pool._children


async def test_a_client_that_leaves_the_line_takes_its_body_along(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only jobs that a process has begun go on: bodies of departed clients waited in memory for their turn."""
    begun, run = list[int](), WorkerPool._run

    async def noting(pool: WorkerPool, pieces: Any) -> bytes:
        begun.append(len(pieces))
        return await run(pool, pieces)

    monkeypatch.setattr(WorkerPool, "_run", noting)
    async with pool_of(1) as pool:
        offload = RequestProcessor(pool, world.gateway.source.codec, 1 << 20)
        jobs = [asyncio.create_task(offload.render((user(f"{n} words " * 20_000),), ())) for n in range(3)]
        await wait_until(lambda: begun)
        for job in jobs:
            job.cancel()
        await asyncio.wait(jobs)
        await wait_until(lambda: not pool._running)
        assert begun == [1] and offload.seconds > 0.0, "the first one is paid"


async def test_a_gateway_has_files_for_all_connections_that_it_allows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen agents with 64 connections each used up the open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(signals, "OPEN_FILES", min(900, hard))
    another = server.Gateway(world.gateway.source, sampling=Sampling(), on_turn=lambda *_: None)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(800, hard), hard))
        await another.start()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(900, hard), hard)
    finally:
        await another.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_that_is_killed_is_replaced_and_one_that_hangs_is_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, asked = world.gateway.source.codec, (user("some words " * 2000),)
    async with pool_of(1) as pool:
        offload, expected = RequestProcessor(pool, codec, 1 << 20), codec.render(asked)
        assert await offload.render(asked, ()) == expected
        (child,) = pool._children
        # when memory runs out, the kernel ends this process and not a learner
        assert Path(f"/proc/{child.process.pid}/oom_score_adj").read_text() == "1000\n"
        child.process.kill()
        assert await offload.render(asked, ()) == expected
        monkeypatch.setattr(workers, "JOB_SECONDS", 0.05)
        with pytest.raises(Exception, match="too much memory or time"):
            await offload.render((user("other words " * 200_000),), ())
        monkeypatch.setattr(workers, "JOB_SECONDS", 60.0)
        assert await offload.render(asked, ()) == expected
    assert child.process.poll() is not None


@pytest.mark.parametrize(
    ("dialect", "field"),
    [("chat", "messages"), ("chat", "tools"), ("chat", "stop"), ("responses", "input"), ("messages", "stop_sequences")],
)
def test_only_the_first_wrong_item_of_a_body_is_described(dialect: str, field: str) -> None:
    """A short body, which is read on the event loop, had 100,000 errors: all requests waited for seconds."""
    whole = {"model": "policy", "messages": [user("a")], "input": "a", "max_tokens": 1, field: [1] * 1000}
    with pytest.raises(ApiError, match=field) as caught:
        PARSERS[dialect](json.dumps(whole).encode())
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() <= 2


@pytest.mark.parametrize("stop", [["a"] * 17, ["a" * 257], [""]])
@pytest.mark.parametrize(("dialect", "field"), [("chat", "stop"), ("messages", "stop_sequences")])
def test_stop_strings_that_delay_each_token_are_refused(dialect: str, field: str, stop: list[str]) -> None:
    """With 95,000 of them, which fit into a short body, each token took the event loop 35 ms."""
    whole = {"model": "policy", "messages": [user("a")], "max_tokens": 1}
    most = [*"abcdefghijklmno", "p" * 256]
    assert PARSERS[dialect](json.dumps(whole | {field: most}).encode()).stop == tuple(most)
    with pytest.raises(ApiError, match=f"{field} must have at most 16"):
        PARSERS[dialect](json.dumps(whole | {field: stop}).encode())
