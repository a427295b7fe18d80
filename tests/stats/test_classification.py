"""Labels: accuracy, F1 and confusion, against published values and plain counting."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from coderepairrl.stats.classification import NONE, OTHER, LabelAnswer, classify, compare_answers
from intervals import read_ends


def make_answers(wanted: Sequence[object], given: Sequence[object | None]) -> list[LabelAnswer]:
    return [
        LabelAnswer(f"t{at}", str(right), None if said is None else str(said), at)
        for at, (right, said) in enumerate(zip(wanted, given, strict=True))
    ]


def test_known_values() -> None:
    """The example in the documentation of scikit-learn's f1_score, precision_score and recall_score: macro averages
    0.2667, 0.2222 and 0.3333."""
    found = classify(make_answers([0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 0, 1]))
    assert found.macro_f1.value == pytest.approx(0.26666667)
    values = [found.classes[name] for name in "012"]
    assert sum(each.precision.value for each in values if each.precision) / 3 == pytest.approx(0.22222222)
    assert sum(each.recall.value for each in values if each.recall) / 3 == pytest.approx(0.33333333)
    assert found.accuracy.value == pytest.approx(1 / 3)
    assert found.confusion == {"0": {"0": 2}, "1": {"0": 1, "2": 1}, "2": {"1": 2}}


def test_counting_gives_the_same() -> None:
    random = Random(0)
    names = ["a", "b", "c", "d"]
    wanted = [random.choice(names[:3]) for _ in range(90)]
    given = [random.choice([right, right, *names, None]) for right in wanted]
    found = classify(make_answers(wanted, given))
    f1 = []
    for name in sorted(set(wanted)):
        both = sum(right == said == name for right, said in zip(wanted, given, strict=True))
        own = found.classes[name]
        assert own.support == wanted.count(name)
        assert own.precision and own.precision.value == pytest.approx(both / given.count(name))
        assert own.recall and own.recall.value == pytest.approx(both / wanted.count(name))
        f1.append(2 * both / (given.count(name) + wanted.count(name)))
        assert own.f1 and own.f1.value == pytest.approx(f1[-1])
    assert found.macro_f1.value == pytest.approx(sum(f1) / len(f1))
    low, high = read_ends(found.macro_f1)
    assert low < found.macro_f1.value < high
    assert found.missing == given.count(None) and found.invalid == given.count("d")
    table = [(right, said, count) for right, row in found.confusion.items() for said, count in row.items()]
    assert sum(count for _, _, count in table) == 90
    assert sum(count for _, said, count in table if said == NONE) == found.missing
    assert sum(count for _, said, count in table if said == OTHER) == found.invalid


def test_a_class_that_is_never_given_has_no_precision_and_an_f1_of_0() -> None:
    found = classify(make_answers("aabb", "aaaa"))
    assert found.classes["b"].precision is None and found.classes["b"].f1 and found.classes["b"].f1.value == 0
    assert found.macro_f1.value == pytest.approx((2 * 2 / 6) / 2)
    with pytest.raises(ValueError, match="no answers"):
        classify([])


def test_whole_clusters_are_drawn() -> None:
    """Copies of answers in the same clusters narrow no interval; a single cluster has none."""
    alone = make_answers("abababab", "aabbabba")
    again = [each._replace(task=f"{each.task}-{copy}") for copy in range(5) for each in alone]
    assert classify(again).macro_f1 == classify(alone).macro_f1
    assert classify([each._replace(cluster="x") for each in alone]).macro_f1.low is None
    few, many = (classify([each._replace(cluster=each.cluster if n else 0) for each in again]) for n in (0, 1))
    assert few.accuracy.low is None and many.accuracy.low is not None


def test_two_policies_on_the_same_tasks() -> None:
    """With one attempt per task, differences are those of the scores; a task with more attempts has the same weight."""
    wanted = list("abcabcabcabc")
    random = Random(0)
    before = make_answers(wanted, [random.choice("abc") for _ in wanted])
    after = make_answers(wanted, [right if random.random() < 0.7 else "a" for right in wanted])
    found = compare_answers(before, after)
    first, last = classify(before), classify(after)
    assert found.macro_f1.value == pytest.approx(last.macro_f1.value - first.macro_f1.value)
    assert found.accuracy.value == pytest.approx(last.accuracy.value - first.accuracy.value)
    assert compare_answers(before * 3, after).macro_f1 == found.macro_f1
    assert compare_answers(before, before).macro_f1.value == 0
    with pytest.raises(ValueError, match="no task"):
        compare_answers(before, [each._replace(task="other") for each in after])
