"""Several runs at one server, each with adapters of its own: our side, against a scripted server.

The script proves nothing about vLLM itself: `test_vllm_real.py` asks the real one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from safetensors.numpy import save_file

from coderepairrl.assembly.route import check_route
from coderepairrl.config import load
from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.sync import weights
from coderepairrl.types import Sampling

from . import fake_vllm
from .conftest import ask
from .test_vllm import adapter, state, weights_named

TEN = Sampling(max_tokens=10)


@pytest.fixture
async def wire(miniature: Path) -> AsyncIterator[TestServer]:
    server = TestServer(fake_vllm.make_app())
    await server.start_server()
    state(server).model, state(server).rank = str(miniature), 16
    yield server
    await server.close()


async def run_of(wire: TestServer, miniature: Path, folder: Path, rank: int = 8) -> VllmEngine:
    engine = await Vllm(url=str(wire.make_url("/")), shared=True, lora_rank=rank).start(miniature, log_dir=folder)
    assert isinstance(engine, VllmEngine)
    return engine


async def test_runs_do_not_disturb_each_other(wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    """Same versions, other weights; nobody is paused, no cache is dropped, and each unloads what is its own."""
    one, two = [await run_of(wire, miniature, tmp_path / name) for name in ("one", "two")]
    assert await ask(one, [1], TEN) == await ask(two, [1], TEN), "the base, as it is at the server"
    long = one.generate([fake_vllm.UNTIL_SWAP], TEN, 0)
    await anext(long)
    for version in (1, 2, 3):
        for name, engine in (("one", one), ("two", two)):
            path, checksum = adapter(tmp_path / f"{name}{version}")
            assert await engine.load(path, version, checksum) == version
            assert (await ask(engine, [1], TEN))[2] == [version] * 10
    assert {chunk.version async for chunk in long} == {0}
    paths = sorted(Path(path).name for path in state(wire).adapters.values())
    assert paths in (["one3", "two3"], ["one2", "one3", "two2", "two3"], ["one3", "two2", "two3"])
    asked = {request["model"] for request in state(wire).requests}
    assert len(asked) == 7 and not {"/pause", "/resume", "/sleep"} & {
        call.partition("?")[0] for call in state(wire).calls
    }
    assert not any("reset_prefix_cache" in call for call in state(wire).calls) and not state(wire).reloads
    await two.close()
    assert all("one" in path for path in state(wire).adapters.values()), "what others have stays"
    assert (await ask(one, [1], TEN))[2] == [3] * 10
    await one.close()
    assert not state(wire).adapters


async def test_a_run_that_was_killed_takes_its_own_away_when_it_is_resumed(
    wire: TestServer, miniature: Path, tmp_path: Path
) -> None:
    killed, other = [await run_of(wire, miniature, tmp_path / name) for name in ("killed", "other")]
    for engine, name in ((killed, "a"), (other, "b")):
        await engine.load(*numbered(adapter(tmp_path / name), 1))
    killed._link.die("kill -9")
    await killed.close()
    assert len(state(wire).adapters) == 2
    resumed = await run_of(wire, miniature, tmp_path / "killed")
    assert [Path(path).name for path in state(wire).adapters.values()] == ["b"]
    await resumed.load(*numbered(adapter(tmp_path / "c"), 1))
    assert (await ask(other, [1], TEN))[2] == (await ask(resumed, [1], TEN))[2] == [1] * 10
    await asyncio.gather(resumed.close(), other.close())


def numbered(given: tuple[Path, str], version: int) -> tuple[Path, int, str]:
    return given[0], version, given[1]


async def test_a_name_that_a_killed_process_had_asked_for_is_of_who_asks_now(
    wire: TestServer, miniature: Path, tmp_path: Path
) -> None:
    """The server went on loading it after the run that was resumed had looked what is left."""
    engine = await run_of(wire, miniature, tmp_path / "one")
    path, checksum = adapter(tmp_path / "new")
    state(wire).late = str(tmp_path / "old")
    assert await engine.load(path, 1, checksum) == 1
    assert list(state(wire).adapters.values()) == [str(path.resolve())]
    assert (await ask(engine, [1], TEN))[2] == [1] * 10
    await engine.close()
    assert not state(wire).adapters


async def test_without_sharing_a_taken_name_is_of_another_run(
    wire: TestServer, miniature: Path, tmp_path: Path
) -> None:
    one, two = [
        await Vllm(url=str(wire.make_url("/")), lora_rank=8).start(miniature, log_dir=tmp_path) for _ in range(2)
    ]
    await one.load(*numbered(adapter(tmp_path / "first"), 1))
    with pytest.raises(EngineFault, match="already been loaded"):
        await two.load(*numbered(adapter(tmp_path / "second"), 1))
    await one.close()
    await two.close()


async def test_a_full_server_is_waited_for_and_then_named(wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    state(wire).loras = 2
    one, two = [await run_of(wire, miniature, tmp_path / name) for name in ("one", "two")]
    await one.load(*numbered(adapter(tmp_path / "a"), 1))
    await two.load(*numbered(adapter(tmp_path / "b"), 1))
    one._link.patience = 0.3
    with pytest.raises(EngineFault, match="2 adapters, 1 of them of other runs, are in use") as full:
        await one.load(*numbered(adapter(tmp_path / "c"), 2))
    assert "--max-loras, two for each run" in full.value.fix
    assert (await ask(one, [1], TEN))[2] == [1] * 10
    one._link.patience = 30.0
    loading = asyncio.create_task(one.load(*numbered(adapter(tmp_path / "d"), 2)))
    await asyncio.sleep(0.2)
    assert not loading.done()
    await two.close()
    assert await loading == 2
    await one.close()


async def test_an_adapter_that_is_gone_is_a_clear_error(wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    one = await run_of(wire, miniature, tmp_path / "one")
    await one.load(*numbered(adapter(tmp_path / "a"), 1))
    state(wire).adapters.clear()
    with pytest.raises(EngineFault, match="has no adapter policy-.*-v1-.* any more") as gone:
        await ask(one, [1], TEN)
    assert "is joined again, and given the weights" in gone.value.fix
    assert not one.alive, "whoever supervises joins the server again"
    await one.close()


async def test_a_supervised_run_outlives_a_server_that_is_started_anew(
    wire: TestServer, miniature: Path, tmp_path: Path
) -> None:
    """One request is lost, with an adapter or with the base."""

    async def join() -> VllmEngine:
        return await run_of(wire, miniature, tmp_path / "one")

    engine = SupervisedEngine(await join(), join, restarts=3)
    for adapted in (False, True):
        if adapted:
            await engine.load(*numbered(adapter(tmp_path / "a"), 1))
        state(wire).adapters.clear()
        state(wire).weights = "default"
        with pytest.raises(EngineFault, match="any more" if adapted else "it was started anew"):
            await ask(engine, [1], TEN)
        assert (await ask(engine, [1], TEN))[2] == [int(adapted)] * 10
    await engine.close()


def keys(wire: TestServer) -> set[tuple[str, str, str]]:
    """What vLLM's cache parts prompts by, of the requests so far: name and path of the adapter, and the salt."""
    return {(asked["model"], asked["path"], asked["cache_salt"]) for asked in state(wire).requests}


async def test_other_weights_have_other_keys_in_the_cache(wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    """A run that is begun anew in the same folder, at a server whose cache has the last one's prompts."""
    for attempt in range(2):
        engine = await run_of(wire, miniature, tmp_path / "run")
        path, _ = adapter(tmp_path / "v1")
        save_file({"x": np.full((8, 4), attempt, np.float32)}, path / weights.ADAPTER)
        await engine.load(path, 1, weights.checksum(path))
        await ask(engine, [1], TEN)
        state(wire).requests[-1]["path"] = state(wire).adapters[state(wire).requests[-1]["model"]]
        await engine.close()
        shutil.rmtree(path)
    first, second = keys(wire)
    assert first[1] == second[1] and first[0] != second[0] and first[2] != second[2]


async def test_runs_of_one_path_on_two_machines_are_two(wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    """As if the folder were another one at the same path; and the same one is the same run."""
    one = await run_of(wire, miniature, tmp_path / "run")
    await one.load(*numbered(adapter(tmp_path / "a"), 1))
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    two = await run_of(wire, miniature, tmp_path / "run")
    assert (await ask(one, [1], TEN))[2] == [1] * 10, "its adapter is there"
    await asyncio.gather(one.close(), two.close())


async def test_a_load_that_is_called_off_leaves_nothing(wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    engine = await run_of(wire, miniature, tmp_path / "run")
    path, checksum = adapter(tmp_path / "a")
    asked = asyncio.Event()

    async def agree() -> bool:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    loading = asyncio.create_task(engine.load(path, 1, checksum, agree))
    await asked.wait()
    assert len(state(wire).adapters) == 1
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not state(wire).adapters
    assert await engine.load(path, 1, checksum) == 1
    await engine.close()


async def test_a_second_name_of_the_model_is_no_adapter(wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    state(wire).aliases, state(wire).loras = ["alias"], 2
    engine = await run_of(wire, miniature, tmp_path / "run")
    engine._link.patience = 1.0
    state(wire).adapters["other"] = "/other"
    await engine.load(*numbered(adapter(tmp_path / "a"), 1))
    await engine.close()
    own = await Vllm(url=str(wire.make_url("/")), lora_rank=8).start(miniature, log_dir=tmp_path)
    assert not state(wire).adapters, "those that are left there are unloaded"
    await own.close()


async def test_a_load_waits_for_room_when_another_run_was_faster(
    wire: TestServer, miniature: Path, tmp_path: Path
) -> None:
    engine = await run_of(wire, miniature, tmp_path / "run")
    state(wire).full = True
    loading = asyncio.create_task(engine.load(*numbered(adapter(tmp_path / "a"), 1)))
    await asyncio.sleep(0.3)
    assert not loading.done() and set(state(wire).adapters.values()) == {"/other"}, "ours was taken back"
    state(wire).adapters.clear()
    assert await loading == 1
    await engine.close()


async def test_of_runs_that_see_the_last_place_at_once_one_has_it(
    wire: TestServer, miniature: Path, tmp_path: Path
) -> None:
    runs = [await run_of(wire, miniature, tmp_path / name) for name in ("one", "two", "three")]
    state(wire).loras = 3
    for engine in runs:
        engine._served._most_adapters = 3
    for name, engine in zip("ab", runs, strict=False):
        await engine.load(*numbered(adapter(tmp_path / name), 1))
    state(wire).together = asyncio.Barrier(2)
    loads = [
        asyncio.create_task(engine.load(*numbered(adapter(tmp_path / name), version)))
        for name, engine, version in (("c", runs[0], 2), ("d", runs[2], 1))
    ]
    [first], [second] = await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.3)
    assert not second.done() and len(state(wire).adapters) == 3, "it took its own back, and waits"
    winner, loser = (runs[0], runs[2]) if first is loads[0] else (runs[2], runs[0])
    assert await first == (2 if winner is runs[0] else 1)
    for engine in (winner, runs[1]):
        assert (await ask(engine, [1], TEN))[2] == [2 if engine is runs[0] else 1] * 10
    await runs[1].close()
    await second
    assert (await ask(loser, [1], TEN))[2] == [2 if loser is runs[0] else 1] * 10
    await asyncio.gather(runs[0].close(), runs[2].close())
    assert not state(wire).adapters


async def test_what_cannot_be_shared_is_refused(wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters of rank 32, and .* takes 4 up to rank 16") as small:
        await run_of(wire, miniature, tmp_path, rank=32)
    assert "--max-lora-rank 32" in small.value.fix
    state(wire).loras = 1
    with pytest.raises(ConfigError, match="takes 1 up to rank 16"):
        await run_of(wire, miniature, tmp_path)
    state(wire).loras, state(wire).model = 4, "/elsewhere/model"
    with pytest.raises(ConfigError, match="serves /elsewhere/model"):
        await run_of(wire, miniature, tmp_path)
    state(wire).model = str(miniature)
    engine = await run_of(wire, miniature, tmp_path)
    path, checksum = weights_named(miniature, tmp_path / "full.safetensors")
    with pytest.raises(EngineFault, match="full weights would replace those that other runs sample from"):
        await engine.load(path, 1, checksum)
    await engine.close()
    for options, message in (
        ({}, "several runs join"),
        ({"url": ["http://a:1", "http://b:1"]}, "several runs join"),
        ({"url": "http://a:1", "lora_rank": 0}, "full weights, which the other runs would get"),
    ):
        with pytest.raises(ConfigError, match=message):
            Vllm(shared=True, **options)  # type: ignore[arg-type]
    spec = Vllm(shared=True, url="http://a:1")
    config = load("hello", ["engine=vllm", "engine.options={ url = 'http://a:1', shared = true }"])
    with pytest.raises(ConfigError, match="all weights are trained"):
        check_route(config, spec)
