"""Miniature tasks of four kinds, and what the scripted expert shows of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from coderepairrl.agents import blocks
from coderepairrl.agents.patching import NoMatch
from coderepairrl.rewards.labels import read_label
from coderepairrl.runs.examples import Example, read_examples
from coderepairrl.sandbox.contents import files_at_hand
from coderepairrl.tasks.jsonl import JsonlSource
from coderepairrl.tasks.mutants.slices import functions
from coderepairrl.tasks.patches import patched, paths
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


def test_demonstrations_are_asked_as_tasks_are(tasks: dict[str, Task], examples: list[Example]) -> None:
    for kind, form in ASKED.items():
        asked = [task.prompt for task in tasks.values() if task.kind == kind]
        asked += [str(each.messages[0]["content"]) for each in examples if each.kind == kind]
        assert all(form.fullmatch(each) for each in asked), kind


def test_references_of_tasks_are_what_their_prompts_ask_for(tasks: dict[str, Task]) -> None:
    for task in tasks.values():
        if task.kind == "implement":
            name, described, _ = ASKED["implement"].fullmatch(task.prompt).groups()  # type: ignore[union-attr]
            [path] = paths(task.reference)
            before = files_at_hand(task.workspace, [path])[path]
            assert before is not None
            [formula] = [each for each in kinds.FORMULAS if each.described == described]
            assert patched(before, task.reference) == f"{formula.function(name).source}\n".encode()


def outcomes(examples: list[Example], kind: str) -> Iterator[bool]:
    """Whether the expert is right; of ``repair`` where names were kept, so that healthy functions can be told."""
    healthy = {each.source.strip() for each in functions()}
    for each in examples:
        reply = str(each.messages[-1]["content"])
        asked = ASKED[kind].fullmatch(str(each.messages[0]["content"])) if each.kind == kind else None
        if asked is None:
            continue
        if kind == "detect":
            right = each.task_id.rpartition("/")[2].rpartition("-")[0]
            yield (read_label(reply) or "").replace(" ", "-") == right
            continue
        given = asked.group(asked.lastindex or 0)
        try:
            after = blocks.applied(given.encode(), blocks.read(reply))
        except NoMatch:
            after = b""
        if kind == "implement":
            [formula] = [one for one in kinds.FORMULAS if one.described == asked[2]]
            yield after.decode() == f"{formula.function(asked[1]).source}\n"
        elif given.split("\n\n\n")[0].strip() in healthy or given.split("\n\n\n")[1].strip() in healthy:
            yield {part.strip() for part in after.decode().split("\n\n\n")} <= healthy


def test_the_expert_does_in_one_turn_what_it_is_shown_to_do_about_as_often_as_it_says(examples: list[Example]) -> None:
    for kind in ASKED:
        found = list(outcomes(examples, kind))
        assert len(found) > 150, kind
        assert sum(found) / len(found) == pytest.approx(kinds.RIGHT, abs=0.08), kind


def test_families_of_bugs_come_equally_often(tasks: dict[str, Task], examples: list[Example]) -> None:
    for split in ("train", "test"):
        answers = Counter(task.answer for task in tasks.values() if task.kind == "detect" and task.split == split)
        assert answers.keys() == set(kinds.FAMILIES)
        assert len(set(answers.values())) == 1
