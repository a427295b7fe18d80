"""Several vLLM servers as one engine, against scripted ones: `test_vllm_real.py` asks real ones."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer, unused_port

from coderepairrl.assembly.route import check_route
from coderepairrl.config import load
from coderepairrl.engines import make
from coderepairrl.engines.vllm import Vllm, fleet
from coderepairrl.engines.vllm.fleet import Fleet
from coderepairrl.engines.vllm.routing import EXCESS, SLACK, PrefixRouter
from coderepairrl.errors import ConfigError, EngineFault, PrerequisiteError

from . import fake_vllm
from .conftest import ask
from .test_vllm import CANNOT_BE, TEN, adapter, state, weights_named

PROMPT = list(range(40))


async def serve(port: int = 0, **settings: Any) -> TestServer:
    server = TestServer(fake_vllm.make_app(**settings), port=port or None)
    await server.start_server()
    return server


def url(server: TestServer) -> str:
    return str(server.make_url("/"))


@pytest.fixture
async def wires() -> AsyncIterator[list[TestServer]]:
    """Two servers of somebody else."""
    servers = [await serve(), await serve()]
    yield servers
    for server in servers:
        await server.close()


@pytest.fixture
async def joined(
    wires: list[TestServer], miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(fleet, "REJOIN", 0.1)
    spec = Vllm(url=[url(server) for server in wires], lora_rank=8, slots=64)
    engine = await spec.start(miniature, log_dir=tmp_path)
    assert isinstance(engine, Fleet)
    yield engine
    await engine.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def test_attempts_of_a_group_share_a_server_and_groups_are_spread(joined: Fleet, wires: list[TestServer]) -> None:
    groups = [[group] * 64 for group in range(1, 9)]
    await asyncio.gather(*(ask(joined, ids, TEN, seed) for ids in groups for seed in range(4)))
    sent = [[asked["token_ids"][0] for asked in state(server).requests] for server in wires]
    assert not set(sent[0]) & set(sent[1]) and sorted(map(len, sent)) == [16, 16]
    await ask(joined, groups[0] + [9] * 30, TEN)  # a later turn follows its episode
    [where] = [server for server in wires if state(server).requests[-1]["token_ids"][64:]]
    assert 1 in sent[wires.index(where)]


async def test_without_affinity_the_least_busy_server_is_asked(
    wires: list[TestServer], miniature: Path, tmp_path: Path
) -> None:
    spec = Vllm(url=[url(server) for server in wires], affinity=False)
    engine = await spec.start(miniature, log_dir=tmp_path)
    await asyncio.gather(*(ask(engine, PROMPT, TEN, seed) for seed in range(8)))
    assert [len(state(server).requests) for server in wires] == [4, 4]
    await engine.close()


def test_no_server_is_much_busier_than_the_mean() -> None:
    """Whatever is asked: the prefix decides only among servers below the bound."""
    draw, router, busy = random.Random(0), PrefixRouter(), dict.fromkeys(range(3), 0)
    common = [7] * 64
    for _ in range(2000):
        for at in busy:
            busy[at] -= draw.randint(0, min(2, busy[at]))
        chosen = router.choose(common + [draw.randint(0, 5)] * 32, busy)
        busy[chosen] += 1
        assert busy[chosen] <= max(EXCESS * sum(busy.values()) / 3 + SLACK, min(busy.values()) + 1)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coderepairrl.engines.vllm.routing.REMEMBERED", 8)
    router = PrefixRouter()
    for first in range(100):
        router.choose([first] * 64, {0: 0})
    assert len(router._sent[0]) == 8
    router.forget()
    assert not router._sent


async def test_weights_are_live_at_all_servers_or_at_none(
    joined: Fleet, wires: list[TestServer], miniature: Path, tmp_path: Path
) -> None:
    first = weights_named(miniature, tmp_path / "first.safetensors")
    assert await joined.load(first[0], 1, first[1]) == 1
    assert [state(server).served for server in wires] == ["first.safetensors"] * 2
    state(wires[1]).refuses = "second"
    second = weights_named(miniature, tmp_path / "second.safetensors")
    streams = [asyncio.create_task(ask(joined, [fake_vllm.UNTIL_SWAP] * 20, TEN)) for _ in range(2)]
    await until(lambda: sum(state(server).running for server in wires) == 2)
    with pytest.raises(EngineFault, match=rf"{url(wires[1])}: the server refused .*serves version 1 again: shape"):
        await joined.load(second[0], 2, second[1])
    assert [state(server).served for server in wires] == ["first.safetensors"] * 2
    assert (await joined.health())["version"] == 1
    for _, _, versions in [*await asyncio.gather(*streams), await ask(joined, PROMPT, TEN)]:
        assert set(versions) == {1}, "nothing was sampled by what was given up"


async def test_adapters_are_live_at_all_servers_or_at_none(
    joined: Fleet, wires: list[TestServer], tmp_path: Path
) -> None:
    folder, checksum = adapter(tmp_path / "one")
    await joined.load(folder, 1, checksum)
    state(wires[0]).refuses = "two"
    other, checksum = adapter(tmp_path / "two")
    with pytest.raises(EngineFault, match=rf"{url(wires[0])}: the server refused the adapter .* of rank 8"):
        await joined.load(other, 2, checksum)
    assert [list(state(server).adapters) for server in wires] == [["policy-v1"]] * 2
    assert set((await ask(joined, PROMPT, TEN))[2]) == {1}
    state(wires[0]).refuses = ""
    assert await joined.load(other, 2, checksum) == 2
    assert set((await ask(joined, PROMPT, TEN))[2]) == {2}


async def test_a_lost_server_is_joined_again_with_the_weights_of_then(
    joined: Fleet, wires: list[TestServer], miniature: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    port = wires[0].port
    # one request at each server, and one of them goes
    asked = [asyncio.create_task(ask(joined, [fake_vllm.UNTIL_SWAP, n] * 20, TEN)) for n in (1, 2)]
    await until(lambda: all(state(server).running for server in wires))
    for transport in state(wires[0]).connections:
        transport.abort()
    await wires[0].close()
    path, checksum = weights_named(miniature, tmp_path / "new.safetensors")
    await joined.load(path, 1, checksum)
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(isinstance(end, EngineFault) for end in ended) == [False, True], "the other one goes on"
    assert (await joined.health())["servers"] == 1
    assert "1 of 2 servers go on" in caplog.text
    for n in range(4):
        assert set((await ask(joined, [n] * 40, TEN))[2]) == {1}
    wires[0] = await serve(port)
    await until(lambda: state(wires[0]).served == "new.safetensors")
    await until(lambda: "2 of 2 serve" in caplog.text)
    assert (await joined.health())["servers"] == 2
    ended = await asyncio.gather(*(ask(joined, [n] * 40, TEN) for n in range(10, 20)))
    assert {version for _, _, versions in ended for version in versions} == {1}
    assert len(state(wires[0]).requests) == 5


async def test_a_lost_server_that_comes_back_otherwise_stays_out(
    joined: Fleet, wires: list[TestServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    port = wires[0].port
    await wires[0].close()
    for n in range(2):  # the one that meets it fails
        await asyncio.gather(ask(joined, [n] * 40, TEN), return_exceptions=True)
    wires[0] = await serve(port, context=1024)
    await until(lambda: "is not back: the servers differ in --max-model-len" in caplog.text)
    assert (await joined.health())["servers"] == 1


async def test_when_all_are_gone_every_call_says_why(joined: Fleet, wires: list[TestServer]) -> None:
    for server in wires:
        await server.close()
    for n in range(2):
        with pytest.raises(EngineFault, match="nobody listens"):
            await ask(joined, [n] * 40, TEN)
    for call in (lambda: ask(joined, PROMPT, TEN), joined.health, lambda: joined.load(Path("x"), 1, "")):
        with pytest.raises(EngineFault, match="none of 2 servers is left: http.*nobody listens.*; http"):
            await call()


@pytest.mark.parametrize(
    ("other", "kind", "message", "fix"),
    [
        ({"version": "0.32.1"}, ConfigError, "its version of vLLM: .* has 0.32.1, and .* 0.32.0", "the same vLLM"),
        ({"version": "0.33.0"}, PrerequisiteError, "has vLLM 0.33.0", "0.32"),
        ({"context": 256}, ConfigError, "--max-model-len: .* has 256, and .* 512", "the same --max-model-len"),
        ({"model": "/models/other"}, ConfigError, "--model: .* has other, and .* miniature", "the same --model"),
        ({"rank": 4}, ConfigError, "adapters of rank 8, and .* takes them up to rank 4", "--max-lora-rank 8"),
        ({"rank": 0}, ConfigError, "up to rank 0", "--enable-lora"),
    ],
)
async def test_servers_that_differ_are_refused(
    other: dict[str, Any], kind: type[Exception], message: str, fix: str, miniature: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as servers:
        first, second = await serve(), await serve(**other)
        for server in (first, second):
            servers.push_async_callback(server.close)
        with pytest.raises(kind, match=message) as caught:
            await Vllm(url=[url(first), url(second)], lora_rank=8).start(miniature, log_dir=tmp_path)
        assert url(second) in str(caught.value) and fix in caught.value.fix  # type: ignore[attr-defined]


async def test_all_must_be_there_at_the_start(wires: list[TestServer], miniature: Path, tmp_path: Path) -> None:
    absent = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(EngineFault, match=f"nobody listens at {absent}"):
        await Vllm(url=[url(wires[0]), absent]).start(miniature, log_dir=tmp_path)


def test_lists_that_cannot_be() -> None:
    one = "http://localhost:1"
    for options, message in (
        ({"url": []}, "a list of no server"),
        ({"url": [one, one + "/"]}, "names a server twice"),
        ({"url": [one, "somewhere"]}, "'somewhere' is no address"),
        ({"url": [one], "affinity": False}, "affinity is for several servers"),
        ({"affinity": False}, "affinity is for several servers"),
    ):
        with pytest.raises(ConfigError, match=message):
            make("vllm", **options)
    spec = make("vllm", url=[one, "http://localhost:2"])
    assert (spec.servers, spec.receives, spec.takes_gpus) == (2, False, False)
    assert make("vllm", url=one).servers == make("tiny").servers == 1


def test_weights_without_a_file_are_for_one_server(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\nname = "several"\n[tasks]\nsource = "handmade"\n')
    config = load(tmp_path / "run.toml", ["engine=vllm", "engine.weights=gloo"])
    with pytest.raises(ConfigError, match="is for one server, and engine.options.url names 2"):
        check_route(config, make("vllm", url=["http://localhost:1", "http://localhost:2"]))


def test_the_other_options_are_checked_as_with_one() -> None:
    for options, message, _ in CANNOT_BE:
        if isinstance(options.get("url"), str):
            with pytest.raises(ConfigError, match=message):
                make("vllm", **options | {"url": [options["url"], "http://localhost:2"]})


async def test_a_request_that_is_given_up_is_not_counted(joined: Fleet, wires: list[TestServer]) -> None:
    stream = joined.generate([fake_vllm.UNTIL_SWAP] * 20, TEN, 0)
    await anext(stream)
    assert sorted(replica.busy for replica in joined._replicas.values()) == [0, 1]
    await stream.aclose()
    assert {replica.busy for replica in joined._replicas.values()} == {0}
    await until(lambda: not any(state(server).running for server in wires))


@pytest.mark.parametrize("full", [True, False])
async def test_a_server_that_was_started_anew_between_requests_is_joined_again(
    joined: Fleet,
    wires: list[TestServer],
    miniature: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    full: bool,
) -> None:
    """It answers as if nothing had happened, without the weights: it costs one request, not each that it is sent."""
    caplog.set_level(logging.WARNING)
    path, checksum = weights_named(miniature, tmp_path / "new.safetensors") if full else adapter(tmp_path / "new")
    await joined.load(path, 1, checksum)
    port = wires[0].port
    await wires[0].close()
    wires[0] = await serve(port)
    ended = []
    for n in range(20):
        try:
            ended.append(await ask(joined, [n] * 40, TEN))
        except EngineFault:  # it is retried, and goes to the other
            ended.append(await ask(joined, [n] * 40, TEN))
    assert {version for _, _, versions in ended for version in versions} == {1}
    await until(lambda: "2 of 2 serve" in caplog.text)
    assert caplog.text.count("lost the server") == 1
    before = len(state(wires[0]).requests)
    await asyncio.gather(*(ask(joined, [n] * 40, TEN) for n in range(20, 30)))
    assert len(state(wires[0]).requests) == before + 5
    assert (await joined.health())["version"] == 1


@pytest.mark.parametrize("route", ["/openapi.json", "/v1/models", "/version", "/server_info"])
async def test_a_proxys_page_is_no_end_of_rejoining(
    joined: Fleet, wires: list[TestServer], caplog: pytest.LogCaptureFixture, route: str
) -> None:
    caplog.set_level(logging.WARNING)
    port = wires[0].port
    await wires[0].close()
    for n in range(2):
        await asyncio.gather(ask(joined, [n] * 40, TEN), return_exceptions=True)
    wires[0] = await serve(port, context=512)
    state(wires[0]).pages = {route}
    await until(lambda: "is not back: " in caplog.text.rpartition("nobody listens")[2])
    state(wires[0]).pages = set()
    await until(lambda: "2 of 2 serve" in caplog.text)


async def test_all_servers_are_left_whatever_happens(
    joined: Fleet, wires: list[TestServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Joining raises what nobody thought of, and so does leaving one server."""
    caplog.set_level(logging.WARNING)

    async def broken(_: str) -> Any:
        raise ValueError("what is this")

    joined._join = broken
    lost, left = joined._replicas[0].engine, joined._replicas[1].engine
    lost._link.die("gone")
    await joined._drop_if_dead(0, lost, EngineFault("gone"))
    await until(lambda: "is not back: ValueError('what is this')" in caplog.text)
    await asyncio.sleep(0.2)
    assert not joined._watch.done()

    async def fails() -> None:
        raise RuntimeError("no leave")

    monkeypatch.setattr(left._served, "leave", fails)
    with pytest.raises(RuntimeError, match="no leave"):
        await joined.close()
    assert not left.alive and left._link.server._session.closed
    await joined.close()


def test_where_a_prompt_failed_it_is_not_sent_again() -> None:
    router, prompt = PrefixRouter(), [1] * 64
    assert router.choose(prompt, {0: 0, 1: 0}) == 0 == router.choose(prompt, {0: 1, 1: 0})
    router.failed(0, prompt)
    assert router.choose(prompt, {0: 0, 1: 0}) == 1
