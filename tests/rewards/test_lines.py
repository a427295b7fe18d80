"""patch_lines and patch_edits: properties of the formulas, on diffs that git made."""

from __future__ import annotations

import difflib
import itertools
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.rewards import PatchEdits, PatchLines, parse_patch
from coderepairrl.rewards.lines import compute_lcs_length, compute_line_similarity
from rewards.folder import Repository

compare_lines = PatchLines().compare
Compare = Callable[[bytes, bytes], float]
both = pytest.mark.parametrize("compare", [compare_lines, PatchEdits().compare], ids=["lines", "edits"])

MATHS = b'''"""Sums."""


def add(a, b):
    # the sum
    return a - b


def mul(a, b):
    if not b:
        return 0
    return a * b
'''


def swap(old: bytes, new: bytes, source: bytes = MATHS) -> bytes:
    assert source.count(old) == 1
    return source.replace(old, new)


@pytest.fixture
def maths(repository: Repository) -> Callable[..., bytes]:
    """The diff that turns pairs of old and new text into each other in maths.py."""
    repository.commit({"maths.py": MATHS, "other.py": b"x = 1\n"})

    def edit(*changes: tuple[bytes, bytes], **files: bytes) -> bytes:
        source = MATHS
        for old, new in changes:
            source = swap(old, new, source)
        return repository.edit({"maths.py": source, **{name.replace("_", "."): text for name, text in files.items()}})

    return edit


FIX = (b"a - b", b"a + b")


LINE = b"    return a - b\n"
NO_OPS = (
    (b'"""Sums."""\n', b'"""Sums."""\n\n'),  # a blank line at the top of the right file
    (b"    # the sum\n", b"    # the total\n"),
    (LINE, b"    # return a + b\n" + LINE),
    (LINE, b"    return a - b  # return a + b\n"),
    (LINE, b"        return a - b\n"),
    (LINE, b"    return a - b \n"),
    (LINE, b"    return a - b\r\n"),
    (LINE, b"    return a \n        - b\n"),
)
"""Beside those of the exam of rewards."""
ALIKE = ((b"return a * b", b"return a / b"), (b"if not b", b"if not a"), (b"def mul(a, b)", b"def mul(a, c)"))
"""Changes of other lines, which `patch_lines` does not compare."""


@both
def test_what_is_no_repair_earns_nothing_and_beside_one_costs_nothing(
    maths: Callable[..., bytes], compare: Compare
) -> None:
    oracle = maths(FIX)
    assert compare(b"", oracle) == compare(b"", b"") == 0.0
    for change in (*NO_OPS, *(ALIKE if compare is compare_lines else ())):
        assert compare(oracle, maths(change)) == 0.0, change
    assert compare(oracle, maths((LINE, b"\n    # sum\n    return a + b\n"))) == 1.0


def test_partial_credit_is_ordered(maths: Callable[..., bytes]) -> None:
    oracle, beyond = maths(FIX), maths(FIX, other_py=b"x = 2\n")
    junk = compare_lines(oracle, maths((b"return a - b", b"raise KeyError")))
    near = compare_lines(oracle, maths((b"a - b", b"a * b")))
    wide = compare_lines(oracle, maths(FIX, (b"return 0", b"raise KeyError"), (b'"""Sums."""', b"import os")))
    assert junk == pytest.approx(1 / 3)
    assert junk < near < 1.0
    assert 0.3 < wide < 0.6
    assert compare_lines(oracle, beyond) == compare_lines(beyond, oracle) == 0.5
    assert compare_lines(maths((b"a - b", b"b - a")), maths((b"a - b", b"a - b, 0"))) < 1.0  # order matters
    assert compute_line_similarity((b"f", b"(", b"a", b",", b"b", b")"), (b"f", b"(", b"b", b",", b"a", b")")) < 0.5


def test_insertion_earns_where_the_oracle_inserts(repository: Repository) -> None:
    body = b"".join(b"    step_%d()\n" % i for i in range(30))
    repository.commit({"a.py": b"def run():\n" + body})

    def insert(after: int, text: bytes) -> bytes:
        line = b"    step_%d()\n" % after
        return repository.edit({"a.py": b"def run():\n" + swap(line, line + text, body)})

    oracle = insert(5, b"    check(total, limit=3)\n")
    near = b"    check(total, limit=4)\n"
    assert 0.5 < compare_lines(oracle, insert(5, near)) < 1.0
    assert compare_lines(oracle, insert(6, near)) > 0.5
    assert compare_lines(oracle, insert(25, near)) == 0.0
    assert compare_lines(oracle, insert(5, b"    raise ValueError\n")) == 0.0
    assert compare_lines(oracle, insert(5, b"\tcheck(total, limit=3)\n")) < 1.0  # indentation is part of the line


@both
def test_an_oracle_that_changes_no_code_is_no_no_op(repository: Repository, compare: Compare) -> None:
    for name, before, after in (
        ("comment", "x = 1  # one\n# old words here\ny = 2\n", "x = 1  # one\n# new words there\ny = 2\n"),
        ("trailing comment", "x = 1  # one\ny = 2\n", "x = 1  # two\ny = 2\n"),
        ("indentation", "for a in b:\n    f(a)\ng(a)\n", "for a in b:\n    f(a)\n    g(a)\n"),
        ("line ending", "a = 1\r\nb = 2\r\n", "a = 1\nb = 2\n"),
        ("end of file", "a = 1\nb = 2", "a = 1\nb = 2\n"),
        ("blank lines", "a = 1\nb = 2\n", "a = 1\n\n\nb = 2\n"),
        ("line break", "f(a, b)\n", "f(a,\n  b)\n"),
    ):
        oracle = repository.task({"a.py": before}, {"a.py": after}).reference
        junk = repository.edit({"a.py": f"import os\n{before}"})
        assert compare(oracle, oracle) == 1.0, name
        assert compare(oracle, junk) < 0.5, name
        real = repository.edit({"a.py": before.replace("a", "q").replace("x", "q")})
        assert compare(real, oracle) == 0.0, name  # ... and is one beside an oracle that changes code


@both
def test_modes_renames_and_binary_content_count(repository: Repository, compare: Compare) -> None:
    repository.commit({"a.sh": b"one\ntwo\nthree\n", "b.bin": b"\0\1", "e": b""})
    (repository.folder / "a.sh").chmod(0o755)
    mode = repository.diff()
    binary = repository.edit({"b.bin": b"\0\2"}, "--binary")
    other = repository.edit({"b.bin": b"\0\3"}, "--binary")
    rename = repository.edit({"a.sh": None, "c.sh": b"one\ntwo\nthree\n"}, "-M")
    moved = repository.edit({"a.sh": None, "c.sh": b"one\ntwo\nthree\n"}, "--no-renames")
    elsewhere = repository.edit({"a.sh": None, "d.sh": b"one\ntwo\nthree\n"}, "-M")
    create, delete = repository.edit({"f": b""}), repository.edit({"e": None})
    oracles = [mode, binary, rename, create, delete]
    for oracle in oracles:
        assert compare(oracle, oracle) == 1.0
        assert [compare(oracle, patch) for patch in oracles].count(0.0) == len(oracles) - 1
    assert compare(binary, other) == compare(rename, elsewhere) == 0.0
    assert compare(rename, moved) == compare(moved, rename) == 1.0


@both
def test_comments_of_each_language_earn_nothing(repository: Repository, compare: Compare) -> None:
    marks = ("/* note */", "// note", "-- note", "# note", "; note", "<!-- note -->", "% note")
    comments = dict(zip(("a.c", "a.js", "a.sql", "a.sh", "a.ini", "a.html", "a.tex"), marks, strict=True))
    repository.commit(dict.fromkeys(comments, "alpha beta\n"))
    oracle = repository.edit(dict.fromkeys(comments, "alpha gamma\n"))
    assert compare(oracle, oracle) == 1.0
    assert compare(oracle, repository.edit({name: f"{mark}\nalpha beta\n" for name, mark in comments.items()})) == 0.0
    alien = repository.edit({name: f"{'#' if name != 'a.sh' else '--'} note\nalpha beta\n" for name in comments})
    assert compare(alien, alien) == 1.0


SOURCE = [f"    value_{i} = compute({i}, scale)" for i in range(40)]


def diff(new: list[str], context: int = 3) -> bytes:
    return "\n".join(difflib.unified_diff(SOURCE, new, "a/m.py", "b/m.py", lineterm="", n=context)).encode() + b"\n"


EDITS = st.dictionaries(
    st.integers(0, 39), st.lists(st.text("abcxyz ()=+", min_size=1, max_size=12), max_size=3), min_size=1, max_size=6
)


def edited(edits: dict[int, list[str]]) -> list[str]:
    return [line for i, old in enumerate(SOURCE) for line in edits.get(i, [old])]


def reordered(patch: bytes, rng: random.Random) -> bytes:
    """The same patch, its hunks shuffled."""
    head, *hunks = patch.split(b"\n@@ ")
    rng.shuffle(hunks)
    return b"\n@@ ".join([head, *(hunk.removesuffix(b"\n") for hunk in hunks)]) + b"\n"


@both
@settings(max_examples=150, deadline=None)
@given(ours=EDITS, theirs=EDITS, seed=st.integers(0, 9))
def test_bounds_identity_and_order(
    ours: dict[int, list[str]], theirs: dict[int, list[str]], seed: int, compare: Compare
) -> None:
    a, b = diff(edited(ours)), diff(edited(theirs))
    value = compare(a, b)
    assert 0.0 <= value <= 1.0
    assert compare(a, a) == (1.0 if a.strip() else 0.0)
    if a.strip() and b.strip():
        shuffled = reordered(b, random.Random(seed))
        assert sorted(parse_patch(shuffled)[0].blocks, key=lambda block: block.at) == parse_patch(b)[0].blocks
        assert compare(a, shuffled) == value
        assert compare(b, shuffled) == 1.0


@both
@settings(max_examples=25, deadline=None)
@given(st.permutations(range(40)), st.integers(2, 12))
def test_monotone_in_noise(compare: Compare, order: list[int], size: int) -> None:
    """The more of the oracle's lines are replaced by junk, or the more junk is added elsewhere, the less it earns."""
    oracle = {i: [f"    value_{i} = repaired(scale, {i})"] for i in order[:size]}
    for spoil in (
        lambda n: {i: (["    junk()"] if k < n else new) for k, (i, new) in enumerate(oracle.items())},
        lambda n: {**oracle, **{i: ["    junk()"] for i in order[size : size + n]}},
        lambda n: dict(list(oracle.items())[n:]),
    ):
        values = [compare(diff(edited(oracle)), diff(edited(spoil(n)))) for n in range(size + 1)]
        assert values[0] == 1.0
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(values))
        assert values[-1] < 0.75


@settings(max_examples=200, deadline=None)
@given(st.text("abcd", max_size=40), st.text("abcd", max_size=40))
def test_common_subsequence_is_the_longest(a: str, b: str) -> None:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert compute_lcs_length(a, b) == compute_lcs_length(b, a) == table[-1][-1]


@pytest.mark.real
@both
@pytest.mark.parametrize("kind", ["distinct", "equal", "one line"])
def test_ten_megabytes_take_seconds(kind: str, compare: Compare) -> None:
    head = b"--- a/m.py\n+++ b/m.py\n@@ -1,1 +1,%d @@\n-    value_0 = compute(0, scale)\n"
    if kind == "one line":
        big = head % 1 + b"+" + b"a, b1 = " * 1_250_000 + b"\n"
    else:
        line = b"+    value_%d = compute(%d, scale)  # padding padding\n"
        lines = [line % ((i, i) if kind == "distinct" else (0, 0)) for i in range(180_000)]
        big = head % len(lines) + b"".join(lines)
    assert len(big) > 9_000_000
    started = time.process_time()
    assert 0.0 <= compare(diff(edited({0: ["    repaired()"], 20: []})), big) < 0.5
    assert time.process_time() - started < 30  # 2 to 5 s
