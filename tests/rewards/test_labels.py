"""Labels that replies give."""

from __future__ import annotations

import pytest

from coderepairrl import rewards
from coderepairrl.errors import TaskError
from coderepairrl.rewards.text import Label, read_confidence, read_label
from coderepairrl.types import Task

TASK = Task("t", "Which?", "c", "", b"", answer="CWE-79")


@pytest.mark.parametrize(("reply", "value"), [
    ("<think>\nIt may be CWE-89.\n</think>\n<answer>\nCWE-79\n</answer>", 1),
    ("<think>\n<answer>CWE-79</answer>\n</think>\n<answer>CWE-89</answer>", 0),
    ("<answer>CWE-89</answer> <answer>CWE-79</answer>", 0),
    ("<answer>CWE-79 CWE-89</answer>", 0),
    ("<answer>\nCWE-79", 1),
    ("CWE-79", 1),
    ("**CWE-079**.", 1),
    ("cwe-79\n", 1),
    ("<think>hm</think>CWE-79", 1),
    ("<think>\nCWE-79", 0),
    ("It is CWE-79", 0),
    ("CWE-89\nCWE-79", 0),
    ("CWE-790", 0),
    ("<answer></answer>CWE-79", 0),
    ("CWE-79\n<confidence>0.9</confidence>", 1),
])  # fmt: skip
def test_one_label_behind_the_thought(reply: str, value: float) -> None:
    assert Label().judge(reply, TASK) == value


def test_confidence() -> None:
    assert read_confidence("<answer>a</answer><confidence>0.25</confidence>") == 0.25
    assert read_confidence("<confidence>\n75 %\n</confidence>") == 0.75
    assert read_confidence("<think><confidence>1</confidence></think>a") is None
    assert read_confidence("<confidence>7</confidence>") is None and read_confidence("0.5") is None
    assert read_label("safe\n\n<confidence>0.9</confidence>") == "safe"


def test_a_task_without_a_label_is_refused() -> None:
    with pytest.raises(TaskError, match="t has no label"):
        Label().judge("x", Task("t", "Which?", "c", "", b""))
    assert rewards.make_rewards("label")[0][0].name == "label"
