"""`crrl config`: what is set, by whom, and what it would be otherwise; options of another task source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.config import explain, load_config


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_each_setting_says_who_set_it(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.toml", 'extends = "hello"\n[run]\nname = "mine"\n[train]\nlr = 1e-3\nlora = {alpha = 16}\n'
    )
    found = {each.key: each for each in explain(file, ["train.lora.rank=8", "sandbox=bwrap", "reward=tests"])}

    assert (found["rollout.calls"].value, found["rollout.calls"].default) == (5, 30)
    assert found["rollout.calls"].source == "preset hello"
    assert (found["run.name"].value, found["run.name"].default) == ("mine", "required")
    assert found["run.name"].source == found["train.lr"].source == f"file {file}"
    assert (found["train.lora.rank"].value, found["train.lora.rank"].source) == (8, "override train.lora.rank=8")
    assert (found["train.lora.alpha"].value, found["train.lora.alpha"].source) == (16, f"file {file}")
    assert (found["sandbox.name"].value, found["sandbox.name"].source) == ("bwrap", "override sandbox=bwrap")
    assert [key for key in found if key.startswith("reward")] == ["reward.tests"]
    assert (found["gpu.tflops"].value, found["gpu.tflops"].source) == (312.0, "default")


@pytest.mark.parametrize("name", ["hello", "thesis-32b"])
def test_the_settings_are_the_config_that_is_run(name: str) -> None:
    data = load_config(name).model_dump(mode="json")
    for each in explain(name):
        value = data
        for part in each.key.split("."):
            value = value[part]
        assert value == each.value, each.key


def test_the_command(tmp_path: Path) -> None:
    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["config", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    rows = {line.split()[0]: line for line in shown("hello", "train.lr=1e-3").splitlines()}
    assert rows["train.lr"].split() == ["train.lr", "0.001", "0.0001", "override", "train.lr=1e-3"]
    assert rows["train.beta"].split() == ["train.beta", "0.0", "0.0", "default"]
    assert {"key": "run.steps", "value": 60, "default": 20, "source": "preset hello"} in json.loads(
        shown("hello", "--json")
    )
    assert {each["source"] for each in json.loads(shown("--json"))} == {"default"}


def test_another_source_of_tasks_has_none_of_the_options_of_the_first(tmp_path: Path) -> None:
    """Neither those of training nor of evaluation, which were of the same source."""
    text = 'extends = "hello"\n[run]\nname = "mine"\n[tasks]\nsource = "handmade"\n'
    for config in (load_config(write(tmp_path / "mine.toml", text)), load_config("hello", ["tasks.source=handmade"])):
        assert (config.tasks.source, config.tasks.options, config.eval.options) == ("handmade", {}, {})
    more = text + "options = { n = 3 }\n[eval]\noptions = { n = 2 }\n"
    config = load_config(write(tmp_path / "more.toml", more))
    assert (config.tasks.options, config.eval.options) == ({"n": 3}, {"n": 2})
    config = load_config("hello", ["tasks.options.n=3", "tasks.source=jsonl", "eval.source=mutants"])
    assert (config.tasks.options, config.eval.options) == ({"n": 3}, {"split": "test", "n": 256})
    same = write(tmp_path / "same.toml", text.replace("handmade", "mutants"))
    assert load_config(same).tasks == load_config("hello").tasks and load_config(same).eval == load_config("hello").eval
