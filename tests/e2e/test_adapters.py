"""A whole run that trains adapters, served merged by the tiny engine: the properties of any other run."""

from __future__ import annotations

import json

import pytest

from e2e.conftest import Project


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_of_adapters(project: Project, processes: int) -> None:
    terms = ("train.lora={rank=4, alpha=8}", f"train.processes={processes}", "run.checkpoint_every=1")
    summary = project.train("run.steps=2", *terms)
    assert summary["version"] == 2 and summary["account"]["balanced"]
    steps = [record for record in project.records() if record["type"] == "step"]
    assert max(step["metrics"]["learn/mismatch_max"] for step in steps) < 1e-4  # engine and trainer agree
    newest = project.run.checkpoints / "00002"
    assert (newest / "adapter_model.safetensors").is_file() and not (newest / "model.safetensors").exists()
    resumed = project.crrl("train", str(project.run.path), "run.steps=3", "--resume", "--json")  # weights are verified
    assert json.loads(resumed.stdout.splitlines()[-1])["version"] == 3
