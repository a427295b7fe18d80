"""A study whose trainings share the learner that it starts: what it says is what learners of their own give, to the
digit, whoever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from coderepairrl.runs import RunFolder

from .conftest import Project, until

STEPS = 3
STUDY = """
[study]
name = "{name}"
config = "e2e.toml"
seeds = [0, 1]
learner = "{learner}"
set = ["run.steps=3", "tasks.verify=false", "rollout.group_size=2", "eval.tasks=0", "eval.options.select.n=2",
    "train.lora={{ rank = 4 }}"]
metric = "reward"
[arms.base]
policy = "{model}"
[arms.rl]
"""


def weights(run: Path) -> list[str]:
    if not (run / "log.jsonl").exists():
        return []
    return [record["checksum"] for record in RunFolder(run).records() if record["type"] == "step"]


def processes(project: Project, module: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if module in words and process.cwd() == str(project.path):
            found.append(process)
    return found


def said(stdout: str) -> Any:
    [question] = json.loads(stdout)["questions"]
    return question | {"question": "of either name"}


@pytest.mark.timeout(280)
async def test_what_a_study_says_is_that_of_learners_of_their_own_whoever_is_killed(
    project: Project, miniature: Path, isolating: None
) -> None:
    for name, learner in (("own", "own"), ("s", "shared")):
        text = STUDY.format(name=name, learner=learner, model=miniature)
        (project.path / f"{name}.toml").write_text(text)
    folder = project.path / "studies" / "s"
    runs = [folder / "rl" / f"seed-{seed}" for seed in (0, 1)]
    command = ("study", "s.toml", "--jobs", "4")
    worker = "coderepairrl.learn.shared_worker"
    planned = project.crrl("study", "s.toml", "--dry-run").stdout
    assert f"one learner for all trainings: {miniature}" in " ".join(planned.split()) and not folder.exists()

    with project.started(*command) as process:
        await until(process, lambda: all(len(weights(run)) >= 1 for run in runs))
        [first] = processes(project, worker)
        os.kill(first.pid, signal.SIGKILL)  # the learner's process: both runs go on at another
        await until(process, lambda: processes(project, worker) not in ([], [first]))
        [training] = _run(project, 0)
        training.kill()  # one run, which the study reports
        await until(process, lambda: all(len(weights(run)) >= 2 for run in runs[1:]))
        process.send_signal(signal.SIGKILL)  # and the study itself
    left = [*processes(project, worker), *_run(project, 1)]
    assert psutil.wait_procs(left, timeout=20)[1] == []
    again = project.crrl(*command, "--json")
    assert "one learner for all trainings" in again.stderr
    assert not os.path.lexists(folder / ".server" / "learner") and (folder / ".server" / "learner.log").is_file()
    assert processes(project, worker) == [] and not [run for run in runs if (run / "logs" / "learner.log").exists()]
    assert project.crrl(*command).stderr == "", "nothing is left to do, and nothing starts"

    own = project.crrl("study", "own.toml", "--jobs", "2", "--json")
    assert said(own.stdout) == said(again.stdout)
    for run in runs:
        alone = project.path / "studies" / "own" / "rl" / run.name
        assert weights(run) == weights(alone) and len(weights(run)) == STEPS
        kept = f"checkpoints/{STEPS:05d}"
        assert {each.name: each.read_bytes() for each in (run / kept).iterdir()} == {
            each.name: each.read_bytes() for each in (alone / kept).iterdir()
        }


def _run(project: Project, seed: int) -> list[psutil.Process]:
    return [each for each in processes(project, "train") if f"run.seed={seed}" in each.cmdline()]
