"""Miniature tasks of four kinds, and what the scripted expert shows of them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from coderepairrl.runs.examples import Example, read_examples
from coderepairrl.sandbox.contents import read_local_files
from coderepairrl.tasks.jsonl import JsonlSource
from coderepairrl.tasks.patches import apply_to_text, changed_paths
from coderepairrl.types import Task
from workshop.tiny import kinds

ASKED = {
    "detect": re.compile(r"(.+)\?\n- .+\n\+ .+\n"),
    "repair": re.compile(r"(?s).+\n\n(\w+\.py)\n```\n(.*)```\n"),
    "implement": re.compile(r"calc\.py: write (\w)\(a, b\): (.+)\.\n```\n(# MASKED: \1 function \(lines 1-2\)\n)```\n"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "DRAWS", {"detect": 6, "repair": 2, "tools": 1, "implement": 8})
        kinds.make(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(made: Path) -> dict[str, Task]:
    return {task.id: task for kind in kinds.KINDS for task in JsonlSource(made / f"{kind}.jsonl")}


@pytest.fixture(scope="module")
def examples(made: Path) -> list[Example]:
    return [each for kind in kinds.KINDS for each in read_examples(made / f"{kind}.parquet")]


def key(task_id: str) -> str:
    return task_id.removesuffix("-q")


def test_what_is_shown_is_trained_on_by_rewards_or_held_out_and_never_two_of_these(
    tasks: dict[str, Task], examples: list[Example]
) -> None:
    splits = Counter((task.kind, task.split) for task in tasks.values())
    assert splits.keys() == {(kind, split) for kind in kinds.KINDS for split in ("train", "test")}
    assert min(splits.values()) >= 60
    assert {key(name) for name in tasks}.isdisjoint(each.task_id for each in examples)
    for kind in kinds.KINDS:
        shown = {each.task_id for each in examples if each.kind == kind}
        assert len(shown) >= 80, kind


def test_references_of_tasks_are_what_their_prompts_ask_for(tasks: dict[str, Task]) -> None:
    for task in tasks.values():
        if task.kind == "implement":
            name, described, _ = ASKED["implement"].fullmatch(task.prompt).groups()  # type: ignore[union-attr]
            [path] = changed_paths(task.reference)
            before = read_local_files(task.workspace, [path])[path]
            assert before is not None
            [formula] = [each for each in kinds.FORMULAS if each.described == described]
            assert apply_to_text(before, task.reference) == f"{formula.function(name).source}\n".encode()
