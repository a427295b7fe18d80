"""A run whose prompts leave no room for a reply is refused, with the number, the task and the setting to change."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.cli.output import format_nested
from coderepairrl.config import Config, load_config, to_toml
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.plan import plan_run
from coderepairrl.plan.prompts import check_prompts
from coderepairrl.runs import RunFolder
from coderepairrl.stages import command
from coderepairrl.stages.changes import list_changes, summarise_left_out
from coderepairrl.stages.history import read_history

CONFIG = """
run = {{ name = "prompts", steps = 1 }}
model = {{ path = "{model}", init = "random" }}
tasks = {{ source = "jsonl", options = {{ path = "tasks.jsonl" }}, verify = false }}
reward = "classification"
agent = {{ name = "direct", options = {{ system = "" }} }}
rollout = {{ tokens = 4096, turn_tokens = 64 }}
eval = {{ before = false, after = false }}
"""


def written(model: Path, *prompts: str, **more: str) -> None:
    rows = [{"id": f"q/{at}", "prompt": text, "language": "c", "answer": "x"} for at, text in enumerate(prompts)]
    Path("tasks.jsonl").write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    Path("run.toml").write_text(CONFIG.format(model=model))


def planned(*overrides: str) -> Config:
    return load_config("run.toml", overrides)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_prompt_of_100k_tokens_is_refused_and_a_short_one_is_not(miniature: Path, isolating: None) -> None:
    written(miniature, "short", "a b " * 50_000, "c d " * 60_000)
    shown, problem = command.dry_run(planned())
    assert isinstance(problem, ConfigError) and shown["verdict"] == "it cannot be run here: 1 mistake"
    assert "task q/2" in str(problem) and "rollout.tokens" in str(problem) and "1 more" in str(problem)
    [tokens] = [int(word.replace(",", "")) for word in str(problem).split() if word.replace(",", "").isdigit()][:1]
    assert tokens >= 100_000
    with pytest.raises(ConfigError, match="task q/2"):
        asyncio.run(command.run_training(planned(), quiet=True))
    assert not Path("runs").exists(), "before a real run has begun"
    written(miniature, "short", "a b " * 50)
    shown, problem = command.dry_run(planned())
    assert problem is None and "of 4,096 tokens by rollout.tokens (task q/1)" in shown["verdict"]
    assert shown["verdict"].startswith("it fits")
    assert not {"None", "False", "True"} & {*format_nested(shown).split()} and "(0.9" not in format_nested(shown)


def test_the_prompt_that_just_fits_and_the_one_that_does_not(miniature: Path, isolating: None) -> None:
    written(miniature, "which? " * 100)
    longest = plan_run(planned()).prompt
    assert longest is not None and (longest.task, longest.most, longest.limit) == ("q/0", 4096, "rollout.tokens")
    assert plan_run(planned(f"rollout.tokens={longest.tokens + 1}")).prompt is not None
    with pytest.raises(ConfigError, match=f"has {longest.tokens} tokens") as refused:
        plan_run(planned(f"rollout.tokens={longest.tokens}"))
    assert f"rollout.tokens={longest.tokens + 64}" in refused.value.fix
    with pytest.raises(ConfigError, match=r"engine\.options\.context"):
        plan_run(planned(f"engine.options.context={longest.tokens}"))


def test_settings_that_make_room_are_all_named_and_can_be_typed(miniature: Path, isolating: None) -> None:
    """A shorter prompt of the agent where that suffices, and each limit that is too low."""
    written(miniature, "short", kind="label")
    Path("run.toml").write_text(Path("run.toml").read_text() + "[kinds.label]\nagent = 'nano'\n")
    longest = plan_run(planned()).prompt
    assert longest is not None
    limits = (f"kinds.label.tokens={longest.tokens}", f"rollout.tokens={longest.tokens + 1}")
    asked = (*limits, "engine=tiny", f"engine.options.context={longest.tokens + 2}")
    with pytest.raises(ConfigError, match=r"kinds\.label\.tokens") as refused:
        plan_run(planned(*asked))
    shorter, raised, _ = refused.value.fix.split("; or ")
    assert shorter == "kinds.label.agent.options.system=compact kinds.label.agent.options.tools=compact"
    settings = raised.removesuffix(" leaves room for a reply").split()
    assert [each.partition("=")[0] for each in settings] == [
        *("kinds.label.tokens", "rollout.tokens", "engine.options.context")
    ]
    for fix in (shorter.split(), settings):
        assert plan_run(planned(*asked, *fix)).prompt is not None


def test_a_prompt_that_is_no_text_is_named(miniature: Path, isolating: None) -> None:
    """A user's own source may have one."""
    written(miniature, "which?")
    plan = plan_run(planned())
    half = replace(plan.train_tasks[0], id="half", prompt="half a character: \ud800")
    with pytest.raises(TaskError, match="prompt of task half cannot be written"):
        check_prompts(plan.config, plan.model, plan.kinds, [half])


def test_thousands_of_long_prompts_take_seconds(miniature: Path, isolating: None) -> None:
    written(miniature, *(f"{at} " + "word " * 800 for at in range(5000)))
    began = time.process_time()
    plan_run(planned())
    assert time.process_time() - began < 30


def test_too_long_ones_are_left_out_where_that_is_asked_for(miniature: Path, isolating: None) -> None:
    written(miniature, "short", "a b " * 50_000, "also short", "c d " * 60_000)
    plan = plan_run(planned("tasks.too_long=drop"))
    assert [task.id for task in plan.train_tasks] == ["q/0", "q/2"] and plan.too_long == ("q/1", "q/3")
    assert command.dry_run(planned("tasks.too_long=drop"))[0]["left_out_too_long"] == 2
    with pytest.raises(ConfigError, match="task q/3"):  # those of an evaluation stay what they are
        plan_run(planned("tasks.too_long=drop", "eval.split=train", "eval.before=true"))
    written(miniature, "a b " * 50_000)
    with pytest.raises(ConfigError, match="task q/0"):  # nothing would be left
        plan_run(planned("tasks.too_long=drop"))


def test_a_buffer_before_a_limit_that_no_attempt_reaches_is_refused(miniature: Path, isolating: None) -> None:
    written(miniature, "short")
    asked = ("train.overlong_buffer=100", "engine=tiny", "engine.options.context=512")
    _, problem = command.dry_run(planned(*asked))
    assert isinstance(problem, ConfigError) and "ends at 4,096 tokens, and attempts at 512" in str(problem)
    assert problem.fix == "rollout.tokens=512"
    assert command.dry_run(planned(*asked, problem.fix))[1] is None
    with pytest.raises(ConfigError, match="attempts at 512"):  # a resumed run may have another engine, and limit
        plan_run(planned(*asked), resumed=True)
    written(miniature, "short", kind="label")
    Path("run.toml").write_text(Path("run.toml").read_text() + "[kinds.label]\ntokens = 1000\nturn_tokens = 600\n")
    _, problem = command.dry_run(planned(*asked))
    assert isinstance(problem, ConfigError) and problem.fix.split() == [
        *("rollout.tokens=512", "kinds.label.tokens=512", "kinds.label.turn_tokens=512")
    ]
    assert command.dry_run(planned(*asked, *problem.fix.split()))[1] is None


def test_a_resume_that_would_leave_out_other_tasks_is_refused(miniature: Path, isolating: None) -> None:
    written(miniature, "short", "which? " * 300, "also short", "c d " * 60_000)

    def resumed(*overrides: str) -> None:
        plan = plan_run(planned("tasks.too_long=drop", *overrides), resumed=True)
        list_changes(folder, read_history(folder), plan.config, plan.reward_versions, plan.too_long)

    began = plan_run(planned("tasks.too_long=drop"))
    about = {
        "config": began.config.model_dump(mode="json"),
        "too_long": summarise_left_out(began.too_long),
        "rewards": {},
    }
    folder = RunFolder(Path("runs/prompts"))
    folder.create(to_toml(began.config), about)
    resumed()
    resumed("rollout.tokens=8192")  # which leaves out the same
    with pytest.raises(ConfigError, match="left out 1 tasks .* the present settings leave out 2") as refused:
        resumed("rollout.tokens=128")
    assert "rollout.tokens=4096" in refused.value.fix
    with pytest.raises(ConfigError, match="present settings leave out 2") as refused:
        resumed("engine=tiny", "engine.options.context=128")
    assert "engine.options.context=unset" in refused.value.fix
