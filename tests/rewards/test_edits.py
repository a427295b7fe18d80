"""patch_edits: what its formula pays for that patch_lines does not, and what neither pays for."""

from __future__ import annotations

import itertools
import math
import random
import time
import warnings

import pytest

from coderepairrl.rewards import PatchEdits
from coderepairrl.rewards.edits import REACH
from rewards.folder import Repository

compare = PatchEdits().compare

BODY = [f"    step_{i}(total)\n" for i in range(60)]


@pytest.fixture
def run(repository: Repository) -> Repository:
    repository.commit({"a.py": source({})})
    return repository


def source(edits: dict[int, str]) -> bytes:
    return ("def run(total):\n" + "".join(edits.get(i, line) for i, line in enumerate(BODY))).encode()


def edit(run: Repository, edits: dict[int, str]) -> bytes:
    return run.edit({"a.py": source(edits)})


FIX = "    step_30(total, limit=3)\n"


def test_the_formula(run: Repository) -> None:
    oracle = edit(run, {30: "    step_30(total + 1)\n"})
    other = edit(run, {30: "    step_30(total - 1)\n"})
    written = 2 * 6 / (7 + 7)  # indentation, step_30 ( total + 1 ): one of seven differs
    changed = 2 * 1 / (2 + 2)  # + 1 against - 1
    assert compare(oracle, other) == pytest.approx(written * changed)


def test_the_same_edit_further_away_earns_less_and_edits_elsewhere_cost(run: Repository) -> None:
    oracle = edit(run, {30: FIX})
    values = [compare(oracle, edit(run, {at: FIX})) for at in (30, 31, 33, 36, 48)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1.0
    assert values[3] < 0.5
    assert values[4] < math.exp(-17 / REACH) + 1e-9
    extra = [edit(run, {30: FIX, **dict.fromkeys(range(0, 2 * n, 2), "    log()\n")}) for n in range(5)]
    values = [compare(oracle, patch) for patch in extra]
    assert values[0] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


def test_junk_on_the_right_line(run: Repository) -> None:
    oracle = edit(run, {30: FIX})
    for junk, most in (
        ("    raise KeyError\n", 0.1),
        ("    pass\n", 0.1),
        ("", 0.0),  # the right line deleted
        (BODY[30] + BODY[30], 0.0),
        (BODY[29] + BODY[30], 0.0),
        (BODY[30] + "    step_31(total)\n" + BODY[30], 0.0),
        (BODY[30] + "    step_30(total_x)\n", 0.0),
        (BODY[30] + "    total = 0\n", 0.15),
        ("    (step_30(total))\n", 0.0),
        ("    step_30(total)\u200b\n", 0.0),
        ("    step_30(\u00a0total)\n", 0.0),
        ("    step_30(to\x01tal)\n", 0.0),
        ("    step_31(total)\n", 0.0),
        ("    # step_30(total, limit=3)\n", 0.0),
        (BODY[30] + "    # step_30(total, limit=3)\n", 0.0),
        ("    step_30(total)  # step_30(total, limit=3)\n", 0.0),
    ):
        assert compare(oracle, edit(run, {30: junk})) <= most, junk


def test_a_line_typed_again_counts_where_the_reference_does_so(run: Repository) -> None:
    again = edit(run, {30: BODY[30] + BODY[30]})
    assert compare(edit(run, {30: BODY[30] + "    step_30(total, total)\n"}), again) == 0.0
    oracle = edit(run, {30: BODY[30] + BODY[30] + "    log()\n"})
    assert compare(oracle, oracle) == 1.0
    assert compare(oracle, again) > 0.3


def test_deletions_files_and_invisible_characters(run: Repository) -> None:
    marked = edit(run, {30: FIX.replace("limit", "li\u200bmit")})  # a syntax error in most languages
    assert 0.5 < compare(edit(run, {30: FIX}), marked) < 1.0
    oracle = edit(run, {30: ""})
    assert compare(oracle, edit(run, {30: ""})) == 1.0
    assert compare(oracle, edit(run, {10: ""})) < 0.05
    run.commit({"a.py": source({}), "b.py": b"x = 1\n"})
    both = run.edit({"a.py": source({30: ""}), "b.py": b"x = 2\n"})
    assert compare(oracle, both) == compare(both, oracle) == 0.5


def test_comments_count_where_the_reference_changes_nothing_else(run: Repository) -> None:
    oracle = edit(run, {30: BODY[30] + "    # the sum so far\n"})
    assert compare(oracle, oracle) == 1.0
    assert 0.0 < compare(oracle, edit(run, {30: BODY[30] + "    # a sum so far\n"})) < 1.0
    assert compare(oracle, edit(run, {30: BODY[30] + "    the(sum, so, far)\n"})) < 0.05
    both = edit(run, {30: "    # step_30 needs a limit\n" + FIX})
    assert compare(both, edit(run, {30: FIX})) == 1.0
    assert compare(both, edit(run, {30: "    # step_30 needs a limit\n" + BODY[30]})) == 0.0


def test_a_repair_typed_as_a_comment_of_several_lines(repository: Repository) -> None:
    start = "int f() {\n  before();\n%s  after();\n}\n"
    oracle = repository.task({"A.java": start % ""}, {"A.java": start % "  add(a + b);\n"}).reference
    for lines in ("/* add(a + b); */", "/*\nadd(a + b);\n*/", "/* see\n * add(a + b);\n */", "// add(a + b);"):
        assert compare(oracle, repository.edit({"A.java": start % f"{lines}\n"})) == 0.0, lines
    assert compare(oracle, repository.edit({"A.java": start % "  /* it\n adds */ add(a + b);\n"})) == 1.0


BROKEN = b"def broken(:\n"


def test_files_beside_the_repair(run: Repository) -> None:
    run.commit({"a.py": source({}), "other.py": b"x = 1\n", "tests/test_a.py": b"x = 1\n"})
    oracle = edit(run, {30: FIX})

    def value(**files: bytes) -> float:
        named = {name.replace("__", "/") + ".py": content for name, content in files.items()}
        return compare(oracle, run.edit({"a.py": source({30: FIX}), **named}))

    assert value() == 1.0
    assert value(tests__test_a=b"x = 2\n") == 1.0
    assert value(reproduce=b"print(1)\n", test_it=b"import a\n") == 1.0
    assert value(other=b"x = 2\n") == 0.5  # a file of the program
    assert value(reproduce=BROKEN) == 0.5
    assert value(**{f"junk_{i}": b"x = 1\n" for i in range(20)}) < 0.1
    assert value(**{f"tests__test_{i}": b"x = 1\n" for i in range(20)}) < 0.1
    assert compare(oracle, run.edit({"test_it.py": b"import a\n", "tests/test_a.py": b"x = 2\n"})) == 0.0

    oracle = run.edit({"a.py": source({30: FIX}), "tests/test_a.py": b"x = 2\n"})  # here they are part of the repair
    assert compare(oracle, edit(run, {30: FIX})) == 0.5
    assert compare(oracle, oracle) == 1.0


def test_a_new_file_that_does_not_parse_earns_nothing(run: Repository) -> None:
    new = b"def clamp(value, low, high):\n    return min(max(value, low), high)\n"
    oracle = run.edit({"a.py": source({30: FIX}), "limits.py": new})
    assert compare(oracle, run.edit({"limits.py": new})) == 0.5
    assert compare(oracle, run.edit({"limits.py": new.replace(b"high)\n", b"high\n")})) == 0.0
    assert compare(oracle, run.edit({"a.py": source({30: FIX}), "limits.py": new.replace(b":", b"")})) == 0.5
    old = run.edit({"limits.py": new + b"print 1\n"})  # a file for Python 2: nothing is known
    assert compare(old, old) == 1.0
    assert compare(old, run.edit({"limits.py": new + b"print 2\n"})) > 0.5


@pytest.mark.parametrize(
    "source", [b"f'" + b"{a}" * 20_000 + b"'", b"-" * 60_000 + b"1", b"(" * 60_000, b"\0", b"'\\d'\n"]
)
def test_hostile_sources_are_read_in_bounded_time(source: bytes, run: Repository) -> None:
    started = time.process_time()
    patch = run.edit({f"new_{i}.py": b"# %d\n" % i + source for i in range(20)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.0 <= compare(edit(run, {30: FIX}), patch) <= 1.0
    assert time.process_time() - started < 20


@pytest.mark.parametrize(("lines", "words"), [(10, 190), (1, 200_000), (2_000, 20)])
def test_copies_are_found_in_bounded_time(run: Repository, lines: int, words: int) -> None:
    rng = random.Random(0)
    old, new = ("".join(" ".join(rng.choices("abcd", k=words)) + "\n" for _ in range(lines)) for _ in range(2))
    run.commit({"a.py": source({29: old})})
    oracle = run.edit({"a.py": source({29: old, 30: FIX})})
    patch = run.edit({"a.py": source({29: old + old + new, 30: BODY[30] + BODY[30]})})
    started = time.process_time()
    assert compare(oracle, patch) < 0.1
    assert time.process_time() - started < 10
