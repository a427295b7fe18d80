"""A run with a tracker, stopped and resumed: every step is there once."""

from __future__ import annotations

import importlib.util
import os

import pytest

from .conftest import Project


def test_steps_of_a_resumed_run_are_not_doubled(project: Project) -> None:
    if importlib.util.find_spec("tensorboard") is None and not os.environ.get("CI"):
        pytest.skip("needs tensorboard (the extra dev)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    project.train("run.steps=1")
    project.crrl("train", str(project.run.path), "run.steps=2", "log=tensorboard", "eval.after=true", "--resume")
    done = project.crrl("train", str(project.run.path), "run.steps=3", "log=tensorboard", "--resume")
    events = EventAccumulator(str(project.run.path / "tensorboard"))
    events.Reload()
    steps = {tag: [event.step for event in events.Tensors(tag)] for tag in ("train/reward", "eval/reward")}
    assert steps == {"train/reward": [1, 2, 3], "eval/reward": [2, 3]}
    assert "tensorboard" not in done.stderr, "nothing is said of one that works"
    assert [record for record in project.records() if record["type"] == "change" and record["key"] == "log"] == []
