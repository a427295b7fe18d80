"""Notes of scores are counted by kind, also when a policy controls their text."""

from __future__ import annotations

from coderepairrl.stats.measures import Notes
from coderepairrl.types import Ending, Episode, Score


def make_episode(*scores: Score) -> Episode:
    return Episode("e", "t", "train", 1, "g", 0, Ending.DONE, scores=scores)


def test_a_cause_that_all_share_comes_first() -> None:
    """60 of 100 attempts could not be graded, each in another folder; 20 fail tests, 20 pass."""
    counted = Notes()
    for at in range(100):
        missing = f"check failed (exit code 1): python3 -m pytest: /tmp/box{at}/bin/python3: No module named pytest"
        failed = f"check failed (exit code 1): python3 -m pytest: tests/test_{at}.py::test_sum failed"
        note = missing if at < 60 else failed if at < 80 else ""
        counted.add(make_episode(Score("tests", float(not note), 0.5, note), Score("hybrid", 0.5, 0.5, "tested")))
    found = counted.by_reward()
    tests = found["tests"]
    assert (tests.scores, tests.zeros) == (100, 80)
    assert [(kind.count, kind.zeros) for kind in tests.kinds] == [(60, 60), (20, 20)]
    assert tests.kinds[0].note.endswith("/tmp/box0/bin/python3: No module named pytest"), "one of them, as it was"
    assert [(kind.note, kind.count, kind.zeros) for kind in found["hybrid"].kinds] == [("tested", 100, 0)]
    first, most, *rest = counted.zeros(1)
    assert first == "tests: 80 of 100 scores are 0, of which"
    assert most.split()[0] == "60" and "No module named pytest" in most
    assert rest == ["      20  other notes"], "only notes of zeros are listed"


def test_hostile_notes_are_kept_short_few_and_printable() -> None:
    counted = Notes()
    for at in range(2_000):
        word = "".join(chr(ord("a") + int(digit)) for digit in str(at))
        counted.add(make_episode(Score("tests", 0.0, 1.0, f"\x1b[2J\x00{word}\n\u202e" + "y" * 100_000)))
    noted = counted.by_reward()["tests"]
    assert len(noted.kinds) == 501 and sum(kind.count for kind in noted.kinds) == noted.zeros == 2_000
    assert noted.kinds[0].note == "(other notes)" and noted.kinds[0].count == 1_500
    assert all(kind.note.isprintable() and len(kind.note) <= 160 for kind in noted.kinds)
