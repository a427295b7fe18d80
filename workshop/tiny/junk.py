"""``python -m workshop.tiny.junk``: the reward of a random edit in the right file, a baseline for figures of rewards.

A reward on which such an edit scores high can rise while nothing is repaired.
"""

from __future__ import annotations

import json
from random import Random
from statistics import fmean

from coderepairrl.rewards.edits import PatchEdits
from coderepairrl.rewards.lines import PatchLines
from coderepairrl.rewards.thesis import PatchSimilarity
from coderepairrl.tasks.patches import format_diff
from workshop.tiny.demonstrations import another_edit
from workshop.tiny.measure import held_out


def score_junk_edits(count: int = 256, seed: int = 0) -> dict[str, float]:
    """Mean reward of a one-line edit beside the bug, by reward, over held-out bugs."""
    rng = Random(f"junk/{seed}")
    rewards = (PatchSimilarity(), PatchLines(), PatchEdits())
    scores: dict[str, list[float]] = {reward.name: [] for reward in rewards}
    for exercise in held_out("test", count, quoted=True):
        broken = exercise.files[exercise.path]
        old, new = another_edit(exercise, rng)
        oracle = format_diff(exercise.path, broken, exercise.fixed)
        junk = format_diff(exercise.path, broken, broken.replace(old, new, 1))
        for reward in rewards:
            scores[reward.name].append(reward.compare(oracle, junk, "python"))
    return {name: round(fmean(values), 4) for name, values in scores.items()}


if __name__ == "__main__":
    print(json.dumps(score_junk_edits()))
