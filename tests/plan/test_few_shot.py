"""Worked examples: drawn once, recorded, never of what is evaluated, and refused where they leave no room."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import agents
from coderepairrl.agents.examples import Example, read_examples_file
from coderepairrl.config import Config, to_toml
from coderepairrl.errors import CodeRepairError, ConfigError
from coderepairrl.plan import resolve_evaluation
from coderepairrl.plan.few_shot import fill_in_examples
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.tasks import make_source
from coderepairrl.types import Task

SUB = "def sub(a, b):\n    return a - b\n"
EXAMPLE = Example("sub() adds", "sub.py", SUB.replace("-", "+"), SUB, "my/sub")
TWO = "agent.options={format='function', examples=2}"


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Task]]:
    cache = str(tmp_path_factory.mktemp("cache"))
    return {name: list(make_source("mutants", split=name, n=6, quoted=0, cache=cache)) for name in ("train", "unseen")}


def config(**options: Any) -> Config:
    return Config.model_validate({"run": {"name": "x"}, "agent": {"name": "direct", "options": options}})


def chosen(model: Path, *more: str) -> AgentPlan:
    return resolve_evaluation(
        str(model),
        [
            *("tasks.source=mutants", "tasks.options={n=8, split='train', quoted=0}", "reward.patch_edits=1.0"),
            *("eval.source=mutants", "eval.options={n=4, split='unseen', quoted=0}", "eval.split=unseen"),
            *("sandbox=scripted", "agent.name=direct", "rollout.tokens=4000", "rollout.turn_tokens=64", *more),
        ],
    )


def test_examples_are_drawn_once_and_recorded(miniature: Path, tmp_path: Path) -> None:
    plan = chosen(miniature, TWO)
    drawn = plan.config.agent.options["examples"]
    evaluated = {task.id for tasks in plan.eval_tasks.values() for task in tasks}
    assert len({each["id"] for each in drawn}) == 2 and not evaluated & {each["id"] for each in drawn}
    assert chosen(miniature, TWO).config == plan.config
    assert chosen(miniature, TWO, "run.seed=7").config.agent == plan.config.agent, "seeds have the same prompt"
    task = next(iter(plan.eval_tasks["eval"]))
    messages = plan.agent_setup.agent.first_request(task).messages
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert (
        messages[1]["content"].startswith(drawn[0]["prompt"]) and drawn[0]["before"].rstrip() in messages[1]["content"]
    )
    assert "```python\ndef " in messages[2]["content"]
    (again := tmp_path / "again.toml").write_text(to_toml(plan.config))
    recorded = resolve_evaluation(str(again))
    assert recorded.config.agent == plan.config.agent, "a run that was recorded draws no others"


def test_no_example_is_evaluated(mutants: dict[str, list[Task]], tmp_path: Path) -> None:
    train, unseen = mutants["train"], mutants["unseen"]
    some = fill_in_examples(config(examples=3), train, train[3:]).agent.options["examples"]
    assert {each["id"] for each in some} == {task.id for task in train[:3]}
    with pytest.raises(ConfigError, match="examples=4, and only 3 of 6 training tasks can be"):
        fill_in_examples(config(examples=4), train, train[3:])
    for change in ({}, {"id": "another"}, {"id": "another", "prompt": "Something else is said here."}):
        changed = [{**some[0], **change}]
        with pytest.raises(ConfigError, match=f"{changed[0]['id']} is a task that is evaluated, or has its issue or"):
            fill_in_examples(config(examples=changed), (), train)
    (file := tmp_path / "mine.jsonl").write_text(json.dumps({**some[0], "id": "file/1"}) + "\n")
    with pytest.raises(ConfigError, match="file/1 is a task that is evaluated"):
        fill_in_examples(config(examples=str(file)), (), train)
    assert fill_in_examples(config(examples=str(file)), (), unseen).agent.options["examples"] == [
        {**some[0], "id": "file/1"}
    ]


def test_mistakes_in_examples_are_named(miniature: Path, tmp_path: Path) -> None:
    with pytest.raises(CodeRepairError, match=r"its examples included, has [\d,]+ tokens, and an episode may have 1,0"):
        chosen(miniature, "agent.options.examples=4", "rollout.tokens=1000")
    with pytest.raises(CodeRepairError, match="examples=2 are drawn from training tasks, and there are none here"):
        agents.make_agent("direct", examples=2).first_request(Task("t", "p", "python", "dir:x", b""))
    (bad := tmp_path / "bad.jsonl").write_text('{"prompt": "p", "path": "a.py", "before": "x"}\n')
    for path, problem in ((bad, "bad.jsonl:1 has no text 'after'"), (tmp_path / "no.jsonl", "cannot be read")):
        with pytest.raises(ConfigError, match=problem):
            read_examples_file(str(path))
    for option, problem in (("-1", "negative"), ('[{prompt="p", path="a.py"}]', "0.before: Field required")):
        with pytest.raises(CodeRepairError, match=problem):
            chosen(miniature, f"agent.options.examples={option}")
    unreachable = Example("p", "a.py", "# one\nx = 1\n", "# two\nx = 1\n")
    with pytest.raises(ConfigError, match="no function"):
        agents.make_agent("direct", format="function", examples=[asdict(unreachable)]).first_request(
            Task("t", "p", "python", "dir:x", b"")
        )


@pytest.mark.parametrize("name", ["nano", "nano4", "agentless"])
def test_other_agents_are_shown_examples_in_their_own_form(name: str) -> None:
    agent = agents.make_agent(name, examples=[asdict(EXAMPLE)])
    messages, tools = agent.first_request(Task("t", "p", "python", "dir:x", b""))
    assert messages[1]["content"].startswith("sub() adds") and messages[-1]["content"].startswith("p")
    if name == "agentless":
        assert messages[2]["content"].endswith("\n    return a - b\n>>>>>>> REPLACE")
        return
    offered = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
    called = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert len(called) == 2 and all(
        json.loads(call["arguments"]).keys() <= offered[call["name"]].keys() for call in called
    )
    own = agent.first_request(Task("my/sub", "p", "python", "dir:x", b""))
    assert len(own.messages) == 2, "no task is shown its own repair"
