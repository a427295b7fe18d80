"""The example of a run with four kinds of tasks starts, makes a step, and its numbers by kind add up."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from commands import CRRL

EXAMPLE = Path(__file__).parents[2] / "examples/mixed"
KINDS = {"", "detect", "vul_repair", "implement"}


def test_four_kinds_in_one_run(tmp_path: Path, isolating: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "cache"))
    work = tmp_path / "mixed"
    shutil.copytree(EXAMPLE, work)

    def crrl(*arguments: str) -> str:
        command = [*CRRL, *arguments, "--json"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return str(done.stdout.splitlines()[-1])

    small = ("run.steps=1", "rollout.group_size=2", "tasks.verify=false", "eval.before=false", "eval.after=false")
    made = json.loads(crrl("train", "mixed.toml", *small))
    assert made["kinds"].keys() == KINDS
    for number in ("sampled", "trained"):
        assert made["account"][number] == sum(own[number] for own in made["kinds"].values())
    assert all(own["balanced"] for own in made["kinds"].values())
    metrics = made["metrics"]
    names = {kind or "plain" for kind in KINDS}
    rewards = {name: metrics[f"reward/{name}"] for name in names}
    assert metrics["episodes"] == 10 and metrics["void"] == 0
    assert metrics["reward"] == pytest.approx((2 * sum(rewards.values()) + 2 * rewards["plain"]) / 10)
    scales = {name: metrics[f"kind_scale/{name}"] for name in names}
    assert scales == dict.fromkeys(names, 1.25) | {"plain": 0.625}
    assert {name: metrics[f"trained/{name}"] for name in names} == {
        kind or "plain": own["trained"] for kind, own in made["kinds"].items()
    }
    [report] = json.loads(crrl("report", "runs/mixed"))["runs"]
    assert {kind: own["sampled"] for kind, own in report["kinds"].items()} == {
        kind or "plain": own["sampled"] for kind, own in made["kinds"].items()
    }
    assert made["kinds"]["implement"]["sampled"] > 0 and made["kinds"]["vul_repair"]["sampled"] > 0
