"""Two kinds of tasks, of two sources, in one run."""

from __future__ import annotations

import json
from collections import Counter

from coderepairrl.config import load_config

from .conftest import Project

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
    """Each kind has its agent, limits, rewards and part of the batches; the account is balanced for each and in sum; a
    run that is resumed goes on with the same mixture."""
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

    wrong = project.crrl("train", str(project.config), "run.name=other", "kinds.lable.calls=3", check=False)
    assert wrong.returncode == 2 and "did you mean 'label'?" in wrong.stderr
