"""The report of a real run: what the loop writes is what the report reads."""

from __future__ import annotations

import json

import pytest

from .conftest import Project


def test_a_real_run_is_reported(project: Project) -> None:
    summary = project.train("run.steps=2", "eval.before=true", "eval.after=true")
    data = json.loads(project.crrl("report", str(project.run.path), "--json").stdout.splitlines()[-1])
    (run,) = data["runs"]
    assert run["status"] == "finished" and [step["step"] for step in run["steps"]] == [1, 2]
    assert {name: run["account"][name] for name in summary["account"]} == summary["account"]
    metrics = project.run.metrics()[-1]
    assert {name: run["steps"][-1][name] for name in metrics} == metrics
    for step in run["steps"]:
        assert sum(step["ledger"].values()) == pytest.approx(step["rollout_seconds"] + step["learn_seconds"])
        assert step["ledger"]["generation"] > 0 and step["ledger"]["sandbox"] > 0
    assert [entry["step"] for entry in run["evaluations"]] == [0, 2]
    for entry, logged in zip(run["evaluations"], summary["evaluations"]["eval"].values(), strict=True):
        assert {name: value["value"] for name, value in entry["values"].items()} == pytest.approx(
            {name: value["value"] for name, value in logged["values"].items()}
        )
    assert run["ledger"]["evaluation"] > 0 and sum(run["ledger"].values()) == pytest.approx(run["wall_seconds"])
    page = project.run.path / "report" / "index.html"
    assert project.crrl("report", str(project.run.path)).stdout.strip() == str(page)
    assert "Held-out tasks, before and after" in page.read_text()
