"""Labels that replies give."""

from __future__ import annotations

import pytest

from coderepairrl import rewards
from coderepairrl.errors import TaskError
from coderepairrl.types import Task

TASK = Task("t", "Which?", "c", "", b"", answer="CWE-79")


RIGHT = (
    *("<think>\nIt may be CWE-89.\n</think>\n<answer>\nCWE-79\n</answer>", "<think>hm</think>CWE-79"),
    *("<answer>\nCWE-79", "CWE-79", "**CWE-079**.", "cwe-79\n", "CWE-79\n<confidence>0.9</confidence>"),
)
WRONG = (
    *("<think>\n<answer>CWE-79</answer>\n</think>\n<answer>CWE-89</answer>", "<think>\nCWE-79"),
    *("<answer>CWE-89</answer> <answer>CWE-79</answer>", "<answer>CWE-79 CWE-89</answer>", "<answer></answer>CWE-79"),
    *("It is CWE-79", "CWE-89\nCWE-79", "CWE-790"),
)


def test_one_label_behind_the_thought() -> None:
    label = rewards.make_rewards("label")[0][0]
    assert label.name == "label"
    assert [reply for reply in (*RIGHT, *WRONG) if label.judge(reply, TASK) == 1] == [*RIGHT]
    assert {label.judge(reply, TASK) for reply in WRONG} == {0}
    with pytest.raises(TaskError, match="t has no label"):
        label.judge("x", Task("t", "Which?", "c", "", b""))
