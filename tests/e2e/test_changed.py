"""Whole runs that resume with other settings, skip or refill batches, or have two kinds of tasks."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from coderepairrl import config as configs
from coderepairrl import report
from coderepairrl.config import load_config
from coderepairrl.runs import RunFolder
from coderepairrl.stages import gates
from e2e.conftest import Project, freeze_when
from e2e.e2e_engines import DOUBTED


def forget_checkpoints(project: Project) -> None:
    """Delete all checkpoints, so that resuming replays every step."""
    shutil.rmtree(project.run.checkpoints)
    project.run.checkpoints.mkdir()


def test_a_changed_learning_rate_is_replayed_bit_for_bit(project: Project) -> None:
    """Resuming compares the replayed weights with the logged ones."""
    folder = str(project.run.path)
    project.train("run.steps=2")
    forget_checkpoints(project)
    done = project.crrl("train", folder, "--resume", "train.lr=5e-3", "rollout.seconds=20", "run.steps=3")
    assert "resumed after step 2 of 3: steps 1 to 2 replayed from the log" in done.stderr
    assert configs.load_config(folder).train.lr == 5e-3
    assert sorted(project.run.list_checkpoints()) == [2, 3], "one where the settings changed"
    forget_checkpoints(project)
    assert project.resume("run.steps=4")["account"]["balanced"]
    rates = [step["metrics"]["learn/lr"] for step in project.steps()]
    assert rates == [1e-3, 1e-3, 5e-3, 5e-3]
    changes = [[r["step"], r["key"], r["old"], r["new"]] for r in project.records() if r["type"] == "change"]
    assert sorted(changes) == [
        *([2, "rollout.seconds", 30.0, 20.0], [2, "run.steps", 2, 3], [2, "train.lr", 1e-3, 5e-3]),
        [3, "run.steps", 3, 4],
    ]


def test_a_batch_without_a_finite_gradient_costs_the_run_nothing_else(project: Project) -> None:
    """The largest rewards times the ratios of some versions' tokens overflow."""
    doubted, folder = project.path / DOUBTED, str(project.run.path)

    def steps() -> dict[int, Any]:
        return {record["step"]: record for record in project.steps()}

    doubted.write_text("[1, 3, 4, 5]")
    options = ["engine=e2e_engines:DoubtfulTiny", "run.steps=7", "rollout.group_size=2", "rollout.calls=1"]
    options += ["train.algorithm=rloo", "reward={'e2e_rewards:LoudLowBytes'=1e6}"]
    stopped = project.crrl("train", str(project.config), *options, check=False)
    assert "step 2 is skipped" in stopped.stderr and "non-finite" in stopped.stderr
    assert [bool(step["skipped"]) for step in steps().values()] == [False, True, False, True, True, True]
    assert len({steps()[step]["checksum"] for step in (1, 2)}) == 1, "the weights stand"
    assert len({steps()[step]["checksum"] for step in (1, 2, 3)}) == 2, "and the run goes on"
    assert stopped.returncode == 4 and "no finite gradient in 3 steps in a row" in stopped.stderr, stopped.stderr
    assert "--resume" in stopped.stderr and "train.lr" in stopped.stderr
    assert [(a.gate, a.first, a.last) for a in gates.replay_gates(folder) if a.stops] == [("skipped", 4, 6)]

    forget_checkpoints(project)
    summary = project.resume("train.lr=1e-4")
    assert (summary["steps"], summary["version"], summary["account"]["balanced"]) == (7, 7, True)
    assert [step for step, record in steps().items() if record["skipped"]] == [2, 4, 5, 6]
    assert len({steps()[step]["checksum"] for step in (3, 4, 5, 6)}) == 1
    assert "learn/lr" not in steps()[6]["metrics"] and steps()[7]["metrics"]["learn/lr"] == 1e-4
    assert report.Site([project.run.path]).reports()


SETTINGS = (
    *("reward={'e2e_rewards:by_lot'=1}", "run.steps=3", "run.checkpoint_every=3", "run.health.off=['no_gradient']"),
    *("rollout.tasks_per_step=2", "rollout.calls=1", "tasks.verify=false"),
    *("curriculum.refill=3", "curriculum.band=true"),
)


def read_step_results(run: RunFolder) -> list[Any]:
    """Read the attempts of each step in order, their outcomes, and the weights after it."""
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
    straight = read_step_results(project.run)
    metrics = [record["metrics"] for record in project.steps()]
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
        await freeze_when(process, in_the_refill)
    assert len(read_step_results(project.run)) == refilled - 1
    project.train(*SETTINGS, "--resume")
    assert read_step_results(project.run) == straight

    assert project.resume("run.steps=4", "curriculum.refill=0")["steps"] == 4
    last = read_step_results(project.run)[-1][0]
    assert len(last) == 6
    assert not {group for _, group in last} & set(again)


SOURCES = """sources = [
  {{ source = "handmade", weight = 1.0 }},
  {{ source = "jsonl", options = {{ path = "{path}" }}, kind = "label", weight = 3.0 }},
]"""
KIND = """
[kinds.label]
agent = { name = "direct", options = { system = "" } }
reward = { "e2e_rewards:LowBytes" = 1.0, classification = 0.0 }
tokens = 400
turn_tokens = 8
"""


def test_two_kinds_in_one_run_and_where_their_tokens_went(project: Project) -> None:
    """Each kind has its agent, limits, rewards, share of batches and balanced account, also after a resume."""
    labels = project.path / "labels.jsonl"
    rows = [{"id": f"cwe/{at}", "prompt": f"Which is {at}?", "language": "c", "answer": "CWE-79"} for at in range(5)]
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = project.config.read_text().replace('source = "handmade"', SOURCES.format(path=labels))
    project.config.write_text(text + KIND)

    project.train("run.steps=1", "rollout.tasks_per_step=4")
    summary = project.train("run.steps=2", "rollout.tasks_per_step=4", "eval.after=true", "--resume")
    episodes = list(project.run.episodes("train-*"))
    groups = {episode.group: episode.kind for episode in episodes}
    assert Counter(groups.values()) == {"": 2, "label": 6}
    for step in (1, 2):
        assert Counter(kind for group, kind in groups.items() if f"-{step:05d}-" in group) == {"": 1, "label": 3}
    for episode in episodes:
        names = [score.name for score in episode.scores]
        assert ("classification" in names) == (episode.kind == "label")
        assert all(len(turn.output) <= (8 if episode.kind else 12) for turn in episode.turns)
    assert all(len(episode.turns) == 1 and not episode.patch for episode in episodes if episode.kind)

    kinds = summary["kinds"]
    assert kinds.keys() == {"", "label"} and all(
        account["balanced"] and account["sampled"] for account in kinds.values()
    )
    for field in ("sampled", "trained"):
        assert summary["account"][field] == sum(account[field] for account in kinds.values())
    assert summary["account"]["balanced"] and kinds["label"]["trained"]
    assert {"reward/plain", "reward/label"} <= summary["metrics"].keys()
    assert {task.kind for task in project.run.tasks().values()} == {"", "label"}
    assert load_config(project.run.config).kinds["label"].tokens == 400

    refused = project.crrl("train", str(project.config), "run.name=other", "kinds.lable.calls=3", check=False)
    assert refused.returncode == 2 and "did you mean 'label'?" in refused.stderr
