"""Settings that change when a run is resumed: logged, and taken back where earlier steps are replayed."""

from __future__ import annotations

import json
import shutil

import pytest

from coderepairrl import config as configs
from coderepairrl.errors import ConfigError
from coderepairrl.stages.changes import list_changes
from coderepairrl.stages.history import read_history
from e2e.conftest import Project


def forget_checkpoints(project: Project) -> None:
    """As of a process that was killed before it wrote any: what comes next has to replay all steps."""
    shutil.rmtree(project.run.checkpoints)
    project.run.checkpoints.mkdir()


def test_a_changed_learning_rate_is_replayed_bit_for_bit(project: Project) -> None:
    """Resumed with another learning rate, and once more: the log's weights come out, which resuming compares."""
    folder = str(project.run.path)
    project.train("run.steps=2")
    forget_checkpoints(project)
    done = project.crrl("train", folder, "--resume", "train.lr=5e-3", "rollout.seconds=20", "run.steps=3")
    assert "resumed after step 2 of 3: steps 1 to 2 replayed from the log" in done.stderr
    assert configs.load_config(folder).train.lr == 5e-3
    assert sorted(project.run.saved_checkpoints()) == [2, 3], "one where the settings changed"
    forget_checkpoints(project)
    done = project.crrl("train", folder, "--resume", "run.steps=4", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["account"]["balanced"]
    rates = [step["metrics"]["learn/lr"] for step in project.records() if step["type"] == "step"]
    assert rates == [1e-3, 1e-3, 5e-3, 5e-3]
    changes = [[r["step"], r["key"], r["old"], r["new"]] for r in project.records() if r["type"] == "change"]
    assert sorted(changes) == [
        *([2, "rollout.seconds", 30.0, 20.0], [2, "run.steps", 2, 3], [2, "train.lr", 1e-3, 5e-3]),
        [3, "run.steps", 3, 4],
    ]


def test_what_would_make_it_another_run_is_refused_with_the_reason(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.train("run.steps=1")
    monkeypatch.chdir(project.path)
    for override, why in (
        ("train.algorithm=grpo", "another method"),
        ("run.seed=1", "randomness"),
        ("agent.options.tools=full", "a different program"),
    ):
        with pytest.raises(ConfigError, match=why):
            list_changes(
                project.run, read_history(project.run), configs.load_config(project.run.path, [override]), {}, ()
            )
    before = project.run.config.read_text()
    assert 'tools = "compact"\n' in before
    project.run.config.write_text(before.replace('tools = "compact"\n', ""))  # by hand, and by leaving it out
    with pytest.raises(ConfigError, match=r"agent\.options\.tools"):
        list_changes(project.run, read_history(project.run), configs.load_config(project.run.path), {}, ())
