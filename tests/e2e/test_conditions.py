"""A run says in what its evaluation differs from its training, once, and so does an evaluation of its policy."""

from __future__ import annotations

from coderepairrl.runs import RunFolder
from coderepairrl.stages import evaluation

from .conftest import Project

SAME = ("eval.temperature=1", "eval.split=test", "eval.reward.patch_edits=1")
SMALL = ("run.steps=1", "run.checkpoint_every=1", "rollout.tasks_per_step=1", "rollout.group_size=2", "rollout.calls=1")


async def test_differing_conditions_are_said_at_the_start_and_kept(project: Project, isolating: None) -> None:
    once = "evaluation eval has temperature 0, and training 1"
    done = project.crrl("train", str(project.config), *SMALL, "eval.after=true", "eval.tasks=1", "eval.temperature=0")
    about = project.run.about()
    assert done.stderr.count(once) == 1 and "ALARM" not in done.stderr
    assert [each["condition"] for each in about["differences"]] == ["temperature"]
    assert about["conditions"]["train"]["environments"] == [
        {"kind": "sandbox", "name": "", "digest": "", "python": "", "uv": "", "tasks": 6}
    ]
    again = project.crrl("train", str(project.run.path), "--resume", "run.steps=2")
    assert once not in again.stderr

    plan = evaluation.resolve(str(project.run.path), [*SAME, "rollout.seconds=20"])
    folder = RunFolder(project.path / "evaluated")
    await evaluation.measure(plan, folder, quiet=True)
    assert folder.about()["conditions"].keys() == {"eval"}
    assert folder.about()["differences"] == [
        {"evaluation": "eval", "condition": "seconds", "training": "30", "here": "20", "meant": True}
    ]
