"""Edits made from a reference by rule: what they are, and what the default reward pays for them on real references."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from statistics import fmean

import pytest

from coderepairrl.rewards import PatchEdits, parse
from rewards.folder import records
from rewards.spoil import ZERO, spoiled

OLD = """def total(values, scale):
    result = 0
    for value in values:
        result = result - value * scale
    return result


def name(user):
    # the one that is shown
    return user["first"] + ' ' + user['last']
"""
NEW = OLD.replace("result - value", "result + value").replace("' ' + user", "' ' + user.family or user")
HALF = "half of the reference"


def diff(old: str, new: str, path: str = "m.py") -> bytes:
    body = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n{''.join(body)}".encode()


def test_every_class_is_what_it_is_called() -> None:
    made = spoiled(diff(OLD, NEW))
    for name, patch in made.items():
        if name not in ("empty", "header only"):
            parse(patch)  # raises if it is malformed

    def added(name: str) -> list[bytes]:
        return [line for file in parse(made[name]) for block in file.blocks for line in block.added]

    first, second = OLD.splitlines(True)[3].encode(), OLD.splitlines(True)[9].encode()
    invisible = b"".join(added("right lines: invisible characters"))
    assert invisible.replace("\u200b".encode(), b"") == first + second and invisible.count("\u200b".encode()) == 2
    assert added("right lines: parentheses")[0] == b"        result = (result - value * scale)\n"
    assert added("right lines: other quotes") == [second.translate(bytes.maketrans(b"'\"", b"\"'"))]
    mutated = added("right lines: a token mutated")
    assert len(mutated) == 2 and first not in mutated and second not in mutated
    assert added("right lines: deleted") == []
    assert added("the reference as comments")[0] == b"#         result = result + value * scale \n"
    assert len(parse(made[HALF])[0].blocks) == 1
    assert len(parse(made["the reference and 20 files"])) == 21


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
    assert mean["the reference as comments"] < 0.01
    assert mean[HALF] >= 0.35
    assert mean["the reference and its test"] == 1.0
    assert mean["the reference and 20 files"] < 0.1


def test_cheap_edits_of_real_references() -> None:
    """All are diffs, the same each time; those that change nothing earn nothing unless the reference does so too."""
    values: dict[str, list[float]] = {}
    for row in islice(records("swebench/swebench_lite.jsonl.gz"), 60):
        reference = row["patch"].encode()
        made = spoiled(reference)
        assert made == spoiled(reference)
        for name, patch in made.items():
            parse(patch)
            values.setdefault(name, []).append(PatchEdits().compare(reference, patch, "python"))
    means = {name: sum(each) / len(each) for name, each in values.items()}
    assert all(means[name] < 0.02 for name in ZERO), means
    assert max(means["junk in the right file"], means["junk in the right hunk"], means["junk on the right line"]) < 0.1
    assert means["right edit, wrong place"] < 0.05
    assert 0.3 < means["reference and noise"] < 0.8
