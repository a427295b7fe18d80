"""A run that takes its own verified repairs as further references: what it pays is a function of its log."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.config import load_run
from coderepairrl.rewards import PatchEdits
from coderepairrl.rewards.hybrid import HybridReward
from coderepairrl.runs import logged_episodes
from coderepairrl.tasks import write_jsonl
from coderepairrl.types import Checks, Command, Ending, Episode, Task
from e2e.conftest import Project, freeze_when

BROKEN = "def add(a, b):\n    return a - b\n"
CHECK = "from calc import add\nassert add(2, 3) == 5\n"


def patch(expression: str) -> bytes:
    head = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n"
    return f"{head}-    return a - b\n+    return {expression}\n".encode()


@pytest.fixture
def repairs(project: Project, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides of such a run, in which two attempts at a task are alike every now and then."""
    workspace = project.path / "repo"
    workspace.mkdir()
    (workspace / "calc.py").write_text(BROKEN)
    (workspace / "check.py").write_text("assert False\n")
    checks = Checks((Command(("python3", "check.py"), timeout=20.0),), {"check.py": CHECK})
    tasks = [
        Task(f"t/{name}", f"add() subtracts ({name}).", "python", f"dir:{workspace}", patch(gold), checks)
        for name, gold in (("one", "a + b"), ("two", "sum([a, b])"))
    ]
    write_jsonl(tasks, project.path / "tasks.jsonl")
    monkeypatch.setenv("ORDER", "1")
    return [
        *("tasks.source=jsonl", 'tasks.options={path="tasks.jsonl"}', "tasks.verified_references=4"),
        *("agent.name=e2e_rewards:Repairer", "agent.options={}", "rollout.group_size=4", "eval.after=true"),
        'reward={patch_edits=1.0, tests=0.0}', "eval.attempts=4",
    ]  # fmt: skip


def valid(project: Project) -> list[Episode]:
    return [e for e in logged_episodes(project.records()) if e.ending is not Ending.VOID]


def verdicts(project: Project) -> dict[tuple[str, int], Any]:
    """What does not depend on when an attempt ended, or on how often it was begun."""
    return {(e.group, e.attempt): (e.patch, e.scores) for e in valid(project) if e.phase == "train"}


def exported(project: Project) -> list[dict[str, Any]]:
    rows = (project.run.path / "references.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(row).items() if key != "episode"} for row in rows]


async def test_scores_depend_on_earlier_steps_alone_in_any_order_and_after_a_kill(
    project: Project, repairs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project.train(*repairs)
    compare, known = PatchEdits().compare, dict[str, list[bytes]]()
    golds = {"t/one": patch("a + b"), "t/two": patch("sum([a, b])")}
    shares: list[float] = []
    for step in (1, 2, 3):
        attempts = [e for e in valid(project) if (e.phase, e.step) == ("train", step)]
        assert len(attempts) == 8
        for episode in attempts:
            similar, tests = episode.scores
            gold = compare(golds[episode.task_id], episode.patch, "python")
            further = [compare(other, episode.patch, "python") for other in known.get(episode.task_id, [])]
            assert similar.value == max([gold, *further])
            assert bool(similar.nearest) == (max([0.0, *further]) > gold)
            if episode.patch in known.get(episode.task_id, []):
                assert similar.value == 1.0, "a repair that passed in an earlier step"
            assert tests.passed == (b"a * b" not in episode.patch)
        shares.append(sum(bool(e.scores[0].nearest) for e in attempts) / len(attempts))
        for episode in sorted(attempts, key=lambda each: (each.group, each.attempt)):
            taken = known.setdefault(episode.task_id, [])
            own = compare(golds[episode.task_id], episode.patch, "python") == 1.0
            if episode.scores[1].passed and episode.patch not in taken and not own:
                taken.append(episode.patch)
        if step == 1:
            assert any(known.values())
    assert shares[0] == 0.0 and max(shares) > 0.0
    steps = project.steps()
    assert [step["metrics"]["references/nearest"] for step in steps] == shares
    assert steps[0]["metrics"]["references/per_task"] == 0.0 < steps[2]["metrics"]["references/per_task"]
    assert {row["task"]: row["step"] for row in exported(project)}.keys() == {t for t in known if known[t]}

    evaluated = [e for e in valid(project) if e.phase == "eval"]
    assert any(e.patch in known[e.task_id] for e in evaluated)
    for episode in evaluated:
        assert episode.scores[0].value == compare(golds[episode.task_id], episode.patch, "python")
        assert not episode.scores[0].nearest

    monkeypatch.setenv("ORDER", "2")
    (tmp_path / "again").mkdir()
    again = replace(project, path=tmp_path / "again")
    for name in ("repo", "tasks.jsonl"):
        (again.path / name).symlink_to(project.path / name)

    def in_the_last_step() -> bool:
        records = again.records()
        ended = [r for r in records if r["type"] == "verdict" and r["verdict"]["group"].startswith("train-00003")]
        return sum(record["type"] == "step" for record in records) == 2 and 0 < len(ended) < 8

    with again.started("train", str(project.config), *repairs, "eval.after=false") as process:
        await freeze_when(process, in_the_last_step)
    before = verdicts(again)
    (again.run.path / "references.jsonl").write_text("edited\n")
    again.resume()
    ends = [[r["verdict"]["id"] for r in each.records() if r["type"] == "verdict"] for each in (project, again)]
    assert ends[0] != ends[1], "the attempts ended in another order"
    assert verdicts(again) == verdicts(project)
    assert verdicts(again).items() >= before.items()
    assert exported(again) == exported(project)


def test_a_setting_without_effect_is_refused_before_anything_is_made(project: Project, repairs: list[str]) -> None:
    refused = project.crrl("train", str(project.config), *repairs, "run.steps=1", check=False)
    assert refused.returncode == 2, refused.stderr
    assert "none of the 2 training tasks is attempted in two steps" in refused.stderr
    assert not project.run.path.exists()


def test_a_run_that_names_no_reward_is_paid_by_what_its_tasks_have_and_resumes_so(
    project: Project, repairs: list[str]
) -> None:
    asked = [each for each in repairs if not each.startswith(("reward", "tasks.verified_references"))]
    asked += ["reward={}", "eval.attempts=1"]
    shown = json.loads(project.crrl("train", str(project.config), *asked, "--dry-run", "--json").stdout)
    both = "of 2 tasks 2 have checks and 2 have a reference)"
    assert shown["reward"] == {
        "train": f"hybrid 1, with up to 4 verified references of each task (no reward is named, and {both}",
        "evaluations": f"tests 1, patch_edits 0 (eval.reward names none, and {both}",
    }
    project.train(*asked, "run.steps=2")
    written = load_run(project.run.path)
    assert (written.reward, written.tasks.verified_references) == ({"hybrid": 1.0}, 4)
    assert written.eval.reward == {"tests": 1.0, "patch_edits": 0.0}

    tasks = project.path / "tasks.jsonl"
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    rows[0]["reference"] = ""
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    project.crrl("train", str(project.config), *asked, "run.steps=3", "--resume")
    assert load_run(project.run.path).reward == {"hybrid": 1.0}, "what it began with, and no longer what follows"

    episodes = valid(project)
    assert {e.scores[0].name for e in episodes if e.phase == "train"} == {"hybrid"}
    for episode in episodes:
        score, right = episode.scores[0], b"a * b" not in episode.patch
        assert score.passed == (right if episode.phase == "eval" or HybridReward().is_tested(episode) else None)
