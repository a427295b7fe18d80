"""A run of adapters on weights in 4 bits: rounded once, the same numbers for engine, learner and all that follows."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from coderepairrl import models
from coderepairrl.gateway import PolicySource
from coderepairrl.plan.model import LocalModel
from coderepairrl.plan.replying import replying
from coderepairrl.runs.storage import SUMS, damage
from coderepairrl.stages.serve import plan_server
from coderepairrl.sync import weights
from coderepairrl.types import Sampling
from e2e.conftest import Project

pytestmark = [
    pytest.mark.real,  # make test-all
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
]
SHORT = ("eval.before=false", "eval.after=false", "tasks.verify=false")
TERMS = ("model.quantise=nf4", "train.lora={rank=4, alpha=8}", "run.checkpoint_every=1", *SHORT)


@pytest.mark.parametrize("init", ["weights", "random"])
async def test_engine_and_learner_have_the_same_numbers(init: str, project: Project, tmp_path: Path) -> None:
    summary = project.train("run.steps=2", f"model.init={init}", *TERMS)
    assert summary["version"] == 2 and summary["account"]["balanced"]
    steps = [record["metrics"] for record in project.records() if record["type"] == "step"]
    assert max(step["learn/mismatch_max"] for step in steps) < 1e-4
    model = project.run.path / "model"
    assert models.quantised_form(model) == "nf4" and (model / SUMS).is_file() and not damage(model)
    resumed = project.crrl("train", str(project.run.path), "run.steps=3", "--resume", "--json")
    assert json.loads(resumed.stdout.splitlines()[-1])["version"] == 3

    # another run that begins from it says what rounding leaves of its adapters
    again = ("train", str(project.config), "run.name=again", "run.steps=0", f"model.path={project.run.path}", *TERMS)
    said = project.crrl(*again).stderr
    kept = json.loads((project.run.path.parent / "again" / "run.json").read_text())["adapters_kept"]
    assert f"{kept:.0%} of what the adapters in " in said and ("ALARM" in said) == (kept < 0.9)

    # wherever the run is named, its adapters are on the same numbers
    plan = plan_server(str(project.run.path))
    assert isinstance(plan.model, LocalModel) and plan.model.folder == model
    async with replying(plan, tmp_path) as source:
        assert isinstance(source, PolicySource)
        prompt = list(range(40))
        parts = [part async for part in source.engine.generate(prompt, Sampling(max_tokens=8, temperature=1.0), seed=3)]
        assert sum(len(part.ids) for part in parts) == 8
    project.crrl("export", str(project.run.path), str(tmp_path / "plain"))
    assert not models.quantised_form(tmp_path / "plain")  # merged numbers are not codes
    newest = [record for record in project.records() if record["type"] == "step"][-1]
    assert weights.checksum(tmp_path / "plain") == newest["checksum"]
