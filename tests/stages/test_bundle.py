"""Bundles of runs that are unfinished, damaged or hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.errors import CodeRepairError, UsageError
from coderepairrl.runs import write_json
from coderepairrl.stages import export
from coderepairrl.stages.export import export_bundle
from tests.report.runs import RunMaker

REWARD = {"reward": {"value": 0.5, "low": None, "high": None}}
SUMMARY = {"episodes": 2, "tasks": 2, "void": 0, "values": REWARD, "outcomes": {}}


def make_run(path: Path, about: dict[str, Any], summary: str, weights: str = "model.safetensors") -> Path:
    folder = RunMaker(path, run={"steps": 1}).run(1).folder
    write_json(path / "run.json", {**folder.about(), **about})
    for file, text in ((f"checkpoints/00001/{weights}", "x"), ("eval/eval-00001/summary.json", summary)):
        (path / file).parent.mkdir(parents=True)
        (path / file).write_text(text)
    return path


def test_hostile_runs_have_a_bundle(tmp_path: Path) -> None:
    about = {"name": "\ud800\n# evil", "commit": "a: {", "argv": None, "model": None, "config": None}
    assert export_bundle(make_run(tmp_path / "run", about, json.dumps(SUMMARY)), tmp_path / "out") == 1
    assert "2 tasks, 2 attempts: reward 0.500" in (tmp_path / "out/README.md").read_text()
    assert "\n# evil" not in (tmp_path / "out/README.md").read_text()
    assert export_bundle(tmp_path / "out", tmp_path / "again") == 1
    assert (tmp_path / "again/LOGS.sha256").read_text() == (tmp_path / "out/LOGS.sha256").read_text() != ""
    assert '"a: {"' in (tmp_path / "out/CITATION.cff").read_text()


@pytest.mark.parametrize(
    ("summary", "weights", "message"),
    [("{", "model.safetensors", "summary.json is damaged"), ("{}", "config.json", "has no weights")],
)
def test_damage_is_reported_and_no_folder_is_left(tmp_path: Path, summary: str, weights: str, message: str) -> None:
    run = make_run(tmp_path / "run", {}, summary, weights)
    with pytest.raises(CodeRepairError, match=message):
        export_bundle(run, tmp_path / "out")
    with pytest.raises(UsageError, match="would contain itself"):
        export_bundle(run, run / "eval/bundle")
    assert not (tmp_path / "out").exists() and not (run / "eval/bundle").exists()


def test_a_checkpoint_deleted_meanwhile_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", {}, json.dumps(SUMMARY))
    gone = run / "checkpoints/00001/gone.safetensors"
    monkeypatch.setattr(export, "list_exported_files", lambda folder: [gone])
    with pytest.raises(CodeRepairError, match="gone.safetensors of .* was deleted meanwhile"):
        export_bundle(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16"), ("float16", "fp32"), ("torch.float32", "fp32")])
def test_a_model_below_foreign_adapters_is_not_rounded(tmp_path: Path, dtype: str, precision: str) -> None:
    write_json(tmp_path / "config.json", {"torch_dtype": dtype})
    assert export._read_precision(tmp_path) == precision
