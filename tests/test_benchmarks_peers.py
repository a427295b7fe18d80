"""The benchmark of whole loops: both sides attempt the same tasks, with tools that run, and all their time counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import STAGES, by_stage, measure, planned, table
from benchmarks.stages import Stages
from coderepairrl.models import find_model_folder

SMALL = ["rollout.tasks_per_step=2", "rollout.group_size=2"]
BUSY = "sum(range(30_000_000))"


def burn() -> None:
    """Some tenths of a second in a child that has ended."""
    subprocess.run([sys.executable, "-c", BUSY], check=True)


def test_time_is_that_of_the_innermost_stage_and_of_the_process() -> None:
    stages = Stages()
    stages.begin()
    stages.enter("learn")
    with stages.within("rollout"), stages.within("reward"):
        burn()
    sum(range(5_000_000))
    told = stages.end()
    cpu = told["cpu"]
    assert cpu["reward/sandbox"] > 0.1 and cpu["reward/sandbox"] > 10 * cpu["learn/sandbox"]
    assert cpu["learn/own"] > cpu["rollout/own"] >= 0
    assert told["wall"] > 0.1
    assert by_stage(told)["all"] == pytest.approx(sum(cpu.values()))


def test_trl_asks_and_reads_in_the_words_of_the_policy(tmp_path: Path) -> None:
    from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response

    from benchmarks.peers_trl import tokenizer

    plan = planned("hello", tmp_path, 1)
    agent = plan.kinds[""].agent
    asked = agent.first_request(plan.train_tasks[0])
    made = tokenizer(plan.model.folder, asked.tools)
    assert is_chat_template_prefix_preserving(made)
    other = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    ids = made.apply_chat_template(list(asked.messages), tools=other, add_generation_prompt=True, return_dict=False)
    codec = plan.model.codec
    assert ids == codec.render(asked.messages, asked.tools)
    call = '<tool_call>\n{"name": "shell", "arguments": {"cmd": "cat a.py"}}\n</tool_call><|im_end|>'
    parsed = parse_response(made, made(call)["input_ids"], prefix=ids, tools=other)
    assert parsed["tool_calls"][0]["function"] == {"name": "shell", "arguments": {"cmd": "cat a.py"}}


def test_both_sides_make_a_step(tmp_path: Path) -> None:
    found = measure("hello", ["ours", "trl"], 1, SMALL)
    for name, [result] in found.items():
        assert len(result["rows"]) == 4 and result["calls"] > 0, name
        assert all(task.startswith("mutants/") for task in result["tasks"])
        spent = by_stage(result)
        assert spent["sampling"] > 0 and spent["sandboxes"] > 0 and spent["all"] > spent["sampling"], name
    [ours], [trl] = found["ours"], found["trl"]
    assert (ours["tasks"], ours["prompt"]) == (trl["tasks"], trl["prompt"])
    assert len(list(table("hello", found))) > len(STAGES)


def test_both_sides_make_a_step_in_one_turn_with_a_model_by_its_folder(tmp_path: Path) -> None:
    overrides = [f"model.path={find_model_folder('builtin:tiny')}", "rollout.turn_tokens=32", *SMALL]
    found = measure("turn", ["ours", "trl-micro1"], 1, overrides)
    [ours], [trl] = found["ours"], found["trl-micro1"]
    assert (ours["tasks"], ours["prompt"]) == (trl["tasks"], trl["prompt"])
    for each in (ours, trl):
        assert len(each["rows"]) == each["turns"] == each["calls"] == 4 and each["sampled"] <= 4 * 32
        assert by_stage(each)["sampling"] > 0 and by_stage(each)["sandboxes"] > 0
