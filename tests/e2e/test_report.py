"""The report of a real run: what the loop writes is what the report reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coderepairrl.runs import logged_episodes
from coderepairrl.stages import export
from coderepairrl.stats import Interval
from coderepairrl.stats.intervals import clusters_of
from coderepairrl.sync import weights
from coderepairrl.types import sequence
from pages import Page

from .conftest import Project


def test_a_real_run_is_reported(finished: Project) -> None:
    project, summary = finished, finished.summary()
    data = json.loads(project.crrl("report", str(project.run.path), "--json").stdout.splitlines()[-1])
    (run,) = data["runs"]
    assert run["status"] == "finished" and [step["step"] for step in run["steps"]] == [1, 2, 3]
    assert {name: run["account"][name] for name in summary["account"]} == summary["account"]
    metrics = project.run.metrics()[-1]
    assert {name: run["steps"][-1][name] for name in metrics} == metrics
    for step in run["steps"]:
        assert sum(step["ledger"].values()) == pytest.approx(step["rollout_seconds"] + step["learn_seconds"])
        assert step["ledger"]["generation"] > 0 and step["ledger"]["sandbox"] > 0
    entries = [entry for entry in run["evaluations"] if entry["name"] == "eval"]
    assert [entry["step"] for entry in entries] == [0, 3]
    for entry, logged in zip(entries, summary["evaluations"]["eval"].values(), strict=True):
        assert {name: value["value"] for name, value in entry["values"].items()} == pytest.approx(
            {name: value["value"] for name, value in logged["values"].items()}
        )
    assert run["ledger"]["evaluation"] > 0 and sum(run["ledger"].values()) == pytest.approx(run["wall_seconds"])
    page = project.run.path / "report" / "index.html"
    assert project.crrl("report", str(project.run.path)).stdout.strip() == str(page)
    assert "Held-out tasks, before and after" in page.read_text()


def test_a_real_run_is_exported_with_the_ids_that_were_served(finished: Project) -> None:
    project = finished
    done = project.crrl("export", str(project.run.path), "out", "--to", "atif")
    assert done.stdout == "out\n"
    episodes = {episode.id: episode for episode in logged_episodes(project.run.records())}
    assert {path.stem for path in (project.path / "out").iterdir()} == episodes.keys()
    for name, episode in episodes.items():
        steps = json.loads((project.path / "out" / f"{name}.json").read_text())["steps"]
        served = [step["metrics"] for step in steps if step["source"] == "agent"]
        assert [(*each["prompt_token_ids"], *each["completion_token_ids"]) for each in served] == [
            sequence(episode.turns, turn.index) for turn in episode.turns
        ]
    done = project.crrl("export", str(project.run.path), "out.parquet", "--to", "parquet")
    assert f"{len(episodes)} episodes" in done.stderr and (project.path / "out.parquet").is_file()


async def test_full_weights_are_exported_without_the_learners_state(finished: Project, tmp_path: Path) -> None:
    plain, checkpoint = tmp_path / "plain", max(finished.run.saved_checkpoints().items())[1]
    await export.export_model(str(finished.run.path), plain)
    assert weights.checksum(plain) == weights.checksum(checkpoint)
    assert (checkpoint / "learner.json").exists()
    assert not [file.name for file in plain.iterdir() if file.name.startswith(("learner.", "optimizer"))]


def test_differing_conditions_are_said_once_and_kept(finished: Project) -> None:
    assert (finished.path / "stderr").read_text().count("evaluation greedy has temperature 0, and training 1") == 1
    kept = {(each["evaluation"], each["condition"]) for each in finished.run.about()["differences"]}
    assert ("greedy", "temperature") in kept


def test_one_number_has_one_interval_wherever_it_stands(finished: Project) -> None:
    """In eval/*.json, the log, the last line on screen, the report as JSON and the page: tasks are held-out mutants,
    several to a function, which is what they are clustered by."""
    project, said = finished, (finished.path / "stderr").read_text()
    data = json.loads(project.crrl("report", str(project.run.path), "--json").stdout.splitlines()[-1])
    project.crrl("report", str(project.run.path))
    page = Page((project.run.path / "report" / "index.html").read_text()).text
    for step, reported, side in zip(
        (0, 3),
        [entry for entry in data["runs"][0]["evaluations"] if entry["name"] == "eval"],
        (data["runs"][0]["comparisons"][0][s] for s in ("early", "late")),
        strict=True,
    ):
        written = json.loads((project.run.path / "eval" / f"eval-{step:05d}" / "summary.json").read_text())
        logs = [record for record in project.records() if record["type"] == "eval" and record["name"] == "eval"]
        [logged] = [record["summary"] for record in logs if record["step"] == step]
        assert written["values"] == logged["values"] == reported["values"]
        same = side.keys() - {"tool_success"}  # a comparison's is of tasks with calls on both sides
        assert {name: side[name] for name in same} == {name: written["values"][name] for name in same}
        clusters = clusters_of(project.run.episodes(f"eval-{step:05d}"))
        assert len(set(clusters.values())) < written["tasks"]
        for value in written["values"].values():
            assert value["low"] is None or value["low"] < value["high"]
        reward = Interval(**written["values"]["reward"])
        assert f"eval after step {step}: reward {reward}" in said
        assert str(reward).replace("-", "\N{MINUS SIGN}") in " ".join(page.split())
