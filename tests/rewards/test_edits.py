"""patch_edits: what its formula pays for that patch_lines does not, and what neither pays for."""

from __future__ import annotations

import itertools
import math

import pytest

from coderepairrl.rewards import PatchEdits
from coderepairrl.rewards.edits import REACH, dice
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
    assert compare(oracle, other) == pytest.approx((written**2 + changed**2) / 2)


def test_the_same_edit_further_away_earns_less(run: Repository) -> None:
    oracle = edit(run, {30: FIX})
    values = [compare(oracle, edit(run, {at: FIX})) for at in (30, 31, 33, 36, 48)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1.0
    assert values[3] < 0.5
    assert values[4] < math.exp(-17 / REACH) + 1e-9


def test_edits_elsewhere_cost(run: Repository) -> None:
    oracle = edit(run, {30: FIX})
    extra = [edit(run, {30: FIX, **dict.fromkeys(range(0, 2 * n, 2), "    log()\n")}) for n in range(5)]
    values = [compare(oracle, patch) for patch in extra]
    assert values[0] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


@pytest.mark.parametrize(
    ("junk", "most"),
    [
        ("    raise KeyError\n", 0.1),
        ("    pass\n", 0.1),
        ("", 0.1),  # the right line deleted
        (BODY[30] + BODY[30], 0.45),  # typed again: the known weakness
        (BODY[30] + "    total = 0\n", 0.15),
    ],
)
def test_junk_on_the_right_line(run: Repository, junk: str, most: float) -> None:
    assert compare(edit(run, {30: FIX}), edit(run, {30: junk})) <= most


def test_deletions_and_files(run: Repository) -> None:
    oracle = edit(run, {30: ""})
    assert compare(oracle, edit(run, {30: ""})) == 1.0
    assert compare(oracle, edit(run, {10: ""})) < 0.05
    both = run.edit({"a.py": source({30: ""}), "b.py": b"x = 1\n"})
    assert compare(oracle, both) == compare(both, oracle) == 0.5


def test_dice() -> None:
    assert dice("ab", "ab") == 1.0
    assert dice("ab", "") == dice("ab", "cd") == 0.0
