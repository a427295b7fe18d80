"""Two steps with each published model that CRRL_TEST_MODELS names: their folders, with colons between them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from e2e.conftest import Project

FOLDERS = [each for each in os.environ.get("CRRL_TEST_MODELS", "").split(":") if each]
MOST = 16e9
"""Bytes of memory of the laptop on which all this is to run."""
SETTINGS = (
    "run.steps=2",
    "agent={name='direct', options={}}",
    "engine.options={context=1024}",
    "rollout={tasks_per_step=2, group_size=4, tokens=1024, turn_tokens=48, seconds=600}",
    "train.lora=true",
    "train.gradient_checkpointing=true",
    "train.micro_tokens=1024",
    "train.lr=1e-4",
)


@pytest.mark.by_hand
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("folder", FOLDERS or [pytest.param("", marks=pytest.mark.skip("set CRRL_TEST_MODELS"))])
async def test_a_published_model_makes_two_steps(folder: str, project: Project) -> None:
    most, others = 0, psutil.disk_usage("/dev/shm").used
    with project.started("train", str(project.config), f"model.path={folder}", *SETTINGS, "--json") as process:
        while process.poll() is None:
            most = max(most, memory(process.pid) - others)
            await asyncio.sleep(0.2)
        said = process.communicate()
    assert process.returncode == 0, said
    steps = [record["metrics"] for record in project.records() if record["type"] == "step"]
    shown = ("learn/mismatch_max", "learn/sync_seconds", "learn_seconds", "rollout_seconds")
    print(f"{Path(folder).name}: {most / 1e9:.1f} GB at most", *({key: step[key] for key in shown} for step in steps))
    assert len(steps) == 2
    assert all(0 < step["learn/mismatch_max"] < 1e-4 for step in steps), "engine and learner agree, before and after"
    assert all(step["learn/grad_norm"] > 0 for step in steps)
    assert most < MOST


def memory(root: int) -> int:
    """Bytes that the process `root` and those below it share with no file, and all shared memory: weights on their
    way are there. Pages of files that are read may be dropped, and are not counted."""
    try:
        above = psutil.Process(root)
        sizes = [each.memory_info() for each in (above, *above.children(recursive=True))]
    except psutil.NoSuchProcess:  # it has just ended
        return 0
    return sum(each.rss - each.shared for each in sizes) + psutil.disk_usage("/dev/shm").used
