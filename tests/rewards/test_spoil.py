"""Edits made from a reference by rule: what they are, and what the default reward pays for them on real references."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import islice
from statistics import fmean

import pytest

from coderepairrl.rewards import PatchEdits, parse_patch
from rewards.folder import read_data_rows
from rewards.spoil import COPIES, ZERO, make_spoiled_patches

LITE, JAVA = "swebench/swebench_lite.jsonl.gz", "humaneval_java/humaneval_java.jsonl.gz"


def means(name: str, language: str, every: int = 1, only: Collection[str] = ()) -> dict[str, float]:
    """What each class of edits earns on average; all are diffs, the same each time."""
    values = defaultdict(list)
    for row in islice(read_data_rows(name), 0, None, every):
        reference = row["patch"].encode()
        made = make_spoiled_patches(reference)
        assert made == make_spoiled_patches(reference)
        for kind in only or made:
            if kind in made:
                parse_patch(made[kind])
                values[kind].append(PatchEdits().compare(reference, made[kind], language))
    return {kind: fmean(each) for kind, each in values.items()}


@pytest.mark.parametrize(("name", "language"), [(LITE, "python"), (JAVA, "java")])
def test_what_edits_that_repair_nothing_earn_by_the_default_reward(name: str, language: str) -> None:
    mean = means(name, language)
    for kind in ("invisible characters", "parentheses", "other quotes", "a token mutated", "deleted"):
        assert mean[f"right lines: {kind}"] <= 0.06, kind
    assert max(mean[kind] for kind in COPIES) <= 0.03
    assert mean["the reference as comments"] < 0.01
    assert mean["half of the reference"] >= 0.35
    assert mean["the reference and its test"] == 1.0
    assert mean["the reference and 20 files"] < 0.1
    if language == "python":
        assert all(mean[kind] < 0.02 for kind in ZERO), "unless the reference changes nothing either"
        assert (
            max(mean[f"junk {where}"] for where in ("in the right file", "in the right hunk", "on the right line"))
            < 0.1
        )
        assert mean["right edit, wrong place"] < 0.05
        assert 0.3 < mean["reference and noise"] < 0.8


def test_what_copies_earn_in_other_languages() -> None:
    mean = means("swebench/swebench_multilingual.jsonl.gz", "", 3, COPIES)
    assert {kind: value <= 0.03 for kind, value in mean.items()} == dict.fromkeys(COPIES, True)
