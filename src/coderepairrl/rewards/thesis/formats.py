"""The format of tagged answers, and whether they name the right class."""

from __future__ import annotations

import re

from coderepairrl.errors import TaskError
from coderepairrl.rewards.answers import AnswerReward
from coderepairrl.types import Task

_STRICT = re.compile(r"<think>\n(?s:.+?)\n</think>\n<answer>\n[^\n]+\n</answer>\s*")


def tagged_answer(text: str) -> str:
    """What stands between ``<answer>`` and ``</answer>`` (or the end); ``N/A`` if nothing does.

    >>> tagged_answer("<think>hm</think><answer> CWE-79 </answer>"), tagged_answer("CWE-79")
    ('CWE-79', 'N/A')
    """
    _, tag, rest = text.partition("<answer>")
    return rest.partition("</answer>")[0].strip() if tag else "N/A"


def unfenced(text: str) -> str:
    """The first fenced block of `text`; all of it if there is none."""
    line = text.find("\n", text.find("```") + 3) + 1 if "```" in text else 0
    end = text.find("```", line) if line else -1
    return text[line:end] if end >= 0 else text


class ReasoningFormat(AnswerReward):
    r"""The tags of a reasoned answer, in [0, 1].

    1/4 for each of ``<think>\n``, ``\n</think>\n``, ``\n<answer>\n`` and ``\n</answer>`` that stands there exactly
    once, less 0.001 for each character before the first and behind the last; at least 0.

    Unit: share of the tags. Source: the original's code. Known weaknesses: the order is not looked at; a thousand
    characters outside cost all; an empty thought and an empty answer earn as much as any.
    """

    name = "reasoning_format"

    def judge(self, answer: str, task: Task) -> float:
        """The formula above."""
        value = 0.0
        for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"):
            value += 0.25 * (answer.count(tag) == 1)
        if answer.count("<think>\n") == 1:
            value -= 0.001 * answer.index("<think>\n")
        if answer.count("\n</answer>") == 1:
            value -= 0.001 * len(answer.partition("\n</answer>")[2])
        return max(value, 0.0)


class ReasoningFormatStrict(AnswerReward):
    """1 if the whole reply is a thought and an answer of one line, each tag on a line of its own, else 0 (RW8).

    Unit: 0 or 1. Source: the original's code. Known weakness: an answer of several lines, such as any repair, never
    has this format: use it for classification only.
    """

    name = "reasoning_format_strict"

    def judge(self, answer: str, task: Task) -> float:
        """The rule above."""
        return float(_STRICT.fullmatch(answer) is not None)


class Classification(AnswerReward):
    """1 if the tagged answer is the task's label, else 0.

    The label is `Task.answer`, for example ``CWE-79``; what is compared with it stands between ``<answer>`` tags, and
    is ``N/A`` without them.

    Unit: 0 or 1. Source: the original's code. Known weaknesses: compares texts, so another spelling is wrong; with
    few classes, guessing the commonest pays.
    """

    name = "classification"

    def judge(self, answer: str, task: Task) -> float:
        """The rule above. Raises `TaskError` for a task without a label."""
        if not task.answer:
            raise TaskError(f"task {task.id} has no label", fix="put the label into the task's field answer")
        return float(tagged_answer(answer) == task.answer.strip())
