"""patch_similarity is the thesis formula: difflib's own ratios, and the published values on real predictions."""

from __future__ import annotations

import difflib
import random
import re
import time
from collections.abc import Sequence

import pytest
from cydifflib import SequenceMatcher
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.rewards import MalformedPatch, PatchEdits, PatchSimilarity, parse_patch, thesis
from coderepairrl.rewards.thesis import compute_ratio, split_file_texts
from rewards.folder import read_data_rows

compare = PatchSimilarity().compare


def formula(oracle: str, patch: str) -> float:
    """The formula again, on difflib itself and written differently."""

    def split(text: str) -> dict[str, str]:
        starts = [match.start() for match in re.finditer(r"^diff --git", text, re.MULTILINE)]
        parts = [text[i:j].strip() for i, j in zip([0, *starts], [*starts, len(text)], strict=True)]
        names = [re.search(r"diff --git a/(.*) b/", (part.splitlines() or [""])[0]) for part in parts]
        return {name.group(1) if name else "": part for name, part in zip(names, parts, strict=True) if part}

    wanted, given_ = split(oracle), split(patch)
    if not wanted or not given_:
        return 0.0
    both = [difflib.SequenceMatcher(None, wanted[f], given_[f]).ratio() for f in wanted if f in given_]
    return sum(both) / max(len(wanted), len(given_))


def file(name: str, body: str) -> str:
    return f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n{body}\n"


PATCH = st.lists(
    st.tuples(st.sampled_from("abc"), st.text("ab +-\né", max_size=300)).map(lambda f: file(*f)), max_size=3
).map("".join)


@settings(max_examples=150, deadline=None)
@given(oracle=PATCH, patch=PATCH)
def test_equals_difflib(oracle: str, patch: str) -> None:
    assert compare(oracle.encode(), patch.encode()) == pytest.approx(formula(oracle, patch), abs=0)


ALPHABETS = [
    "ab\n",
    "abcdefghijklmnop +-\n",
    *("".join(map(chr, range(*ends))) for ends in ((33, 127), (0x4E00, 0x4F00))),
]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ALPHABETS), st.integers(0, 2**32), st.integers(0, 700), st.sampled_from([0, 1, 5, 40]))
def test_the_ratio_is_difflibs(alphabet: str, seed: int, size: int, edits: int) -> None:
    """Long texts over small and large alphabets, one edited into the other, or (no edits) unrelated."""
    rng = random.Random(seed)
    a = "".join(rng.choices(alphabet, k=size))
    b = list(a) if edits else rng.choices(alphabet, k=rng.randrange(700))
    for _ in range(edits):
        at = rng.randrange(len(b) + 1)
        b[at : at + rng.randrange(9)] = rng.choices(alphabet, k=rng.randrange(9))
    for x, y in ((a, "".join(b)), ("".join(b), a)):
        assert compute_ratio(x, y) == difflib.SequenceMatcher(None, x, y).ratio()


def test_texts_made_to_be_slow_are_bounded() -> None:
    """Every match is one character long, and leaves everything right of it to be looked at again."""
    for marks, beyond in (
        ([chr(0x4E00 + n % 101) for n in range(10_000)], False),
        ([*map(chr, range(33, 127))] * 220, True),
    ):
        a, b = ("".join(f"{mark}{gap}" for mark in marks) for gap in "\xa1\xa2")
        assert (len(a) * len(b) > thesis.LARGEST_PAIRS) == beyond
        started = time.process_time()
        found = compute_ratio(a, b)
        assert time.process_time() - started < (1 if beyond else 5)
        assert found == 2 / (len(a) + len(b)) if beyond else 0 < found < 0.5, "what was found by then"


@settings(max_examples=100, deadline=None)
@given(a=st.text("ab\n", max_size=60), b=st.text("ab\n", max_size=60))
def test_beyond_the_bound_beginning_and_end_count_once(a: str, b: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thesis, "LARGEST_PAIRS", 0)
        assert 0.0 <= compute_ratio(a, b) == compute_ratio(b, a) <= 1.0
        assert compute_ratio(a, a) == 1.0
        assert compute_ratio(a + "x" + b, a + "y" + b) >= 2 * (len(a) + len(b)) / (2 * len(a) + 2 * len(b) + 2)


def gold_patches() -> dict[tuple[str, str], str]:
    return {
        (name, row["instance_id"]): row["patch"]
        for name in ("lite", "verified")
        for row in read_data_rows(f"swebench/swebench_{name}.jsonl.gz")
    }


@pytest.mark.real
def test_the_bound_on_work_changes_no_real_pair() -> None:
    gold, seen = gold_patches(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thesis, "LARGEST_WORK", thesis.LARGEST_WORK // 10)
        for row in read_data_rows("pairs/swebench_pairs.jsonl.gz"):
            oracle = split_file_texts(gold.get((row["dataset"], row["instance_id"]), "").encode())
            made = split_file_texts((row["model_patch"] or "").encode())
            for a, b in ((oracle[name], made[name]) for name in oracle.keys() & made.keys()):
                if len(a) * len(b) <= thesis.LARGEST_PAIRS:
                    seen += 1
                    assert compute_ratio(a, b) == SequenceMatcher(None, a, b).ratio()
    assert seen > 1500


def test_equals_the_published_values() -> None:
    gold = gold_patches()
    seen = 0
    for row in list(read_data_rows("pairs/swebench_pairs.jsonl.gz"))[:800]:
        oracle = gold.get((row["dataset"], row["instance_id"]))
        if oracle and row["sim_paper"] is not None and not row["diff_git_header_missing"] and row["model_patch"]:
            seen += 1
            assert compare(oracle.encode(), row["model_patch"].encode()) == pytest.approx(row["sim_paper"], abs=1e-5)
    assert seen > 400


def test_missing_reordered_and_repeated_files() -> None:
    a, b = file("a", "-x\n+y").encode(), file("b", "-x\n+y").encode()
    assert compare(a, a) == 1.0
    assert compare(a, b) == compare(a, b"") == compare(b"", a) == compare(b"", b"") == 0.0
    assert compare(a, a + b) == compare(a + b, a) == 0.5
    assert compare(a + b, b + a) == 1.0
    assert compare(a, file("a", "-q\n+w").encode() + a) == 1.0  # the last of a name counts
    assert compare(a, a.split(b"\n", 1)[1]) == 0.0  # the known weakness: no `diff --git`, no reward
    assert 0 < compare(file("a", "+\xff").encode("latin-1"), a) < 1


def slide(path: str, hunk: str, lines: Sequence[str]) -> bytes:
    """A patch as the thesis's slides show it, with the ``diff --git`` line that the formula needs."""
    head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ {hunk} @@\n def parse(text):\n"
    return (head + "".join(f"{line}\n" for line in lines)).encode()


def test_the_partial_match_of_the_slides() -> None:
    """The slides say about 0.75; their hunk headers count wrong, so that git would apply neither patch."""
    old, new = ("    return text", "    return text.split()")
    patch = ["-" + old, "+    tokens = text.split()", "+    return tokens"]
    reference = ["-" + old, "+" + new]

    def slides(*hunks: str) -> list[bytes]:
        return [slide("parser.py", *each) for each in zip(hunks, (reference, patch), strict=True)]

    shown, right = slides("-18,1 +18,1", "-18,3 +18,4"), slides("-18,2 +18,2", "-18,2 +18,3")
    assert compare(*shown) == pytest.approx(0.893, abs=0.001)
    for each in shown:
        with pytest.raises(MalformedPatch, match="hunk"):
            parse_patch(each)
    assert compare(*right) == pytest.approx(0.900, abs=0.001)
    assert 0.2 < PatchEdits().compare(*right) < 0.3
