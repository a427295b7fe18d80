"""Miniature tasks of four kinds, and what the scripted expert shows of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from coderepairrl.agents import blocks
from coderepairrl.agents.patching import NoMatch
from coderepairrl.rewards.labels import read_label
from coderepairrl.runs.examples import Example, read_examples
from coderepairrl.sandbox.workspace import files_at_hand
from coderepairrl.tasks.jsonl import JsonlSource
from coderepairrl.tasks.patches import patched, paths
from coderepairrl.types import Task
from workshop.tiny import kinds


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    kinds.make(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(made: Path) -> dict[str, Task]:
    return {task.id: task for kind in kinds.KINDS for task in JsonlSource(made / f"{kind}.jsonl")}


@pytest.fixture(scope="module")
def examples(made: Path) -> list[Example]:
    return [each for kind in kinds.KINDS for each in read_examples(made / f"{kind}.parquet")]


def solved(task: Task, reply: str) -> bool:
    """Whether `reply` is the answer, or makes the reference's file."""
    if task.answer:
        return read_label(reply) == task.answer
    [path] = paths(task.reference)
    before = files_at_hand(task.workspace, [path])[path]
    assert before is not None
    try:
        return blocks.applied(before, blocks.read(reply)) == patched(before, task.reference)
    except NoMatch:
        return False


def test_kinds_have_tasks_of_their_own_and_the_held_out_ones_are_in_no_demonstration(
    tasks: dict[str, Task], examples: list[Example]
) -> None:
    splits = Counter((task.kind, task.split) for task in tasks.values())
    assert splits.keys() == {(kind, split) for kind in kinds.KINDS for split in ("train", "test")}
    assert min(splits.values()) >= 15
    assert {tasks[each.task_id].split for each in examples} == {"train"}
    functions = {
        split: {task.id for task in tasks.values() if task.kind == "implement" and task.split == split}
        for split in ("train", "test")
    }
    assert functions["train"].isdisjoint(functions["test"])
    shown = " ".join(str(each.messages[-1]["content"]) for each in examples if each.kind == "implement")
    for each in functions["test"]:
        name = each.split("/")[1].rpartition(".")[2]
        assert f"def {name}(" not in shown, "nor in the garbled ones"


def test_the_expert_does_in_one_turn_what_it_is_shown_to_do_about_as_often_as_it_says(
    tasks: dict[str, Task], examples: list[Example]
) -> None:
    for kind in ("detect", "repair", "implement"):
        outcomes = [
            solved(tasks[each.task_id], str(each.messages[-1]["content"])) for each in examples if each.kind == kind
        ]
        assert sum(outcomes) / len(outcomes) == pytest.approx(kinds.RIGHT[kind], abs=0.08), kind


def test_families_of_bugs_come_equally_often(tasks: dict[str, Task]) -> None:
    for split in ("train", "test"):
        answers = Counter(task.answer for task in tasks.values() if task.kind == "detect" and task.split == split)
        assert answers.keys() == set(kinds.FAMILIES)
        assert len(set(answers.values())) == 1
