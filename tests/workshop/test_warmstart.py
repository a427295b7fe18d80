"""What the shipped policy is made of: examples of training tasks alone, and jobs that take them."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from coderepairrl import models
from coderepairrl.runs.examples import Example
from coderepairrl.tasks.mutants.corpus_tasks import mutants
from workshop.tiny import prompt, warmstart

SHIPPED = models.model_folder("builtin:tiny")


def some(lesson: str, count: int) -> list[Example]:
    return list(islice(warmstart.examples(lesson, SHIPPED), count))


@pytest.mark.parametrize("lesson", warmstart.LESSONS)
def test_examples_are_of_training_pairs_and_the_same_again(lesson: str) -> None:
    splits = {f"mutants/{mutant.key}-{kind}": mutant.split for mutant in mutants() for kind in "qu"}
    found = some(lesson, 200)
    assert {splits[each.task_id] for each in found} == {"train"}
    assert len({each.id for each in found}) == 200 and found[:20] == some(lesson, 20)
    quoted = sum(each.task_id.endswith("q") for each in found) / 200
    assert abs(quoted - warmstart.LESSONS[lesson].quoted) < 0.12


def test_the_mistake_of_replacing_a_line_by_itself_is_shown_and_not_learned() -> None:
    found, repeats = some("recover", 200), set[int]()
    for each in found:
        mistakes = sum(message["content"] == prompt.TEXTS.identical for message in each.messages)
        turns = sum(message["role"] == "assistant" for message in each.messages)
        learned = sum(now and not before for before, now in pairwise(each.trained))
        assert learned == turns - mistakes
        repeats.add(mistakes)
    assert repeats == {0, 1, 2}
