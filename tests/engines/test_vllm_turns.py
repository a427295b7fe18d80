"""A server that sleeps while the learner uses its GPU: the client, against a scripted server.

`test_vllm_real.py` runs the real one, as far as it sleeps on a CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.plan.devices import check_sleeps
from coderepairrl.protocols import Engine
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.types import Sampling

from . import fake_vllm
from .conftest import ask, load
from .test_vllm import copy_weights, env, joined, make_adapter, server, start, state

__all__ = ["env", "joined", "server", "start"]
TEN = Sampling(max_tokens=10)


async def generate_until_swap(engine: Engine) -> AsyncIterator[tuple[int, int]]:
    """Yield the (token, version) pairs of a request that ends only after new weights."""
    async for chunk in engine.generate([fake_vllm.UNTIL_SWAP], TEN, 0):
        for token in chunk.ids:
            yield token, chunk.version


async def test_requests_survive_a_sleep_and_new_ones_wait(
    joined: VllmEngine, server: TestServer, miniature: Path, tmp_path: Path
) -> None:
    held = generate_until_swap(joined)
    assert [await anext(held), await anext(held)] == [(0, 0), (1, 0)]
    await joined.sleep()
    assert state(server).asleep == {"weights", "kv_cache"}
    await joined.sleep()
    assert [call for call in state(server).calls if "sleep" in call] == ["/sleep?level=1&mode=keep"]
    requests_before = len(state(server).requests)
    waiting = asyncio.create_task(ask(joined, [1], TEN))
    await asyncio.sleep(0.1)
    assert not waiting.done() and len(state(server).requests) == requests_before
    del state(server).calls[:]
    assert await load(joined, copy_weights(miniature, tmp_path / "new.safetensors"), 1) == 1
    steps = [call.partition("?tags=")[0::2] for call in state(server).calls]
    assert steps == [
        ("/wake_up", "weights"),
        ("/reset_prefix_cache?reset_running_requests=true", ""),
        ("/update_weight_version", ""),
        ("/wake_up", ""),
    ], "weights are replaced before the cache wakes, so that nothing is computed with old ones"
    assert [pair async for pair in held] == [(token, 1) for token in range(2, 10)]
    assert (await waiting)[2] == [1] * 10


async def test_adapters_are_loaded_after_waking(joined: VllmEngine, server: TestServer, tmp_path: Path) -> None:
    await load(joined, make_adapter(tmp_path / "a"), 1)
    await joined.sleep()
    waiting = asyncio.create_task(ask(joined, [1], TEN))
    await asyncio.sleep(0.05)
    await load(joined, make_adapter(tmp_path / "b"), 2)
    assert (await waiting)[2] == [2] * 10, "a request from its sleep has the new adapter"
    calls = [call for call in state(server).calls if "lora" in call or "wake" in call]
    assert calls[-2:] == ["/wake_up", "/v1/load_lora_adapter"] or calls[-3:-1] == ["/wake_up", "/v1/load_lora_adapter"]
    health = await joined.health()
    assert health["sleep_seconds"] > 0 and health["wake_seconds"] > 0


async def test_refused_weights_leave_it_awake_with_the_old_ones(
    joined: VllmEngine, server: TestServer, miniature: Path, tmp_path: Path
) -> None:
    await joined.sleep()
    with pytest.raises(EngineFault, match="has SHA-256"):
        await joined.load(copy_weights(miniature, tmp_path / "new.safetensors"), 1, "0" * 64)
    assert not state(server).asleep and (await ask(joined, [1], TEN))[2] == [0] * 10
    await joined.sleep()
    await joined.wake()
    await joined.wake()
    assert (await ask(joined, [1], TEN))[2] == [0] * 10


@pytest.mark.parametrize(("route", "after"), [("/sleep", 0), ("/wake_up", 0), ("/wake_up", 1)])
async def test_a_server_that_cannot_sleep_or_wake_is_replaced_with_the_new_weights(
    route: str, after: int, miniature: Path, tmp_path: Path
) -> None:
    """Also if the weights wake and the cache does not."""
    servers: list[TestServer] = []

    async def begin() -> Engine:
        server = TestServer(fake_vllm.make_app())
        await server.start_server()
        servers.append(server)
        return await Vllm(url=str(server.make_url("/"))).start(miniature, log_dir=tmp_path)

    deaths: list[str] = []
    engine = SupervisedEngine(await begin(), begin, restarts=2, on_death=deaths.append)
    state(servers[0]).fails[route] = after
    held = generate_until_swap(engine)
    await anext(held)
    path = copy_weights(miniature, tmp_path / "new.safetensors")
    await engine.sleep()
    waiting = asyncio.create_task(ask(engine, [1], TEN))
    await asyncio.sleep(0.1)
    assert len(servers) == 1, "while the learner uses the GPU no server starts on it"
    assert await load(engine, path, 1) == 1
    with pytest.raises(EngineFault, match="CUDA out of memory"):
        [pair async for pair in held]
    assert (await waiting)[2] == [1] * 10, "other requests do not notice"
    assert (await engine.health())["restarts"] == 1 and len(servers) == 2
    assert [why for why in deaths if "CUDA out of memory" in why] == deaths and len(deaths) == 1
    await engine.close()
    for each in servers:
        await each.close()


@pytest.mark.parametrize("when", ["falling asleep", "asleep"])
async def test_requests_that_wait_for_a_slot_fail_when_the_server_dies(
    when: str, server: TestServer, miniature: Path, tmp_path: Path
) -> None:
    engine = await Vllm(url=str(server.make_url("/")), slots=1).start(miniature, log_dir=tmp_path)
    held = asyncio.create_task(ask(engine, [fake_vllm.UNTIL_SWAP], TEN))
    queued = asyncio.create_task(ask(engine, [1], TEN))
    while state(server).generated < 2:
        await asyncio.sleep(0.01)
    if when == "asleep":
        await engine.sleep()
        for connection in state(server).connections:
            connection.abort()
    else:
        state(server).fails["/sleep"] = 0
        with pytest.raises(EngineFault, match="CUDA out of memory"):
            await engine.sleep()
    async with asyncio.timeout(10):
        faults = await asyncio.gather(held, queued, return_exceptions=True)
    assert [type(fault) for fault in faults] == [EngineFault] * 2 and str(faults[0]) == str(faults[1])
    await engine.close()


async def test_waiting_requests_fail_when_a_sleeping_engine_is_closed(joined: VllmEngine) -> None:
    await joined.sleep()
    waiting = asyncio.create_task(ask(joined, [1], TEN))
    await asyncio.sleep(0.05)
    await joined.close()
    async with asyncio.timeout(10):
        with pytest.raises(EngineFault, match="was closed"):
            await waiting


async def test_a_server_that_hangs_as_it_wakes_is_given_up(joined: VllmEngine, server: TestServer) -> None:
    await joined.sleep()
    joined.server.patience = 0.3
    state(server).hangs.add("/wake_up")
    with pytest.raises(EngineFault, match="failed to wake up: /wake_up did not answer within 0 s"):
        await joined.wake()
    with pytest.raises(EngineFault, match="wake_up"):
        await ask(joined, [1], TEN)


def test_a_joined_server_is_not_put_to_sleep() -> None:
    with pytest.raises(ConfigError, match="cannot sleep") as caught:
        check_sleeps(Vllm(url="http://localhost:1"))
    assert "others may use" in caught.value.fix
    check_sleeps(Vllm())
