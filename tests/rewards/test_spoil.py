"""Edits made from a reference by rule: what they are, and what the default reward pays for them on real references."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from statistics import fmean

import pytest

from coderepairrl.rewards import PatchEdits, parse_patch
from rewards.folder import records
from rewards.spoil import COPIES, ZERO, spoiled

HALF = "half of the reference"


def references(language: str) -> Iterator[bytes]:
    if language == "python":
        found = records("swebench/swebench_lite.jsonl.gz")
    else:
        found = records("humaneval_java/humaneval_java.jsonl.gz")
    yield from (row["patch"].encode() for row in found)


@pytest.mark.parametrize("language", ["python", "java"])
def test_what_edits_that_repair_nothing_earn_by_the_default_reward(language: str) -> None:
    values = defaultdict(list)
    for reference in references(language):
        for name, patch in spoiled(reference).items():
            values[name].append(PatchEdits().compare(reference, patch, language))
    mean = {name: fmean(each) for name, each in values.items()}
    for name in ("invisible characters", "parentheses", "other quotes", "a token mutated", "deleted"):
        assert mean[f"right lines: {name}"] <= 0.06, name
    assert max(mean[name] for name in COPIES) <= 0.03
    assert mean["the reference as comments"] < 0.01
    assert mean[HALF] >= 0.35
    assert mean["the reference and its test"] == 1.0
    assert mean["the reference and 20 files"] < 0.1


def test_what_copies_earn_in_other_languages() -> None:
    values = defaultdict(list)
    for row in islice(records("swebench/swebench_multilingual.jsonl.gz"), 0, None, 3):
        reference = row["patch"].encode()
        for name, patch in spoiled(reference).items():
            if name in COPIES:
                values[name].append(PatchEdits().compare(reference, patch))
    assert {name: fmean(each) <= 0.03 for name, each in values.items()} == dict.fromkeys(COPIES, True)


def test_cheap_edits_of_real_references() -> None:
    """All are diffs, the same each time; those that change nothing earn nothing unless the reference does so too."""
    values: dict[str, list[float]] = {}
    for row in islice(records("swebench/swebench_lite.jsonl.gz"), 60):
        reference = row["patch"].encode()
        made = spoiled(reference)
        assert made == spoiled(reference)
        for name, patch in made.items():
            parse_patch(patch)
            values.setdefault(name, []).append(PatchEdits().compare(reference, patch, "python"))
    means = {name: sum(each) / len(each) for name, each in values.items()}
    assert all(means[name] < 0.02 for name in ZERO), means
    assert max(means["junk in the right file"], means["junk in the right hunk"], means["junk on the right line"]) < 0.1
    assert means["right edit, wrong place"] < 0.05
    assert 0.3 < means["reference and noise"] < 0.8
