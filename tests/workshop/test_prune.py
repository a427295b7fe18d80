"""The student of `examples/pipeline/distil.toml`: narrower than the policy it is made of, and a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from coderepairrl import models
from coderepairrl.errors import UsageError
from coderepairrl.stages import pipeline, pipeline_run
from workshop.tiny.prune import prune

ROOT = Path(__file__).parents[2]
WHOLE = models.folder("builtin:tiny")


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


def test_more_neurons_than_there_are_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="512 neurons") as raised:
        prune("builtin:tiny", tmp_path / "student", neurons=512)
    assert "--neurons" in raised.value.fix and not (tmp_path / "student").exists()


def test_the_pipeline_that_distils_can_begin_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = ROOT / "examples" / "pipeline" / "distil.toml"
    (made,) = (line for line in file.read_text().splitlines() if "workshop.tiny.prune" in line)
    *_, model, folder, _, neurons = made.split()
    prune(model, Path(folder), int(neurons))
    assert json.loads((tmp_path / folder / "config.json").read_text())["intermediate_size"] == int(neurons)
    recipe = pipeline.read(str(file))
    assert [step.name for step in recipe.steps][:4] == ["probe", "collect", "sft", "rl"]
    planned, wrong = pipeline_run.check(recipe)
    assert wrong is None and {each.doing for each in planned} == {"runs"}
