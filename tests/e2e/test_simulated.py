"""The model of the loop beside the loop: a run's log is enough to say again how long its steps took, and to plan."""

from __future__ import annotations

import json

import pytest

from benchmarks import loop
from e2e.conftest import Project


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_takes_as_long_as_it_is_simulated_to(project: Project, staleness: int) -> None:
    project.train("run.steps=4", f"rollout.max_staleness={staleness}", "train.old_logprobs=recomputed")
    seconds, waiting = loop.measured(project.run.path)
    again, share = loop.simulated(project.run.path, project.run.path)
    assert 1 / loop.FAR < again / seconds < loop.FAR
    assert share == pytest.approx(waiting, abs=loop.OFF)

    planned = json.loads(
        project.crrl("train", "e2e.toml", "--dry-run", "--json", f"plan.run={project.run.path}", "run.steps=50").stdout
    )["needs"]
    assert planned["step"]["seconds"] == pytest.approx(seconds, rel=1)  # of attempts drawn from few
    assert planned["run"]["hours"] >= 0 and planned["run"]["episodes_per_hour"] > 0
    assert planned["run"]["evaluation_hours"] >= 0
    assert planned["assumed"]["speeds"].startswith(f"those of {project.run.path}")
