"""A run folder that somebody handed over is data: it runs nothing and chooses no isolation unless it is asked to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.config import Config
from coderepairrl.errors import CombinedError, ConfigError, UsageError
from coderepairrl.plan import COLLECTION, EVALUATION
from coderepairrl.plan.model import ModelCommand, plan_model
from coderepairrl.plan.parts import raise_errors
from coderepairrl.plan.policies import load_policy
from coderepairrl.stages.arguments import plan_evaluations
from coderepairrl.stages.conversations import RecordedAttempts
from coderepairrl.stages.fix import REPAIR
from coderepairrl.stages.serve import SERVING

HARMLESS = (
    "kinds.agent.calls=3",
    "agent.options.tools=compact",
    "rollout.calls=7",
    "engine.options.slots=3",
    "model.thinking=false",
)
PROGRAM = """
import pathlib
pathlib.Path("ran").touch()
from coderepairrl.agents.nano import Nano as Agent
from coderepairrl.engines.tiny import Tiny as Engine
from coderepairrl.rewards import *
"""


def hand_over(folder: Path, *settings: str) -> Path:
    """A run folder with a checkpoint and these `settings`."""
    run = folder / "theirs"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "00001").symlink_to(models.find_model_folder("builtin:tiny"))
    (run / "run.json").write_text(json.dumps({"schema": 3, "name": "theirs"}))
    (run / "config.toml").write_text(configs.to_toml(configs.load_config("hello", ["sandbox=auto", *settings])))
    return run


def settings_of(run: Path, use: ModelCommand, *overrides: str) -> Config:
    plan = plan_model(str(run), overrides, use)
    raise_errors(plan.errors())
    return plan.config


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module that leaves a mark where it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "theirs_code", raising=False)
    (tmp_path / "theirs_code.py").write_text(PROGRAM)
    return tmp_path


ATTACKS = {
    "agent.name": ("agent=theirs_code:Agent", (REPAIR, EVALUATION, COLLECTION)),
    "engine.name": ("engine=theirs_code:Engine", (REPAIR, SERVING, EVALUATION, COLLECTION)),
    "engine.options.python": (
        'engine={name="vllm", options={python="/tmp/theirs"}}',
        (REPAIR, SERVING, EVALUATION, COLLECTION),
    ),
    "engine.options.url": ('engine={name="vllm", options={url="http://there:1"}}', (REPAIR, SERVING, EVALUATION)),
    "engine.options.env": ('engine={name="vllm", options={env={LD_PRELOAD="x.so"}}}', (REPAIR, SERVING, EVALUATION)),
    "engine.weights_dir": ("engine.weights_dir=/home/me", (REPAIR, SERVING, EVALUATION)),
    "sandbox.name": ("sandbox=unsafe-local", (REPAIR, EVALUATION, COLLECTION)),
    "sandbox.options": ('sandbox.options.binds=["/home"]', (REPAIR, EVALUATION, COLLECTION)),
    "agent.options.system_file": ("agent.options.system_file=/etc/hostname", (REPAIR, EVALUATION)),
    "agent.options.examples": ("agent={name='direct', options={examples='/etc/hostname'}}", (REPAIR, EVALUATION)),
    "tasks.source": ("tasks.source=theirs_code:Tasks", (EVALUATION, COLLECTION)),
    "tasks.options.sandbox": ("tasks.options.sandbox=unsafe-local", (EVALUATION,)),
    "tasks.sources": ('tasks={sources=[{source="theirs_code:Tasks"}]}', (EVALUATION, COLLECTION)),
    "eval.source": ("eval.source=theirs_code:Tasks", (EVALUATION,)),
    "eval.also.more.agent.name": ("eval.also.more.agent=theirs_code:Agent", (EVALUATION,)),
    "kinds.bug.agent.name": ("kinds.bug.agent=theirs.toml", (EVALUATION,)),
    "kinds.agent.agent.name": ("kinds.agent.agent=theirs_code:Agent", (EVALUATION,)),
    "kinds.options.agent.name": ("kinds.options.agent=theirs_code:Agent", (EVALUATION,)),
    "kinds.bug.reward": ("kinds.bug.reward=theirs_code:Reward", (EVALUATION,)),
    "reward": ("reward=theirs_code:Reward", (EVALUATION,)),
    "rollout.executor": ("rollout.executor=ray", (EVALUATION, COLLECTION)),
    "log": ("log=wandb", (EVALUATION, COLLECTION)),
}


@pytest.mark.parametrize("key", ATTACKS)
def test_a_run_folder_starts_no_program_and_weakens_no_isolation(here: Path, key: str) -> None:
    attack, uses = ATTACKS[key]
    run = hand_over(here, attack)
    for use in uses:
        with pytest.raises((ConfigError, CombinedError)) as refused:
            settings_of(run, use)
        assert f"{run} sets {key} to " in str(refused.value)
    assert not (here / "ran").exists()


def test_settings_that_the_user_names_are_taken(here: Path) -> None:
    """The control of the attacks: the same class runs when it is named on the command line."""
    run = hand_over(here, "agent=theirs_code:Agent", "engine=theirs_code:Engine", "sandbox=unsafe-local")
    mine = settings_of(run, REPAIR, "agent=nano", "engine=theirs_code:Engine", "sandbox=unsafe-local")
    assert (mine.agent.name, mine.engine.name, mine.sandbox.name) == ("nano", "theirs_code:Engine", "unsafe-local")
    assert (here / "ran").exists()


def test_settings_that_describe_model_and_agent_are_taken(here: Path) -> None:
    for use in (REPAIR, SERVING, EVALUATION, COLLECTION):
        taken = settings_of(hand_over(here / use.command, *HARMLESS), use)
        assert (taken.agent.options["tools"], taken.engine.options["slots"]) == ("compact", 3)
        assert (taken.rollout.calls, taken.model.thinking) == (7, False)


def test_settings_of_a_shipped_config_are_trusted(here: Path) -> None:
    run = hand_over(here)
    for name in ("thesis", "qwen3-14b"):
        (run / "config.toml").write_text(configs.to_toml(configs.load_config(name)))
        assert "args" in load_policy(run, [], EVALUATION.used).engine.options


def test_a_run_named_for_its_settings_is_handed_over_too(here: Path) -> None:
    """Its own file says them all: crrl eval RUN/config.toml --policy RUN."""
    run = hand_over(here, "reward=theirs_code:Reward", "log=wandb")
    with pytest.raises(CombinedError, match="sets reward to"):
        plan_evaluations(str(run), ["eval.tasks=1"], ["builtin:tiny"])
    source = ["eval.split=test", "log=[]"]  # another source is measured by its own reward
    [planned] = plan_evaluations("hello", [*source, "eval.tasks=1"], [str(run)])
    assert planned.plan.eval_tasks["eval"]
    assert not (here / "ran").exists()


def test_no_file_extends_a_run_and_no_run_extends_a_file(here: Path) -> None:
    run = hand_over(here)
    (here / "mine.toml").write_text('extends = "theirs"\n[run]\nname = "mine"\n')
    with pytest.raises(ConfigError, match="the settings of a run"):
        configs.load_config(here / "mine.toml")
    (run / "config.toml").write_text('extends = "../mine.toml"\n')
    with pytest.raises(ConfigError, match="a run's config is complete"):
        configs.load_run(run)


def test_attempts_to_learn_from_import_no_class(here: Path) -> None:
    run = hand_over(here, "eval.source=theirs_code:Tasks")
    (run / "run.json").write_text(json.dumps({"schema": 3, "name": "theirs", "policy": "builtin:tiny"}))
    with pytest.raises(UsageError, match="measured theirs_code:Tasks, which may be an evaluation set"):
        RecordedAttempts(run)
    assert not (here / "ran").exists()
