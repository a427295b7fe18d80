"""Refill and a band in a whole run: what a killed run draws and trains is what it would have drawn and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coderepairrl.runs import RunFolder

from .conftest import Project, frozen

SETTINGS = (
    *("reward={'e2e_rewards:by_lot'=1}", "run.steps=3", "run.checkpoint_every=3", "run.health.off=['no_gradient']"),
    *("rollout.tasks_per_step=2", "rollout.calls=1", "tasks.verify=false"),
    *("curriculum.refill=3", "curriculum.band=true"),
)


def what(run: RunFolder) -> list[Any]:
    """Of each step what it attempted, in order, what came of it, and the weights after it."""
    groups = {
        record["id"]: (record["task"], record["group"]) for record in run.records() if record["type"] == "episode"
    }
    steps = [record for record in run.records() if record["type"] == "step"]
    return [
        ([groups[name] for name in step["episodes"]], step["outcomes"], step["checksum"], step["account"])
        for step in steps
    ]


async def test_a_batch_is_refilled_and_a_killed_run_goes_on_as_it_would_have(project: Project, tmp_path: Path) -> None:
    project.train(*SETTINGS)
    straight = what(project.run)
    metrics = [record["metrics"] for record in project.records() if record["type"] == "step"]
    for (attempted, came_to, _, account), step in zip(straight, metrics, strict=True):
        groups = list(dict.fromkeys(group for _, group in attempted))
        flat = account["dropped"].get("flat_group", 0)
        assert (step["groups"], step["episodes"]) == (len(groups), 3 * len(groups)) == (len(groups), len(attempted))
        informative = round(step["informative"] * len(groups))
        assert informative == len(groups) - step["flat_groups"], "every group is in the account"
        assert informative == 2 or (informative < 2 and len(groups) == 5), "until there are enough, or the bound"
        assert bool(flat) == (informative < len(groups)) and sum(map(len, came_to.values())) == len(attempted)
    assert {step["groups"] for step in metrics} - {2}, "some step is refilled"
    refilled = next(number for number, step in enumerate(metrics, 1) if step["groups"] > 2)
    records = [record for record in project.records() if record["type"] == "episode"]
    assert {record["step"] for record in records} == {1, 2, 3}, "each is made for the step that consumes it"
    again = [group for attempted, *_ in straight for group in dict.fromkeys(group for _, group in attempted)]
    assert again == sorted(set(again)), "groups come in the run's order, each once"

    def in_the_refill() -> bool:
        begun = {r["group"] for r in project.records() if r["type"] == "episode" and r["step"] == refilled}
        return len(begun) > 2

    project.run.path.rename(tmp_path / "straight")
    with project.started("train", str(project.config), *SETTINGS) as process:
        await frozen(process, in_the_refill)
        process.kill()
        process.wait()
    assert len(what(project.run)) == refilled - 1
    project.train(*SETTINGS, "--resume")
    assert what(project.run) == straight

    longer = project.crrl("train", str(project.run.path), "--resume", "run.steps=4", "curriculum.refill=0", "--json")
    last = what(project.run)[-1][0]
    assert json.loads(longer.stdout.splitlines()[-1])["steps"] == 4 and len(last) == 6
    assert not {group for _, group in last} & set(again)
