"""A run whose reward rises while its tests fail says so, and so does its report."""

from __future__ import annotations

from coderepairrl import report
from e2e.conftest import Project


def test_an_over_optimised_run_is_warned_of(project: Project) -> None:
    done = project.crrl(
        *("train", str(project.config), "run.steps=20", "rollout.tasks_per_step=1", "rollout.group_size=2"),
        *("agent.name=e2e_rewards:Scribbler", "agent.options={}"),
        'run.health.off=["nothing_sampled", "no_gradient"]',
        'reward={"e2e_rewards:rising"=1.0, "e2e_rewards:FallingTests"=0.0}',
    )
    assert "over-optimisation? From step 1 to 20" in done.stderr
    alarms = [record["alarm"] for record in project.records() if record["type"] == "step"]
    assert [bool(alarm) for alarm in alarms] == [False] * 19 + [True]
    assert any("share that passes tests fell" in notice for notice in report.load([project.run.path])[0].notices)
