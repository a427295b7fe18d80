"""The tiny engine as the controller sees it: a real child process behind the protocol."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from coderepairrl.checks.engine import TOLERANCE, Reference
from coderepairrl.engines import TinyEngine, make_engine
from coderepairrl.engines.limits import check_request
from coderepairrl.engines.tiny import Tiny
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.types import Sampling

from .conftest import ask, load, load_reference, start_tiny

LONG = Sampling(max_tokens=2000)


async def test_requests_beyond_the_slots_wait_and_are_served(miniature: Path, tmp_path: Path) -> None:
    async with start_tiny(miniature, tmp_path, slots=2) as engine:
        answers = [asyncio.create_task(ask(engine, [n], Sampling(max_tokens=100), n)) for n in range(7)]
        seen = []
        while not all(task.done() for task in answers):
            seen.append(await engine.health())
        assert max(health["running"] for health in seen) == 2
        assert max(health["waiting"] for health in seen) >= 1
        assert [len(task.result()[0]) for task in answers] == [100] * 7
        assert (await engine.health())["generated_tokens"] == 700


async def test_in_flight_requests_are_recomputed_under_the_new_weights(
    engine: TinyEngine, miniature: Path, reference: Reference, tmp_path: Path
) -> None:
    """Each logprob is its version's for the whole sequence: keys of two versions are never mixed."""
    other, rng = tmp_path / "other", np.random.default_rng(5)
    shutil.copytree(miniature, other)
    weights = other / "model.safetensors"
    old_values = load_file(miniature / "model.safetensors")
    save_file({k: v + 0.02 * rng.standard_normal(v.shape).astype(v.dtype) for k, v in old_values.items()}, weights)
    stream = engine.generate([5, 6, 7], Sampling(max_tokens=300), 3)
    first = await anext(stream)
    assert await load(engine, weights, 4) == 4
    chunks = [first, *[chunk async for chunk in stream]]
    ids = [token for chunk in chunks for token in chunk.ids]
    old = sum(len(chunk.ids) for chunk in chunks if chunk.version == 0)
    assert len(ids) == 300 and 0 < old < 300
    reported = [logprob for chunk in chunks for logprob in chunk.logprobs]
    before = (await reference([[5, 6, 7, *ids]], 1.0))[0][2:]
    with torch.inference_mode():
        logits = load_reference(other)(torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1]
        after = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    assert np.allclose(reported[:old], before[:old], atol=TOLERANCE, rtol=0)
    assert np.allclose(reported[old:], after[old:], atol=TOLERANCE, rtol=0)
    assert not np.allclose(before[old:], after[old:], atol=TOLERANCE, rtol=0)


async def test_a_file_that_does_not_fit_changes_nothing(engine: TinyEngine, miniature: Path, tmp_path: Path) -> None:
    before = await ask(engine, [1, 2, 3], Sampling(max_tokens=20))
    weights = load_file(miniature / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    bad: dict[str, dict[str, np.ndarray]] = {
        f"lacks {name}": {k: v for k, v in weights.items() if k != name},
        "adds surprise": weights | {"surprise": np.zeros(3, np.float32)},
        r"\(3, 3\), not": weights | {name: np.zeros((3, 3), np.float32)},
        "up_proj.weight is I8": weights | {name: weights[name].astype(np.int8)},
        "not finite": weights | {name: np.full_like(weights[name], np.nan)},
        "differs from": weights | {"lm_head.weight": np.zeros_like(weights["model.embed_tokens.weight"])},
    }
    for message, tensors in bad.items():
        save_file(tensors, tmp_path / "bad.safetensors")
        with pytest.raises(EngineFault, match=message):
            await load(engine, tmp_path / "bad.safetensors", 9)
        assert await ask(engine, [1, 2, 3], Sampling(max_tokens=20)) == before


async def test_weights_that_overflow_fail_the_request_and_not_the_engine(miniature: Path, tmp_path: Path) -> None:
    """Their keys and values, which are not finite, do not stay in the cache."""
    weights, name = load_file(miniature / "model.safetensors"), "model.layers.0.input_layernorm.weight"
    save_file(weights | {name: np.full_like(weights[name], 3e38)}, tmp_path / "huge.safetensors")
    async with start_tiny(miniature, tmp_path, slots=1) as engine:
        before = await ask(engine, list(range(90)), Sampling(max_tokens=20))
        await load(engine, tmp_path / "huge.safetensors", 1)
        with pytest.raises(EngineFault, match="version 1 are not finite"):
            await ask(engine, list(range(120)), Sampling(max_tokens=20))
        await load(engine, miniature / "model.safetensors", 2)
        after = await ask(engine, list(range(90)), Sampling(max_tokens=20))
        assert after[:2] == before[:2]


async def test_a_dead_engine_fails_all_requests_at_once_and_says_why(engine: TinyEngine) -> None:
    async def consume(seed: int) -> None:
        async for _ in engine.generate([1, 2, seed], LONG, seed):
            started.set()

    started = asyncio.Event()
    consumers = [asyncio.create_task(consume(seed)) for seed in range(4)]
    await started.wait()
    os.kill(engine.pid, signal.SIGKILL)
    for outcome in await asyncio.wait_for(asyncio.gather(*consumers, return_exceptions=True), 5):
        assert isinstance(outcome, EngineFault)
        assert "SIGKILL" in str(outcome)
    for call in (engine.health(), ask(engine, [1], LONG), engine.load(Path("x"), 1, "")):
        with pytest.raises(EngineFault, match="SIGKILL"):
            await asyncio.wait_for(call, 5)


async def test_closing_ends_the_child_and_open_requests(miniature: Path, tmp_path: Path) -> None:
    engine = await Tiny().start(miniature, log_dir=tmp_path)
    stream = engine.generate([1], LONG, 0)
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineFault, match="closed"):
        async for _ in stream:
            pass
    assert not Path(f"/proc/{engine.pid}").exists()
    await engine.close()


async def test_a_slow_consumer_gets_all_tokens_and_delays_no_other_request(engine: TinyEngine) -> None:
    expected = await ask(engine, [9], Sampling(max_tokens=200), 2)
    slow = engine.generate([9], Sampling(max_tokens=200), 2)
    ids = [*(await anext(slow)).ids]
    await ask(engine, [8], Sampling(max_tokens=200))
    ids += [token async for chunk in slow for token in chunk.ids]
    assert ids == expected[0]


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], Sampling(), "0 tokens"),
        ([0] * 4096, Sampling(), "no room"),
        ([1, 10_000], Sampling(), "vocabulary"),
        ([-1], Sampling(), "vocabulary"),
        ([1], Sampling(temperature=-1.0), "temperature"),
        ([1], Sampling(temperature=math.nan), "temperature"),
        ([1], Sampling(top_p=0.0), "top_p"),
        ([1], Sampling(max_tokens=0), "max_tokens"),
    ],
)
def test_an_invalid_request_is_refused(ids: list[int], sampling: Sampling, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(ids, sampling, context=4096, vocabulary=265)


@pytest.mark.parametrize("options", [{"kv_gib": 0.0001}, {"context": 100_000}, {"slots": 0}, {"context": 1}])
def test_invalid_options_are_refused_without_a_start(options: dict[str, Any], miniature: Path) -> None:
    with pytest.raises(ConfigError, match=f"engine.options.{next(iter(options))}"):
        make_engine("tiny", **options).check_model(miniature)


async def test_a_child_that_cannot_start_says_why(miniature: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(ConfigError, match="not a model folder"):
        await Tiny().start(folder, log_dir=tmp_path)
    folder.mkdir()
    shutil.copy(miniature / "config.json", folder)
    with pytest.raises(ConfigError, match="no weights"):
        await Tiny().start(folder, log_dir=tmp_path)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(EngineFault, match="not a safetensors file"):
        await Tiny().start(folder, log_dir=tmp_path)
