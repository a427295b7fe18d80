"""The reward of this project as a reward function of TRL and of verl: similarity to the reference repair, in [0, 1]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coderepairrl import score


def repair(completions: Sequence[str], reference: Sequence[str], **columns: Any) -> list[float]:
    """TRL: answers that contain a diff, and the data set's column `reference`."""
    return [score(answer, oracle) for answer, oracle in zip(completions, reference, strict=True)]


def repair_line(completions: Sequence[str], head: Sequence[str], tail: Sequence[str], **columns: Any) -> list[float]:
    """TRL: answers whose first line completes a diff, between the columns `head` and `tail`."""
    lines = (answer.partition("\n")[0] for answer in completions)
    return repair([f"{a}{line}{b}" for a, line, b in zip(head, lines, tail, strict=True)], **columns)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Verl: an answer that contains a diff; `ground_truth` is the reference.

    Named by ``custom_reward_function.path=examples/trl_reward/reward.py``. Not tried in verl.
    """
    return score(solution_str, ground_truth)
