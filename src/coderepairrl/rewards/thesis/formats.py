"""Format and class of tagged answers."""

from __future__ import annotations

import re

from coderepairrl.errors import TaskError
from coderepairrl.rewards.answers import AnswerReward
from coderepairrl.types import Task

_STRICT = re.compile(r"<think>\n(?s:.+?)\n</think>\n<answer>\n[^\n]+\n</answer>\s*")


def tagged_answer(text: str) -> str:
    """Text between ``<answer>`` and ``</answer>`` (or the end); else ``N/A``.

    >>> tagged_answer("<think>hm</think><answer> CWE-79 </answer>"), tagged_answer("CWE-79")
    ('CWE-79', 'N/A')
    """
    _, tag, rest = text.partition("<answer>")
    return rest.partition("</answer>")[0].strip() if tag else "N/A"


def unfenced(text: str) -> str:
    """First fenced block of `text`, else all of it."""
    line = text.find("\n", text.find("```") + 3) + 1 if "```" in text else 0
    end = text.find("```", line) if line else -1
    return text[line:end] if end >= 0 else text


class ReasoningFormat(AnswerReward):
    r"""Tags of a reasoned answer, in [0, 1].

    1/4 for each of ``<think>\n``, ``\n</think>\n``, ``\n<answer>\n`` and ``\n</answer>`` that occurs exactly once, less
    0.001 for each character before the first and after the last; at least 0.

    Source: the original's code. Known weaknesses: ignores order; empty thoughts and answers earn fully.
    """

    name = "reasoning_format"

    def judge(self, answer: str, task: Task) -> float:
        """Score the tags of `answer`."""
        value = 0.0
        for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"):
            value += 0.25 * (answer.count(tag) == 1)
        if answer.count("<think>\n") == 1:
            value -= 0.001 * answer.index("<think>\n")
        if answer.count("\n</answer>") == 1:
            value -= 0.001 * len(answer.partition("\n</answer>")[2])
        return max(value, 0.0)


class ReasoningFormatStrict(AnswerReward):
    """1 if the reply is a thought and a one-line answer, each tag on a separate line, else 0 (RW8).

    Source: the original's code. Known weakness: for classification only.
    """

    name = "reasoning_format_strict"

    def judge(self, answer: str, task: Task) -> float:
        """Match the whole reply."""
        return float(_STRICT.fullmatch(answer) is not None)


class Classification(AnswerReward):
    """1 if the tagged answer is the task's label (`Task.answer`, such as ``CWE-79``), else 0.

    Source: the original's code. Known weaknesses: another spelling is wrong; with few classes, guessing the commonest
    pays.
    """

    name = "classification"

    def judge(self, answer: str, task: Task) -> float:
        """Compare labels. Raises `TaskError` without a label."""
        if not task.answer:
            raise TaskError(f"task {task.id} has no label", fix="put the label into the task's field answer")
        return float(tagged_answer(answer) == task.answer.strip())
