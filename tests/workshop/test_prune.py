"""The student of `examples/jobs/distil.toml`: narrower than the policy it is made of, and a model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch

from coderepairrl import models
from coderepairrl.stages import jobs, jobs_file
from workshop.tiny.prune import prune

ROOT = Path(__file__).parents[2]
WHOLE = models.model_folder("builtin:tiny")


def test_the_largest_neurons_stay_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    prune("builtin:tiny", tmp_path / "student", neurons=96)
    before, after = (safetensors.torch.load_file(at / "model.safetensors") for at in (WHOLE, tmp_path / "student"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if ".mlp." not in name)
    for layer in range(3):
        gate, up, down = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        size = before[gate].float().norm(dim=1) * before[up].float().norm(dim=1) * before[down].float().norm(dim=0)
        kept = sorted(size.argsort(descending=True)[:96].tolist())
        assert torch.equal(after[gate], before[gate][kept]) and torch.equal(after[up], before[up][kept])
        assert torch.equal(after[down], before[down][:, kept])
    changed = [
        path.name
        for path in WHOLE.iterdir()
        if (tmp_path / "student" / path.name).is_file()
        and path.read_bytes() != (tmp_path / "student" / path.name).read_bytes()
    ]
    assert set(changed) <= {"config.json", "model.safetensors", "SHA256SUMS"}


def test_the_jobs_that_distil_make_it_and_can_begin_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = jobs_file.read_jobs_file(str(ROOT / "examples" / "jobs" / "distil.toml"))
    student = next(job for job in found.jobs if job.name == "student")
    subprocess.run(student.words(), check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert json.loads((student.folder / "config.json").read_text())["intermediate_size"] == 96
    by = {"made_by": jobs.job_inputs(student, {}), "ended": True, "port": 0}
    student.record.write_text(json.dumps(by))
    planned, wrong = jobs.plan_jobs(found)
    assert wrong is None and [each.standing.doing for each in planned] == ["is done", *["runs"] * 7]
