"""A whole run whose engine and learner have a device by turns, as far as a CPU has something to give away: the engine
is stopped while the learner steps, and the learner's tensors are elsewhere while the engine samples."""

from __future__ import annotations

import json

import pytest

from e2e.conftest import Project

TERMS = ("engine=e2e_engines:SleepingTiny", "engine.share_devices=turns")
OURS = {f"learn/{name}_seconds" for name in ("sleep", "take_back", "put_away", "wake")}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_by_turns(staleness: int, project: Project) -> None:
    """An engine that refuses to wake up once is replaced by one with the new weights, and nothing is lost."""
    ahead = (f"rollout.max_staleness={staleness}", "train.old_logprobs=recomputed") if staleness else ()
    done = project.crrl("train", str(project.config), *TERMS, *ahead, "run.steps=3", "run.checkpoint_every=2", "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["version"] == 3 and summary["account"]["balanced"]
    assert "the engine died, and another is started: the server failed to wake up: CUDA out of memory" in done.stderr
    steps = [record for record in project.records() if record["type"] == "step"]
    for step in steps:
        assert step["metrics"].keys() >= OURS and step["metrics"]["learn/moved_bytes"] > 0
        assert staleness or step["metrics"]["learn/mismatch_max"] < 1e-4
    sampled = [turn for step in steps for turn in step["episodes"]]
    assert len(sampled) == len(set(sampled)) == 3 * 2 * 3, "each episode is trained once"
    resumed = project.crrl("train", str(project.run.path), "run.steps=4", "--resume", "--json")  # weights are verified
    assert json.loads(resumed.stdout.splitlines()[-1])["version"] == 4


def test_a_learner_that_dies_is_started_anew(project: Project) -> None:
    """Within the third step, with two in the log; the weights of the whole run are those that its replay has."""
    summary = project.train("engine=e2e_engines:DeadlyTiny", TERMS[1], "run.steps=4", "run.checkpoint_every=1")
    assert (project.path / "killed").exists()
    assert summary["version"] == 4 and summary["account"]["balanced"]
    resumed = project.crrl("train", str(project.run.path), "run.steps=5", "--resume", "--json")
    assert json.loads(resumed.stdout.splitlines()[-1])["version"] == 5
