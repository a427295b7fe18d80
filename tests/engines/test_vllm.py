"""The vLLM engine's side of the wire, against a scripted server: what happens when the server fails.

The script proves nothing about vLLM itself: `test_vllm_real.py` asks the real one.
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
from coderepairrl.protocols import Engine
from coderepairrl.registry import protocol_members
from coderepairrl.sync import weights
from coderepairrl.sync import wire as sync_wire
from coderepairrl.types import Chunk, EngineNeeds, Sampling
from processes.test_children import gone

from . import fake_vllm
from .conftest import ask

TEN = Sampling(max_tokens=10)


def site(folder: Path, version: str = "0.32.0", package: str = "vllm") -> dict[str, str]:
    """The environment in which Python finds the fake where vLLM would be."""
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
    """Starts a server of our own, or joins one at `url`."""

    def begin(model: Path = miniature, **options: Any) -> Awaitable[VllmEngine]:
        ours = {} if "url" in options else {"python": sys.executable, "env": env}
        return Vllm(**(ours | options)).start(model, log_dir=tmp_path)

    return begin


@pytest.fixture
async def engine(start: Start) -> AsyncIterator[VllmEngine]:
    """A server process of our own."""
    engine = await start()
    yield engine
    await engine.close()


@pytest.fixture
async def wire() -> AsyncIterator[TestServer]:
    """A server of somebody else, whose state the test sees."""
    server = TestServer(fake_vllm.make_app())
    await server.start_server()
    yield server
    await server.close()


def state(wire: TestServer) -> fake_vllm.State:
    found: fake_vllm.State = wire.app[fake_vllm.STATE]
    return found


@pytest.fixture
async def joined(wire: TestServer, start: Start) -> AsyncIterator[VllmEngine]:
    engine = await start(url=str(wire.make_url("/")), lora_rank=8, slots=4)
    yield engine
    await engine.close()


def weights_named(miniature: Path, target: Path) -> tuple[Path, str]:
    shutil.copy(miniature / "model.safetensors", target)
    return target, weights.compute_checksum(target)


def adapter(folder: Path, rank: int = 8) -> tuple[Path, str]:
    folder.mkdir()
    (folder / weights.ADAPTER_CONFIG).write_text(f'{{"r": {rank}}}')
    save_file({"x": np.zeros((rank, 4), np.float32)}, folder / weights.ADAPTER)
    return folder, weights.compute_checksum(folder)


async def test_tokens_logprobs_and_versions_arrive(engine: VllmEngine) -> None:
    assert protocol_members(Engine) <= {*dir(engine)} and engine.context == 512
    ids, logprobs, versions = await ask(engine, [1, 2, 3], TEN)
    assert (ids, logprobs, versions) == (list(range(10)), [-0.125] * 10, [0] * 10)
    health = await engine.health()
    assert (health["version"], health["running"], health["generated_tokens"]) == (0, 0, 10)


async def test_what_is_asked_of_the_server(joined: VllmEngine, wire: TestServer) -> None:
    await ask(joined, [1] * 509, Sampling(temperature=0.7, max_tokens=10, stop_ids=(5, 9)), -3)
    [asked] = state(wire).requests
    assert asked["token_ids"] == [1] * 509 and asked["cache_salt"].startswith("0-") and asked["model"] == "policy"
    assert asked["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 3,
        "stop_token_ids": [5, 9],
        "ignore_eos": True,
        "seed": (1 << 63) - 3,
        "logprobs": 0,
        "detokenize": False,
    }


async def test_no_connection_is_used_twice(joined: VllmEngine, wire: TestServer) -> None:
    """A server closes idle ones, and a request on one that it is closing would be taken for its death."""
    for _ in range(3):
        await ask(joined, [1], TEN)
    assert len(state(wire).connections) == 3


async def test_no_more_requests_at_the_server_than_slots(joined: VllmEngine, wire: TestServer) -> None:
    await asyncio.gather(*(ask(joined, [n], TEN) for n in range(20)))
    assert len(state(wire).requests) == 20
    assert state(wire).most_running <= 4


async def test_a_server_that_dies_in_start_up_says_why(start: Start) -> None:
    with pytest.raises(EngineFault, match=r"did not start: vLLM 0.32.0 exited with 1(?s:.*)no memory for the keys"):
        await start(args=["--fake", "die"])


async def test_a_server_that_hangs_in_start_up_is_ended(start: Start) -> None:
    with pytest.raises(EngineFault, match="not ready after 2 s") as caught:
        await start(args=["--fake", "hang"], start_seconds=2)
    assert "start_seconds" in caught.value.fix


async def test_another_version_is_refused_before_it_starts_or_where_it_is_joined(start: Start, tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match=r"has vLLM 0\.33\.1, and only 0\.32\.x is supported") as caught:
        await start(env=site(tmp_path / "other", "0.33.1"))
    assert "0.32" in caught.value.fix and not (tmp_path / "engine.log").exists()
    async with TestServer(fake_vllm.make_app("0.31.2")) as server:
        with pytest.raises(PrerequisiteError, match=r"0\.31\.2"):
            await start(url=str(server.make_url("/")))


async def test_nothing_is_imported_from_the_folder_that_it_is_started_in(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``crrl fix`` is started in anybody's repository."""
    repository, mark = tmp_path / "repository", tmp_path / "mark"
    repository.mkdir()
    for name in ("email", "vllm"):
        (repository / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(repository)
    await (await start()).close()
    assert not mark.exists()


CANNOT_BE: list[tuple[dict[str, Any], str, str]] = [
    ({"slots": 0}, "slots must be a whole number of at least 1, not 0", ""),
    ({"slots": "many"}, "not 'many'", ""),
    ({"context": 4096.5}, "context: Input should be a valid integer", ""),
    ({"max_loras": 1}, "max_loras must be .* at least 2, not 1", ""),
    ({"lora_rank": 1000}, "from 0 to 512, not 1000", ""),
    ({"patience": 0}, "patience must be a number above 0", ""),
    ({"dtype": "fp8"}, "dtype='fp8'", "bfloat16"),
    ({"head": "fp16"}, "head='fp16'", "fp32 or model"),
    ({"args": ["--hf-overrides", "{}"]}, "args has --hf-overrides", "engine.options.head=model"),
    ({"args": ["--hf_overrides.head_dtype=model"]}, "args has --hf-overrides", "engine.options.head=model"),
    ({"url": "http://localhost:1", "head": "model"}, "head is for a server", ""),
    ({"python": 3}, "python: Input should be a valid string, not 3", """python='"..."'"""),
    ({"env": {"A": 1}}, "env.A: Input should be a valid string, not 1", ""),
    ({"url": "somewhere"}, "not an address", "http://"),
    ({"url": 7}, "url: Input should be a valid string, not 7", ""),
    ({"url": ["http://localhost:1"]}, "url: Input should be a valid string", ""),
    ({"url": "http://localhost:1", "args": ["--x"]}, "args is for a server that is started here", ""),
    ({"url": "http://localhost:1", "python": "python3"}, "python is for a server", ""),
    ({"args": "--enforce-eager"}, "args: Input should be a valid array, not '--enforce-eager'", ""),
    ({"args": ["-tp", 2]}, "args.1: Input should be a valid string, not 2", ""),
    ({"args": 2}, "args: Input should be a valid array, not 2", ""),
    ({"args": ["--tensor-parallel-size 2"]}, "is one word", "two"),
    ({"args": ["--", "-tp", "2"]}, "belongs to no argument", "leave it out"),
    ({"args": ["other-model", "-tp", "2"]}, "belongs to no argument", "leave it out"),
    ({"args": ["--max-model-len=4096"]}, "args has --max-model-len", "set engine.options.context"),
    ({"args": ["--max_model_len", "4096"]}, "args has --max_model_len", "set engine.options.context"),
    ({"args": ["--max-model", "4096"]}, "args has --max-model", "set engine.options.context"),  # vLLM lets one
    ({"args": ["--max-num-seqs", "8"]}, "args has --max-num-seqs", "set engine.options.slots"),
    ({"args": ["-tp", "2", "--dtype", "half"]}, "args has --dtype", "set engine.options.dtype"),
    ({"args": ["--max-lora-rank", "8"]}, "args has --max-lora-rank", "set engine.options.lora_rank"),
    ({"args": ["--enable-lora"]}, "args has --enable-lora", "set engine.options.lora_rank"),
    ({"args": ["--max-loras", "4"]}, "args has --max-loras", "set engine.options.max_loras"),
    ({"args": ["--seed", "1"]}, "args has --seed", "run.seed"),
    ({"args": ["--served_model_name", "me"]}, "args has --served_model_name", "leave it out"),
    ({"args": ["--port", "80"]}, "args has --port", "engine.options.url"),
    ({"url": "http://me:word@127.0.0.1:1"}, "url has a login in it", "ssh -L"),
]


@pytest.mark.parametrize(("options", "message", "fix"), CANNOT_BE)
def test_options_that_cannot_be(options: dict[str, Any], message: str, fix: str) -> None:
    """On any machine, and before anything is started."""
    with pytest.raises(ConfigError, match=message) as caught:
        make_engine("vllm", **options)
    assert fix in caught.value.fix


def test_options_that_can_be() -> None:
    args = ["--tensor-parallel-size", "2", "-pp=1", "--enforce_eager", "--long-prefill-token-threshold", "-1"]
    make_engine("vllm", args=args, slots=8, context=4096, env={"A": "1"}, python="python3", dtype="half")
    make_engine("vllm", url="http://localhost:1", dtype="auto", lora_rank=512)
    make_engine("vllm", args=["--data-parallel-size", "2"])
    make_engine("vllm", args=["--hf-overrides", "{}"], head="model")
    parsed = [(given.name, given.value) for given in parse_arguments(args)]
    assert parsed == list(zip([*args[:1], "-pp", "--enforce-eager", args[4]], ["2", "1", "", "-1"], strict=True))


@pytest.mark.parametrize(
    ("dtype", "head", "told"),
    [
        ("auto", "fp32", False),  # the miniature is in float32, and so is its head
        ("bfloat16", "fp32", True),
        ("bfloat16", "model", False),
    ],
)
async def test_logits_of_half_precision_are_in_float32(dtype: str, head: str, told: bool, start: Start) -> None:
    """As the learner computes them: the server is started so (vLLM 0.32's `ModelConfig.head_dtype`)."""
    engine = await start(dtype=dtype, head=head)
    command = list(map(str, engine.server._process.args))  # type: ignore[union-attr]
    await engine.close()
    overrides = [json.loads(after) for word, after in pairwise(command) if word == "--hf-overrides"]
    assert overrides == [{"head_dtype": "float32"}] * told


def test_what_a_machine_lacks_is_known_without_starting(tmp_path: Path, env: dict[str, str]) -> None:
    make_engine("vllm", python=sys.executable, env=env).require()
    make_engine("vllm", url="http://localhost:1").require()
    make_engine("tiny").require()
    for options, message in (
        ({}, "there is no vLLM in"),
        ({"env": site(tmp_path / "other", "0.31.0")}, r"has vLLM 0\.31\.0"),
        ({"python": "/nowhere"}, "'/nowhere' does not run"),
    ):
        with pytest.raises(PrerequisiteError, match=message) as caught:
            make_engine("vllm", **{"python": sys.executable} | options).require()
        assert "make vllm-cpu" in caught.value.fix


async def test_the_versions_are_those_of_what_serves(tmp_path: Path, env: dict[str, str], wire: TestServer) -> None:
    """Of the vLLM in its own Python, or of the server that is joined; other engines have none."""
    assert make_engine("vllm", python=sys.executable, env=env).require() == {"vllm": "0.32.0"}
    cpu = site(tmp_path / "cpu", "0.32.1", "vllm-cpu")
    assert make_engine("vllm", python=sys.executable, env=cpu).require() == {"vllm": "0.32.1 (vllm-cpu)"}
    joined = await asyncio.to_thread(make_engine("vllm", url=str(wire.make_url("/"))).require, connect=True)
    assert joined == {"vllm": "0.32.0"}
    assert make_engine("vllm", url="http://localhost:1").require(connect=True) == {"vllm": "unknown"}
    assert make_engine("tiny").require() == {}
    with pytest.raises(PrerequisiteError):
        make_engine("vllm", python="/nowhere").require()


async def test_a_server_for_cpus_is_not_given_gpus(start: Start, tmp_path: Path) -> None:
    """`make vllm-cpu` was run once: a model of any size would be served, slowly."""
    with pytest.raises(PrerequisiteError, match="names GPUs, and the vLLM in .* is for CPUs"):
        await start(env={**site(tmp_path / "cpu", package="vllm-cpu"), "CUDA_VISIBLE_DEVICES": "0"})


async def test_adapters_in_float32_are_not_for_a_gpu(start: Start, tmp_path: Path) -> None:
    for dtype in ("auto", "float"):
        with pytest.raises(ConfigError, match="adapters on a model in float32") as caught:
            await start(lora_rank=8, dtype=dtype)
        assert "dtype=bfloat16" in caught.value.fix
    await (await start(lora_rank=8, dtype="bfloat16")).close()
    await (await start(lora_rank=8, env=site(tmp_path / "other", package="vllm-cpu"))).close()


async def test_bad_folders_and_options_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a model folder"):
        await make_engine("vllm").start(tmp_path, log_dir=tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ConfigError, match="has no weights"):
        await make_engine("vllm").start(tmp_path, log_dir=tmp_path)
    with pytest.raises(ConfigError, match="no option 'patients'") as caught:
        make_engine("vllm", patients=3)
    assert caught.value.fix == "did you mean 'patience'?"


async def test_nobody_listens(start: Start) -> None:
    with pytest.raises(EngineFault, match="no server listens at http://127.0.0.1:9: ") as caught:
        await start(url="http://127.0.0.1:9")
    assert "start the server" in caught.value.fix


@pytest.mark.parametrize("answer", ["<html>It works!</html>", "[]", None])
async def test_the_port_is_somebody_elses(answer: str | None, start: Start) -> None:
    async def version(_: web.Request) -> web.Response:
        return web.Response(status=404) if answer is None else web.Response(text=answer)

    app = web.Application()
    app.router.add_get("/version", version)
    async with TestServer(app) as server:
        with pytest.raises(PrerequisiteError, match="not a vLLM server") as caught:
            await start(url=str(server.make_url("/")))
    assert "engine.options.url" in caught.value.fix


async def test_a_server_that_dies_mid_request(engine: VllmEngine) -> None:
    chunks: list[Chunk] = []
    with pytest.raises(EngineFault, match="exited with 7|connection to vLLM 0.32.0 broke"):
        async for chunk in engine.generate([fake_vllm.DIE], TEN, 0):
            chunks.append(chunk)
    assert [token for chunk in chunks for token in chunk.ids] == [0, 1]
    for call in (engine.health(), ask(engine, [1], TEN)):
        with pytest.raises(EngineFault, match="exited with 7|broke"):
            await call


HANGS = "1 requests and sent nothing for 2 s"
CAUSE = "encountered an issue.; the first error was RuntimeError: no offset; "


@pytest.mark.parametrize(
    ("prompt", "patience", "message"), [(fake_vllm.HANG, 2.0, HANGS), (fake_vllm.CORE, 60.0, CAUSE)]
)
async def test_a_server_that_hangs_or_whose_worker_fails_is_ended_with_its_cause(
    prompt: int, patience: float, message: str, engine: VllmEngine
) -> None:
    engine.server.patience = patience
    for call in (ask(engine, [prompt], TEN), engine.health()):
        with pytest.raises(EngineFault, match=message):
            await call


async def test_an_error_in_a_stream_is_that_requests_alone(joined: VllmEngine) -> None:
    with pytest.raises(EngineFault, match="out of luck"):
        await ask(joined, [fake_vllm.FAIL], TEN)
    with pytest.raises(EngineFault, match="not finite"):
        await ask(joined, [fake_vllm.NAN], TEN)
    assert len((await ask(joined, [1], TEN))[0]) == 10


async def test_a_load_is_paused_tagged_and_cleared(
    joined: VllmEngine, wire: TestServer, miniature: Path, tmp_path: Path
) -> None:
    assert state(wire).reloads == ["model.safetensors"]  # what a joined server had is not ours
    path, digest = weights_named(miniature, tmp_path / "new.safetensors")
    assert await joined.load(path, 7, digest) == 7
    assert state(wire).served == "new.safetensors" and state(wire).go.is_set()
    assert (await ask(joined, [1], TEN))[2] == [7] * 10
    assert state(wire).requests[-1]["cache_salt"] == f"7-{digest[:16]}"
    assert [path.name for path in tmp_path.iterdir()] == ["new.safetensors"]


async def test_a_checkpoint_is_a_model_whatever_else_is_in_it(
    wire: TestServer, start: Start, miniature: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(miniature, tmp_path / "checkpoint")
    save_file({"exp_avg.model.norm.weight": np.zeros(4, np.float32)}, checkpoint / "optimizer.safetensors")
    names = dict.fromkeys(weights.read_headers(miniature), "model.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    engine = await start(checkpoint, url=str(wire.make_url("/")))
    new, checksum = weights_named(miniature, tmp_path / "new.safetensors")
    assert await engine.load(new, 1, checksum) == 1
    await engine.close()


async def test_somebody_else_changes_the_weights(joined: VllmEngine, wire: TestServer) -> None:
    state(wire).weights = "12"
    with pytest.raises(EngineFault, match="another program loads weights"):
        await ask(joined, [1], TEN)


def smaller(path: Path) -> None:
    found = load_file(path)
    del found["model.norm.weight"]
    save_file(found, path)


def reshaped(path: Path) -> None:
    found = load_file(path)
    found["model.norm.weight"] = np.zeros(3, np.float32)
    save_file(found, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "message"), [(smaller, "lacks model.norm"), (reshaped, r"\(3,\)"), (cut, "no safe|not a")]
)
async def test_weights_that_do_not_fit_never_reach_the_server(
    joined: VllmEngine, wire: TestServer, miniature: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    path, _ = weights_named(miniature, tmp_path / "new.safetensors")
    spoil(path)
    with pytest.raises(EngineFault, match=message):
        await joined.load(path, 3, weights.compute_checksum(path))
    with pytest.raises(EngineFault, match="has SHA-256"):
        await joined.load(path, 3, "0" * 64)
    with pytest.raises(EngineFault, match="no weights"):
        await joined.load(tmp_path / "missing", 3, "0" * 64)
    assert state(wire).reloads == ["model.safetensors"]
    assert (await joined.health())["version"] == 0


async def test_a_refused_load_is_rolled_back(
    joined: VllmEngine, wire: TestServer, miniature: Path, tmp_path: Path
) -> None:
    good = weights_named(miniature, tmp_path / "good.safetensors")
    bad = weights_named(miniature, tmp_path / "refuse.safetensors")
    await joined.load(good[0], 1, good[1])
    with pytest.raises(EngineFault, match="serves version 1 again: shape mismatch"):
        await joined.load(bad[0], 2, bad[1])
    assert state(wire).reloads == ["model.safetensors", "good.safetensors", "refuse.safetensors", "good.safetensors"]
    assert state(wire).served == "good.safetensors" and state(wire).go.is_set()
    assert (await ask(joined, [1], TEN))[2] == [1] * 10
    assert (await joined.health())["version"] == 1


def removed(path: Path) -> None:
    path.unlink()


def changed(path: Path) -> None:
    found = load_file(path)
    found["model.norm.weight"] += 1
    save_file(found, path)


@pytest.mark.parametrize(("spoil", "message"), [(removed, None), (changed, "has SHA-256")])
async def test_a_roll_back_that_fails_or_is_to_other_weights_ends_the_engine(
    joined: VllmEngine,
    wire: TestServer,
    miniature: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    message: str | None,
) -> None:
    good = weights_named(miniature, tmp_path / "good.safetensors")
    bad = weights_named(miniature, tmp_path / "refuse.safetensors")
    await joined.load(good[0], 1, good[1])
    stream = joined.generate([fake_vllm.UNTIL_SWAP], TEN, 0)
    await anext(stream)
    spoil(good[0])
    with pytest.raises(EngineFault, match=message):
        await joined.load(bad[0], 2, bad[1])
    assert not state(wire).go.is_set(), "half of the weights, or nobody's, are served"
    for call in (ask(joined, [1], TEN), anext(stream)):
        with pytest.raises(EngineFault, match="the served weights are unknown"):
            await call


@pytest.mark.parametrize(
    ("how", "patience", "message"), [("die", 60.0, "exited with 9|broke"), ("hang", 2.0, "did not answer within 2 s")]
)
async def test_a_server_that_dies_or_hangs_mid_load(
    how: str, patience: float, message: str, engine: VllmEngine, miniature: Path, tmp_path: Path
) -> None:
    path, digest = weights_named(miniature, tmp_path / f"{how}.safetensors")
    engine.server.patience = patience
    for call in (engine.load(path, 1, digest), engine.health()):
        with pytest.raises(EngineFault, match=message):  # "broke" if its end is slow to come
            await call


async def test_weights_without_a_file(joined: VllmEngine, wire: TestServer, miniature: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file as load_tensors

    tensors = load_tensors(miniature / "model.safetensors")
    described = [sync_wire.DescribedTensor(*each) for each in tensors.items()]
    checksum = sync_wire.combine_digests(described)
    joined.server.patience = 280.0  # however busy the machine is

    def offer(name: str, of: list[sync_wire.DescribedTensor]) -> Path:
        (tmp_path / name).mkdir()
        sync_wire.write_offer(tmp_path / name / weights.OFFER, "gloo", of, called_off=weights.CALLED_OFF)
        return tmp_path / name

    async def sent(name: str, version: int, checksum: str) -> int:
        folder = offer(name, described)
        file, (receivers, _) = folder / weights.OFFER, await joined.receivers()
        sending = asyncio.to_thread(sync_wire.send, file, iter(tensors.items()), receivers, 280.0)
        said, _ = await asyncio.gather(joined.load(folder, version, checksum), sending)
        return said

    assert await sent("whole", 5, checksum) == 5
    assert state(wire).served == checksum and state(wire).go.is_set()
    assert (await ask(joined, [1], TEN))[2] == [5] * 10
    with pytest.raises(EngineFault, match=f"the weights have checksum {checksum}, .* version 5 stays"):
        await sent("other", 6, "0" * 64)
    nobody = offer("nobody", described)
    (nobody / weights.CALLED_OFF).touch()
    with pytest.raises(EngineFault, match="version 5 is served as before: .*the other end was cancelled"):
        await joined.load(nobody, 6, checksum)
    with pytest.raises(EngineFault, match="another model: lacks"):  # before the server hears of it
        await joined.load(offer("less", described[1:]), 6, checksum)
    assert state(wire).served == checksum and state(wire).go.is_set()
    assert (await ask(joined, [1], TEN))[2] == [5] * 10
    path, digest = weights_named(miniature, tmp_path / "refuse.safetensors")
    with pytest.raises(EngineFault, match="shape mismatch; no file of version 5 exists to go back to"):
        await joined.load(path, 6, digest)
    with pytest.raises(EngineFault, match="the served weights are unknown"):
        await joined.health()


async def test_adapters_live_beside_each_other(joined: VllmEngine, wire: TestServer, tmp_path: Path) -> None:
    old = joined.generate([fake_vllm.UNTIL_SWAP], TEN, 0)
    first = adapter(tmp_path / "a1")
    await joined.load(first[0], 1, first[1])
    on_one = joined.generate([fake_vllm.UNTIL_SWAP], TEN, 0)
    began = await anext(on_one)
    second = adapter(tmp_path / "a2")
    await joined.load(second[0], 2, second[1])
    assert set(state(wire).adapters) == {"policy-v1", "policy-v2"}
    assert (await ask(joined, [1], TEN))[2] == [2] * 10
    assert state(wire).requests[-1]["model"] == "policy-v2"
    rest = [chunk async for chunk in on_one]
    assert {chunk.version for chunk in [began, *rest]} == {1}
    third = adapter(tmp_path / "a3")
    await joined.load(third[0], 3, third[1])
    assert set(state(wire).adapters) == {"policy-v2", "policy-v3"} and state(wire).peak == 2
    assert (await joined.health())["adapters"] == 2
    assert await ask(joined.at(2), [1], TEN) == (list(range(10)), [-0.125] * 10, [2] * 10)
    assert state(wire).requests[-1]["model"] == "policy-v2"
    assert (await ask(joined.at(0), [1], TEN))[2] == [0] * 10, "the weights below them"
    with pytest.raises(EngineFault, match="version 1 is not served"):
        await ask(joined.at(1), [1], TEN)
    assert await joined.load(third[0], 3, third[1]) == 3, "a restarted learner brings what is served already"
    assert set(state(wire).adapters) == {"policy-v2", "policy-v3"}
    with pytest.raises(EngineFault, match="a version names one adapter"):
        other = adapter(tmp_path / "other", 4)
        await joined.load(other[0], 3, other[1])
    await old.aclose()  # type: ignore[attr-defined]
    full = await asyncio.to_thread(weights.compute_checksum, joined.full[0])
    with pytest.raises(EngineFault, match="below them cannot change"):
        await joined.load(joined.full[0], 4, full)


async def test_too_many_adapters_in_use_are_a_fault_that_changes_nothing(
    joined: VllmEngine, wire: TestServer, tmp_path: Path
) -> None:
    joined._watch.cancel()  # nobody reads the streams for a while, which is not a hang
    adapters = [adapter(tmp_path / f"a{n}") for n in range(3)]
    streams = []
    for version in (1, 2):
        await joined.load(*(adapters[version - 1][0], version, adapters[version - 1][1]))
        streams.append(joined.generate([1], TEN, 0))
        assert (await anext(streams[-1])).version == version
    joined.server.patience, patience = 0.2, joined.server.patience
    with pytest.raises(EngineFault, match="2 adapters are in use after") as caught:
        await joined.load(adapters[2][0], 3, adapters[2][1])
    assert "max_loras" in caught.value.fix
    joined.server.patience = patience
    assert set(state(wire).adapters) == {"policy-v1", "policy-v2"} and state(wire).peak == 2
    assert (await ask(joined, [1], TEN))[2] == [2] * 10
    assert {chunk.version async for chunk in streams[0]} == {1}
    assert await joined.load(adapters[2][0], 3, adapters[2][1]) == 3
    assert set(state(wire).adapters) == {"policy-v2", "policy-v3"}, "the one that nobody used any more went"
    assert {chunk.version async for chunk in streams[1]} == {2}


async def test_adapters_of_whoever_had_the_server_before_go(wire: TestServer, start: Start) -> None:
    state(wire).adapters = {"policy-v7": "/somewhere"}
    engine = await start(url=str(wire.make_url("/")), lora_rank=8)
    assert state(wire).adapters == {} and (await engine.health())["adapters"] == 0
    await engine.close()


async def test_a_server_for_smaller_adapters_is_refused_at_the_start(wire: TestServer, start: Start) -> None:
    state(wire).adapters = {"policy-v7": "/somewhere"}
    with pytest.raises(ConfigError, match="2 adapters of rank 72, and .* takes 4 of rank 8") as caught:
        await start(url=str(wire.make_url("/")), lora_rank=72)
    assert "--max-lora-rank 128" in caught.value.fix, "the next that vLLM accepts"
    state(wire).loras = 1  # as vLLM has them where nothing is said
    with pytest.raises(ConfigError, match="2 adapters of rank 8, and .* takes 1 of rank 8"):
        await start(url=str(wire.make_url("/")), lora_rank=8)
    assert state(wire).adapters, "nothing there was touched"


async def test_adapters_need_a_server_for_them(engine: VllmEngine, tmp_path: Path) -> None:
    path, digest = adapter(tmp_path / "a1")
    with pytest.raises(EngineFault, match="without adapters"):
        await engine.load(path, 1, digest)


def test_a_killed_controller_leaves_nothing(miniature: Path, tmp_path: Path, env: dict[str, str]) -> None:
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


def test_a_run_of_adapters_asks_for_room_for_them() -> None:
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
    """It starts, and dies of the first request: its kernels for experts with adapters are for GPUs alone."""
    folder = tmp_path / "model"
    shutil.copytree(miniature, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    with pytest.raises(ConfigError, match="mixture of experts") as caught:
        await start(folder, lora_rank=8, env=site(tmp_path / "cpu", package="vllm-cpu"))
    assert "lora_rank=0" in caught.value.fix
