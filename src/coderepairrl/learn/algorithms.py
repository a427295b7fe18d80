"""Algorithms as combinations of parts (docs/reference/algorithms.md)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from coderepairrl.config.sections import Algorithm, Kind

Ratio = Literal["token", "row", "product"]
Objective = Literal["score", "clip", "cispo"]
Aggregation = Literal["sum", "row", "episode", "batch", "constant"]


class Recipe(NamedTuple):
    """Parts of an algorithm, and its defaults."""

    ratio: Ratio
    objective: Objective
    aggregation: Aggregation
    baseline: Kind
    """`train.advantage`."""
    clip: tuple[float, float] = (0.2, 0.2)
    """`train.eps_low` and `train.eps_high`."""


RECIPES: dict[Algorithm, Recipe] = {
    "reinforce": Recipe("token", "score", "sum", "none"),
    "rloo": Recipe("product", "clip", "row", "leave_one_out"),
    "ppo": Recipe("token", "clip", "batch", "batch"),
    "grpo": Recipe("token", "clip", "episode", "zscore"),
    "dr_grpo": Recipe("token", "clip", "constant", "mean"),
    "bnpo": Recipe("token", "clip", "batch", "zscore"),
    "dapo": Recipe("token", "clip", "batch", "zscore", (0.2, 0.28)),
    "cispo": Recipe("token", "cispo", "batch", "zscore", (0.0, 4.0)),
    "gspo": Recipe("row", "clip", "episode", "zscore", (2e-5, 4e-4)),  # a length-normalised ratio hardly moves
}
"""Every algorithm except `sft`."""
