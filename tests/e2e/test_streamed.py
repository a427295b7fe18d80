"""A whole run whose weights reach the engine without a file, and whose learner dies while it sends them."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from coderepairrl.sync import wire
from e2e.conftest import Project


@pytest.mark.parametrize("route", ["gloo", "ipc"])
def test_a_run_without_files(route: str, project: Project) -> None:
    terms = ("engine.name=e2e_engines:MurderousTiny", f"engine.weights={route}", "run.checkpoint_every=1")
    summary = project.train("run.steps=2", *terms)
    assert summary["version"] == 2 and summary["account"]["balanced"]
    assert (project.path / "killed").exists()
    steps = [record for record in project.records() if record["type"] == "step"]
    assert max(step["metrics"]["learn/mismatch_max"] for step in steps) < 1e-4  # engine and trainer agree
    trained = load_file(project.run.checkpoints / "00002" / "model.safetensors")
    assert wire.combined_digest(wire.Described(*each) for each in trained.items()) == steps[-1]["checksum"]
    refused = project.crrl("train", str(project.run.path), "engine.weights=file", "--resume", check=False)
    assert refused.returncode == 2 and "cannot change in the middle of a run" in refused.stderr
    resumed = project.crrl("train", str(project.run.path), "run.steps=3", "--resume", "--json")  # weights are verified
    assert json.loads(resumed.stdout.splitlines()[-1])["version"] == 3
